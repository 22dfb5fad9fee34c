"""The engines: any mix of requests equals a model, and failures arrive where they are awaited."""

import errno
import gc
import itertools
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outcore.common.quantities import KIB, MIB
from outcore.storage import (
    BlockFile,
    PosixEngine,
    StorageEngine,
    StorageError,
    Transfer,
    aligned_bytes,
    gather,
    open_engine,
)
from tests.refused import refused
from tests.storage.store_cases import WAIT_S, Gate
from tests.waiting import until

# ---------------------------------------------------------------------- equality with a model


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.sets(st.integers(1, 200_000), min_size=1, max_size=40),
    shifts=st.lists(st.sampled_from([0, 1, 512]), min_size=3, max_size=3), direct=st.booleans(),
    priorities=st.lists(st.integers(-2, 2), min_size=4, max_size=4),
)  # fmt: skip
def test_any_set_of_disjoint_requests_equals_a_bytearray(tmp_path, cuts, shifts, direct, priorities):
    edges = [0, *sorted(cuts), 200_001]
    ranges = list(itertools.pairwise(edges))
    model = np.random.default_rng(len(cuts)).integers(0, 256, 200_001, dtype=np.uint8)

    def shifted(index: int, n_bytes: int) -> np.ndarray:
        shift = shifts[index % 3]
        return aligned_bytes(n_bytes + shift)[shift:]

    with BlockFile(tmp_path / "data.bin", "create", direct=direct) as file, PosixEngine(4, 8 * KIB) as engine:
        transfers = []
        for index, (start, stop) in enumerate(ranges):
            buffer = shifted(index, stop - start)
            buffer[:] = model[start:stop]
            transfers.append(engine.submit_write(file, start, buffer, priority=priorities[index % 4]))
        assert [transfer.wait(WAIT_S) for transfer in transfers] == [stop - start for start, stop in ranges]
        buffers = [shifted(index + 1, stop - start) for index, (start, stop) in enumerate(ranges)]
        for transfer in [engine.submit_read(file, edges[i], buffer) for i, buffer in enumerate(buffers)]:
            transfer.wait(WAIT_S)
        assert all((buffer == model[start:stop]).all() for buffer, (start, stop) in zip(buffers, ranges))
    assert (tmp_path / "data.bin").read_bytes() == model.tobytes()


def test_a_large_request_is_one_transfer_and_uses_several_threads(file: BlockFile, monkeypatch: pytest.MonkeyPatch):
    data = torch.randint(0, 256, (MIB + 777,), dtype=torch.uint8)
    file.write_from(data, 300)
    gate = Gate(monkeypatch)
    target = torch.zeros_like(data)
    with PosixEngine(4, 64 * KIB) as engine:
        transfer = engine.submit_read(file, 300, target)
        for _ in range(4):
            assert gate.entered.acquire(timeout=WAIT_S)  # four threads are in the kernel at once
        assert not transfer.done()
        gate.opened.set()
        assert transfer.wait(WAIT_S) == data.nbytes
        assert transfer.done()
    assert torch.equal(target, data)


def test_tensors_of_any_type_and_empty_requests(file: BlockFile):
    with open_engine("auto") as engine:  # type: ignore[attr-defined]
        assert isinstance(engine, StorageEngine)
        assert engine.name == "posix"
        weights = torch.randn(33, 7, dtype=torch.bfloat16)
        engine.submit_write(file, 11, weights).wait(WAIT_S)
        back = torch.empty_like(weights)
        assert engine.submit_read(file, 11, back).wait(WAIT_S) == weights.nbytes
        assert torch.equal(back, weights)
        assert engine.submit_read(file, 0, torch.empty(0)).wait(WAIT_S) == 0


def test_lower_priority_numbers_go_first(file: BlockFile, monkeypatch: pytest.MonkeyPatch):
    gate = Gate(monkeypatch)
    with PosixEngine(1) as engine:
        first = engine.submit_read(file, 0, aligned_bytes(4096))
        assert gate.entered.acquire(timeout=WAIT_S)
        plan = [(1, 4096), (1, 8192), (0, 12288), (-1, 16384), (0, 20480)]
        rest = [engine.submit_read(file, at, aligned_bytes(4096), priority=priority) for priority, at in plan]
        gate.opened.set()
        for transfer in [first, *rest]:
            transfer.wait(WAIT_S)
    assert gate.offsets == [0, 16384, 12288, 20480, 4096, 8192]


# ---------------------------------------------------------------------- failures


def test_a_failed_piece_fails_the_transfer_after_all_pieces_are_back(file: BlockFile, monkeypatch: pytest.MonkeyPatch):
    real, running, after_done = os.pwritev, [], []
    slow_one = threading.Event()

    def call(fd: int, buffers: list, offset: int) -> int:
        running.append(offset)
        if offset == 64 * KIB:
            raise OSError(errno.EIO, "Input/output error")
        assert slow_one.wait(WAIT_S)
        after_done.append(transfer.done())
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", call)
    with PosixEngine(2, 64 * KIB) as engine:
        transfer = engine.submit_write(file, 0, aligned_bytes(MIB))
        refused(TimeoutError, "not finished", lambda: transfer.wait(0.2))
        slow_one.set()
        with pytest.raises(StorageError, match="EIO") as caught:
            transfer.wait(WAIT_S)
        assert caught.value.offset == 64 * KIB
        with pytest.raises(StorageError):
            transfer.wait()  # every time
        assert after_done == [False]
        assert len(running) == 2  # the other fourteen pieces were not started
        monkeypatch.undo()
        engine.submit_write(file, 0, aligned_bytes(MIB)).wait(WAIT_S)  # the engine goes on


def test_a_file_closed_with_requests_queued_fails_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = BlockFile(tmp_path / "data.bin", "create", MIB)
    gate = Gate(monkeypatch)
    with PosixEngine(1) as engine:
        first = engine.submit_read(file, 0, aligned_bytes(4096))
        second = engine.submit_read(file, 4096, aligned_bytes(4096))
        assert gate.entered.acquire(timeout=WAIT_S)
        closer = threading.Thread(target=file.close)
        closer.start()
        until(lambda: file.closed)
        gate.opened.set()
        assert first.wait(WAIT_S) == 4096
        refused(StorageError, "the file is closed", lambda: second.wait(WAIT_S))
        closer.join(WAIT_S)


def test_bad_requests_are_refused_on_submission(file: BlockFile, tmp_path: Path):
    with PosixEngine(1) as engine:
        refused(ValueError, "non-negative", lambda: engine.submit_read(file, -1, bytearray(1)))
        refused(ValueError, "buffer protocol", lambda: engine.submit_read(file, 0, "text"))
        with BlockFile(file.path, "r") as reader, pytest.raises(StorageError, match="read-only"):
            engine.submit_write(reader, 0, b"x")
    for settings_ in ({"num_threads": 0}, {"block_bytes": 1000}, {"block_bytes": 0}, {"max_requests": 0}):
        with pytest.raises(ValueError, match="must be"):
            PosixEngine(**settings_)
    refused(ValueError, "unknown storage engine", lambda: open_engine("floppy"))


def test_nobody_waited_for_a_failure_is_logged(file: BlockFile, caplog: pytest.LogCaptureFixture):
    with PosixEngine(1) as engine, caplog.at_level(logging.ERROR):
        engine.submit_read(file, 5 * MIB, bytearray(1))
        engine.close()
        gc.collect()
    assert "nobody waited for a transfer that failed" in caplog.text


# ---------------------------------------------------------------------- callbacks, gather


def test_callbacks_run_once_and_their_errors_are_logged(file: BlockFile, caplog: pytest.LogCaptureFixture):
    seen = []
    with PosixEngine(1) as engine:
        transfer = engine.submit_read(file, 0, bytearray(100))
        transfer.add_done_callback(lambda done: seen.append(done.done()))
        transfer.add_done_callback(lambda done: 1 / 0)
        engine.close()
        transfer.add_done_callback(lambda done: seen.append("late"))
    assert seen == [True, "late"]
    assert "ZeroDivisionError" in caplog.text
    assert transfer.wait() == 100


def test_a_callback_may_submit_even_when_the_queue_is_full(file: BlockFile):
    done = threading.Event()
    with PosixEngine(1, max_requests=1) as engine:

        def again(first: Transfer) -> None:
            for _ in range(5):
                engine.submit_read(file, 0, bytearray(10))
            done.set()

        engine.submit_read(file, 0, bytearray(10)).add_done_callback(again)
        assert done.wait(WAIT_S)


def test_gather_waits_for_all_and_reports_the_first_failure():
    parts = [Transfer(10, "a"), Transfer(20, "b"), Transfer(30, "c")]
    steps = []
    whole = gather(parts, "all", [lambda: steps.append("a"), None, lambda: steps.append("c")])
    parts[1].finish(OSError("b broke"))
    parts[2].finish()
    assert not whole.done()
    parts[0].finish()
    refused(OSError, "b broke", lambda: whole.wait(1))
    assert steps == ["c", "a"]
    assert gather([], "nothing").wait(1) == 0
    fine = gather([Transfer(1, "x")], "x", [lambda: 1 / 0])
    assert "under way" in repr(fine)
    part = Transfer(1, "x")
    whole = gather([part], "x", [lambda: 1 / 0])
    part.finish()
    with pytest.raises(ZeroDivisionError):
        whole.wait(1)
    assert "failed" in repr(whole)
    assert part.wait(1) == 1

"""A drive that hangs: every wait ends, says what is under way and where, and leaves files and buffers to the drive."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outcore.common.quantities import KIB, MIB
from outcore.flow.weights import Scratch
from outcore.flow.weights.scratch import FOLDER
from outcore.staging import PinnedPool
from outcore.storage import BlockFile, PosixEngine, StorageError, TensorSpec, TensorStore, aligned_bytes
from outcore.storage.engines import worker as request_queue
from outcore.storage.store import tensor_store as store_traffic
from tests.refused import refused
from tests.waiting import until

WAIT_S = 30.0
LIMIT_S = 0.1
SPECS = [TensorSpec("weights", torch.uint8, (4 * MIB,)), TensorSpec("moments", torch.uint8, (64 * KIB,))]


class Stuck:
    """Reads and writes of the system hang until `go_on`."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.num_stuck = 0
        for name in ("preadv", "pwritev"):
            patch.setattr(os, name, self._hanging(getattr(os, name)))

    def _hanging(self, real):
        def call(*args):
            self.num_stuck += 1
            assert self.go_on.wait(WAIT_S)
            return real(*args)

        return call

    def wait_for(self, num_stuck: int) -> None:
        until(lambda: self.num_stuck >= num_stuck)


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stuck]:
    hanging = Stuck(monkeypatch)
    yield hanging
    hanging.go_on.set()


def test_closing_a_store_ends_and_leaves_it_to_the_drive(tmp_path: Path) -> None:
    engine = PosixEngine(2)
    store = TensorStore.create([tmp_path / "a", tmp_path / "b"], SPECS, engine=engine, stripe_bytes=64 * KIB)
    with pytest.MonkeyPatch.context() as patch:
        hanging = Stuck(patch)
        buffer = torch.full((64 * KIB,), 7, dtype=torch.uint8)
        reads = store.submit_read("moments", buffer)
        hanging.wait_for(1)
        for end in (store.close, store.delete):
            with pytest.raises(
                TimeoutError, match=r"1 transfers did not end within 100 ms.*read of 'moments'"
            ) as caught:
                end(LIMIT_S)
            assert f"of {store.extent('moments')[0].path}" in str(caught.value)
        assert not any(file.closed for file in store._files) and len(list(tmp_path.rglob("tensors.bin"))) == 2
        refused(RuntimeError, "closed", lambda: store.submit_read("moments", buffer))
        refused(StorageError, "in use", lambda: TensorStore.create([tmp_path / "a", tmp_path / "b"], SPECS))
        hanging.go_on.set()
        reads.wait(WAIT_S)
    assert not buffer.any()
    store.delete(WAIT_S)
    assert all(file.closed for file in store._files) and not list(tmp_path.rglob("tensors.bin"))
    store.close()
    engine.close()


def test_a_full_queue_of_a_drive_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: Stuck) -> None:
    monkeypatch.setattr(request_queue, "TIMEOUT_S", LIMIT_S)
    engine = PosixEngine(1, max_requests=1)
    file = BlockFile(tmp_path / "data", "create", MIB)
    begun = engine.submit_read(file, 0, aligned_bytes(KIB))
    stuck.wait_for(1)
    queued = engine.submit_read(file, 0, aligned_bytes(KIB))
    with pytest.raises(TimeoutError, match=r"read of .* of .*data found no room within 100 ms: 1 requests wait"):
        engine.submit_read(file, 0, aligned_bytes(KIB))
    stuck.go_on.set()
    assert begun.wait(WAIT_S) == queued.wait(WAIT_S) == KIB
    engine.close()
    file.close()


def test_a_submission_that_fails_half_way_is_not_over_before_its_first_half(tmp_path, monkeypatch):
    """Its buffer must not be used again as long as a part of it is under way."""
    engine = PosixEngine(1, max_requests=1)
    store = TensorStore.create([tmp_path / "a", tmp_path / "b"], SPECS, engine=engine, stripe_bytes=64 * KIB)
    for module, name in ((request_queue, "TIMEOUT_S"), (store_traffic, "TIMEOUT_S")):
        monkeypatch.setattr(module, name, LIMIT_S)
    with pytest.MonkeyPatch.context() as patch:
        hanging = Stuck(patch)
        whole = store.submit_read("weights", torch.ones(4 * MIB, dtype=torch.uint8))
        assert not whole.done()
        refused(TimeoutError, "1 transfers did not end", lambda: store.close(LIMIT_S))
        hanging.go_on.set()
        refused(TimeoutError, "found no room", lambda: whole.wait(WAIT_S))
    store.close(WAIT_S)
    engine.close()


def test_closing_an_engine_waits_as_long_as_pieces_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv

    def slow(*args) -> int:
        time.sleep(0.3)
        return real(*args)

    monkeypatch.setattr(os, "preadv", slow)
    engine = PosixEngine(1)
    with BlockFile(tmp_path / "data", "create", MIB) as file:
        transfers = [engine.submit_read(file, 0, aligned_bytes(KIB)) for _ in range(8)]
        engine.close(stall_s=2.0)  # 2.4 s in all
        assert all(transfer.wait(0) == KIB for transfer in transfers)


def test_closing_an_engine_whose_drive_hangs(tmp_path: Path, stuck: Stuck) -> None:
    engine = PosixEngine(2)
    file = BlockFile(tmp_path / "data", "create", MIB)
    transfer = engine.submit_read(file, 0, aligned_bytes(KIB))
    stuck.wait_for(1)
    refused(TimeoutError, "nothing has moved for 100 ms, 1 of its threads hang", lambda: engine.close(stall_s=LIMIT_S))
    refused(TimeoutError, r"close of .*data: 1 transfers did not end within 100 ms", lambda: file.close(LIMIT_S))
    assert not transfer.done() and file._descriptor.file.size_bytes() == MIB
    stuck.go_on.set()
    assert transfer.wait(WAIT_S) == KIB


def test_a_program_ends_although_a_thread_hangs_in_the_system(tmp_path: Path) -> None:
    code = f"""
        import os
        from outcore.storage import BlockFile, PosixEngine, aligned_bytes
        from outcore.storage.engines import worker as worker_engine
        worker_engine.STALL_S = 0.3
        end, _ = os.pipe()
        os.preadv = lambda *_: os.read(end, 1)  # nobody ever writes there
        engine = PosixEngine(2)
        file = BlockFile({str(tmp_path / "data")!r}, "create", 1 << 20)
        engine.submit_read(file, 0, aligned_bytes(1 << 20))
        print("over", flush=True)
        """
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, cwd=root, check=False)
    assert done.returncode == 0 and done.stdout == "over\n", done
    assert "threads hang in the drive" in done.stderr and "Traceback" not in done.stderr


def test_scratch_files_in_use_stay_and_the_next_run_removes_them(tmp_path, caplog, monkeypatch):
    scratch = Scratch([tmp_path])
    moments, _ = (scratch.store(spec.name, [spec]) for spec in reversed(SPECS))
    with pytest.MonkeyPatch.context() as patch:
        hanging = Stuck(patch)
        transfer = moments.submit_read("moments", torch.ones(64 * KIB, dtype=torch.uint8))
        hanging.wait_for(1)
        assert scratch.close(LIMIT_S) is False
        assert "read of 'moments'" in caplog.text and str(tmp_path / FOLDER / "moments") in caplog.text
        assert (tmp_path / FOLDER / "moments/tensors.bin").exists()
        assert not (tmp_path / FOLDER / "weights/tensors.bin").exists()
        hanging.go_on.set()
        transfer.wait(WAIT_S)
    assert scratch.close() is True and not (tmp_path / FOLDER).exists()
    assert scratch.close() is True


def test_a_pool_that_is_left_outlives_everybody() -> None:
    pool = PinnedPool(MIB, device="cpu")
    pool.leave()
    kept = weakref.ref(pool)
    del pool
    gc.collect()
    found = kept()
    assert found is not None and found.capacity_bytes == MIB

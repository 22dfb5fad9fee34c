"""The end of an engine: closing with requests queued, threads nobody closes, forks; every wait ends."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from outcore.common.quantities import KIB, MIB
from outcore.storage import BlockFile, PosixEngine, StorageError, Transfer, aligned_bytes
from tests.refused import refused
from tests.storage.store_cases import WAIT_S, Gate


def test_close_finishes_what_was_submitted(file: BlockFile):
    engine = PosixEngine(2, 64 * KIB)
    transfers = [engine.submit_write(file, at * 64 * KIB, aligned_bytes(64 * KIB)) for at in range(40)]
    engine.close()
    assert all(transfer.done() and transfer.error is None for transfer in transfers)
    engine.close()
    refused(RuntimeError, "closed", lambda: engine.submit_read(file, 0, bytearray(1)))


def test_close_with_cancel_fails_what_has_not_begun(file: BlockFile, monkeypatch: pytest.MonkeyPatch):
    gate = Gate(monkeypatch)
    engine = PosixEngine(1, 64 * KIB)
    begun = engine.submit_read(file, 0, aligned_bytes(256 * KIB))  # four pieces, one begins
    waiting = [engine.submit_read(file, 0, aligned_bytes(KIB)) for _ in range(5)]
    assert gate.entered.acquire(timeout=WAIT_S)
    closer = threading.Thread(target=engine.close, kwargs={"cancel": True})
    closer.start()
    for transfer in waiting:
        with pytest.raises(StorageError, match="ECANCELED"):
            transfer.wait(WAIT_S)
    assert not begun.done()  # the kernel still has its buffer
    gate.opened.set()
    refused(StorageError, "ECANCELED", lambda: begun.wait(WAIT_S))
    closer.join(WAIT_S)
    assert not closer.is_alive()


def test_submission_waits_when_the_queue_is_full_and_close_ends_that_wait(file, monkeypatch):
    gate = Gate(monkeypatch)
    engine = PosixEngine(1, max_requests=2)
    for _ in range(3):  # one under way, two queued
        engine.submit_read(file, 0, aligned_bytes(KIB))
        if not gate.offsets:
            assert gate.entered.acquire(timeout=WAIT_S)
    outcome = []

    def submit() -> None:
        try:
            outcome.append(engine.submit_read(file, 0, aligned_bytes(KIB)))
        except RuntimeError as error:
            outcome.append(error)

    blocked = threading.Thread(target=submit)
    blocked.start()
    blocked.join(0.1)
    assert blocked.is_alive()
    closer = threading.Thread(target=engine.close)
    closer.start()
    blocked.join(WAIT_S)
    assert isinstance(outcome[0], RuntimeError)
    gate.opened.set()
    closer.join(WAIT_S)


def test_an_engine_forgotten_without_close_ends_its_threads(file: BlockFile):
    engine = PosixEngine(2)
    threads = list(engine._threads)
    gone = weakref.ref(engine)
    engine.submit_read(file, 0, bytearray(10)).wait(WAIT_S)
    del engine
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_an_idle_engine_keeps_no_buffer_alive(file: BlockFile):
    with PosixEngine(2) as engine:
        buffer = torch.empty(MIB, dtype=torch.uint8)
        gone = weakref.ref(buffer)
        engine.submit_read(file, 0, buffer).wait(WAIT_S)
        del buffer
        deadline_s = time.monotonic() + WAIT_S
        while gone() is not None and time.monotonic() < deadline_s:
            gc.collect()
            time.sleep(0.01)
        assert gone() is None


def test_a_deep_queue_costs_little_memory(file: BlockFile, monkeypatch: pytest.MonkeyPatch):
    gate = Gate(monkeypatch)
    buffer = aligned_bytes(4 * MIB)
    with PosixEngine(4) as engine:
        before_bytes = psutil.Process().memory_info().rss
        transfers = [engine.submit_read(file, 0, buffer) for _ in range(5000)]  # 20 GB asked for
        grown_bytes = psutil.Process().memory_info().rss - before_bytes
        assert grown_bytes < 40 * MIB
        gate_error = threading.Thread(target=engine.close, kwargs={"cancel": True})
        gate_error.start()
        gate.opened.set()
        gate_error.join(WAIT_S)
        assert all(transfer.done() for transfer in transfers)
        assert sum(transfer.error is None for transfer in transfers) <= 8


@pytest.mark.more
def test_a_program_that_forgets_everything_still_writes_and_ends(tmp_path: Path):
    path = tmp_path / "data.bin"
    code = f"""
        from outcore.storage import BlockFile, PosixEngine, aligned_bytes
        engine = PosixEngine(2, 65536)
        file = BlockFile({str(path)!r}, "create", 1 << 20)
        data = aligned_bytes(1 << 20)
        data[:] = 7
        engine.submit_write(file, 0, data)
        """
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == b"\x07" * MIB


def exit_code_of_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked child; 0 when it returned."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    deadline_s = time.monotonic() + WAIT_S
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError("the forked child hung")


def test_a_forked_child_is_told_and_can_open_its_own(file: BlockFile):
    with PosixEngine(2) as engine:
        engine.submit_write(file, 0, b"parent").wait(WAIT_S)

        def child() -> None:
            refused(RuntimeError, "forked process", lambda: engine.submit_read(file, 0, bytearray(6)))
            engine.close()
            text = bytearray(6)
            with BlockFile(file.path) as mine, PosixEngine(1) as own:
                own.submit_read(mine, 0, text).wait(WAIT_S)
            assert text == b"parent"

        assert exit_code_of_child(child) == 0
        engine.submit_read(file, 0, bytearray(6)).wait(WAIT_S)


def test_waiting_in_a_forked_child_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outcore.storage.errors._SLICE_S", 0.01)
    transfer = Transfer(1, "read")

    def child() -> None:
        refused(RuntimeError, "forked", lambda: transfer.wait(None))

    assert exit_code_of_child(child) == 0


def test_a_wait_ends_when_the_threads_are_gone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("outcore.storage.errors._SLICE_S", 0.01)
    transfer = Transfer(1, "read", lambda: False)
    refused(RuntimeError, "threads are gone", transfer.wait)

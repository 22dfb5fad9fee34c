"""The end of a pool: bounded waits, threads that hang, closing with and without what was submitted, forks."""

from __future__ import annotations

import threading
import time

import pytest

from outcore.optim import FP32, SPLIT, JobBatch, OptimizerPool, PoolClosed
from outcore.optim import pool as pool_module
from outcore.optim import reference as torch_backend_module
from outcore.optim.backend import Backend
from tests.optim.cases import all_same, extension, hyper, make_unit, torch_backend, updated
from tests.refused import refused

WAIT_S = 60.0


@pytest.fixture(params=["extension", "torch"])
def backend(request) -> Backend:
    return extension() if request.param == "extension" else torch_backend()


class StuckQueue:
    """A queue whose units never finish."""

    def submit(self, *_args) -> int:
        return 1

    def wait_finished(self, seen: int, timeout_s: float) -> int:
        time.sleep(min(timeout_s, 0.01))
        return seen

    def reap(self) -> list:
        return []

    def next_chunk(self, timeout_s: float) -> None:
        time.sleep(min(timeout_s, 0.01))

    def stop(self, timeout_s: float) -> bool:
        return True

    def delete(self) -> None:
        pass


class StuckBackend:
    name = "stuck"

    def new_queue(self, *_args) -> StuckQueue:
        return StuckQueue()


def test_waits_are_bounded():
    pool = OptimizerPool(1, backend=StuckBackend())  # pyright: ignore[reportArgumentType]
    ticket = pool.submit("layer 7", 0, JobBatch(SPLIT, make_unit(SPLIT, 0)), hyper())
    assert "pending" in repr(ticket)
    for wait in (lambda: pool.wait(ticket, 0.05), lambda: pool.drain(0.05), lambda: pool.close(0.05)):
        refused(TimeoutError, r"within 50 ms: 1 units are pending on 1 threads \(stuck\)", wait)
    assert pool.next_chunk(0.05) is None
    pool.close(cancel=True)
    refused(PoolClosed, "was closed while", lambda: pool.wait(ticket, 5.0))


def test_closing_does_not_wait_for_a_stuck_thread(monkeypatch):
    entered, released = threading.Event(), threading.Event()

    def stuck(*_args) -> None:
        entered.set()
        released.wait(WAIT_S)

    monkeypatch.setattr(torch_backend_module, "update_chunk", stuck)
    pool = OptimizerPool(2, backend=torch_backend())
    unit = make_unit(SPLIT, 0)
    ticket = pool.submit("layer 7", 0, JobBatch(SPLIT, unit), hyper())
    assert entered.wait(WAIT_S)
    with pytest.raises(TimeoutError, match=r"thread of the CPU optimizer \(torch\) did not end within 50 ms"):
        pool.close(0.05, cancel=True)
    assert pool in pool_module._left and not pool._finalizer.alive, "its tensors stay, and nobody waits at exit"
    with pytest.raises(PoolClosed):
        pool.wait(ticket, 5.0)
    pool.close()
    released.set()
    assert pool._queue.stop(WAIT_S)
    pool_module._left.remove(pool)


def test_stopping_the_extension_is_bounded():
    """Threads have to wake up before they end: a stop that takes no time is over before sixteen of them have."""

    def ends_at_once() -> bool:
        pool = OptimizerPool(16, backend=extension())
        ended = pool._queue.stop(0.0)
        assert pool._queue.stop(WAIT_S) and pool._queue.stop(0.0)
        pool.close(cancel=True)
        return ended

    assert not all(ends_at_once() for _ in range(50)), "a stop that waits whatever its limit is"


def test_a_closed_pool(backend):
    pool = OptimizerPool(2, backend=backend, task_numel=4096)
    unit = make_unit(SPLIT, 0)
    expected = updated(SPLIT, unit, hyper())
    ticket = pool.submit(0, 0, JobBatch(SPLIT, unit), hyper())
    pool.close()  # finishes what was submitted
    pool.close()
    assert pool.wait(ticket, 0.0).status == "done"
    assert all_same(unit, expected)
    refused(PoolClosed, "is closed", lambda: pool.submit(0, 0, JobBatch(SPLIT, unit), hyper()))
    with pytest.raises(RuntimeError, match="refused"):  # the queue itself, too
        pool._queue.submit(0, JobBatch(SPLIT, unit), hyper(), "update", False)


def test_closing_with_cancel_ends_what_has_not_started(backend):
    pool = OptimizerPool(1, backend=backend, task_numel=4096)
    tickets = [pool.submit(i, 0, JobBatch(FP32, make_unit(FP32, i, (50_000,) * 3)), hyper()) for i in range(20)]
    pool.close(cancel=True)
    statuses = []
    for ticket in tickets:
        assert ticket.result is not None
        statuses.append(ticket.result.status)
        if ticket.result.status == "cancelled":
            with pytest.raises(PoolClosed, match="before unit"):
                pool.wait(ticket, 1.0)
    assert set(statuses) <= {"done", "cancelled"}
    assert statuses == sorted(statuses, reverse=True)  # in order of submission
    assert pool.next_chunk(5.0) is None
    assert pool.num_pending == 0


def test_an_exception_in_the_body_cancels(backend):
    with pytest.raises(ZeroDivisionError), OptimizerPool(1, backend=backend) as pool:
        pool.submit(0, 0, JobBatch(SPLIT, make_unit(SPLIT, 0)), hyper())
        raise ZeroDivisionError
    with pytest.raises(PoolClosed):
        pool.submit(0, 0, JobBatch(SPLIT, make_unit(SPLIT, 0)), hyper())


def test_a_fork_may_not_use_its_parents_pool(backend, monkeypatch):
    with OptimizerPool(1, backend=backend) as pool:
        monkeypatch.setattr(pool, "_pid", -1)
        refused(RuntimeError, "forked", lambda: pool.submit(0, 0, JobBatch(SPLIT, make_unit(SPLIT, 0)), hyper()))
        refused(RuntimeError, "forked", lambda: pool.next_chunk(1.0))
        pool.close()  # does nothing there
        monkeypatch.undo()
        assert pool.wait(pool.submit(0, 0, JobBatch(SPLIT, make_unit(SPLIT, 0)), hyper()), WAIT_S).status == "done"


def test_a_dropped_pool_ends_its_threads():
    before = threading.active_count()
    pool = OptimizerPool(3, backend="torch")
    assert threading.active_count() == before + 3
    queue = pool._queue
    del pool
    assert all(not thread.is_alive() for thread in queue._threads)  # pyright: ignore[reportAttributeAccessIssue]

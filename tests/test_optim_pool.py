"""The pool: same results as direct calls whatever threads, order and tasks; bounded waits; failures delivered."""

from __future__ import annotations

import math
import os
import threading
import time

import pytest
import torch

from outcore.optim import (
    FORMATS,
    FP32,
    SPLIT,
    SPLIT8,
    ChunkJob,
    JobBatch,
    OptimizerPool,
    PoolClosed,
    StateFormat,
    UpdateFailed,
    default_num_threads,
    grad_sumsq_and_finite,
    open_backend,
)
from outcore.optim import pool as pool_module
from outcore.optim import torch_backend as torch_backend_module
from outcore.optim.backend import Backend
from tests.optim_cases import copy_of, extension, hyper, make_job, same_bytes, torch_backend

WAIT_S = 60.0


@pytest.fixture(params=["extension", "torch"])
def backend(request) -> Backend:
    return extension() if request.param == "extension" else torch_backend()


def make_unit(state_format: StateFormat, seed: int, sizes=(5000, 300, 256)) -> list[ChunkJob]:
    generator = torch.Generator().manual_seed(seed)
    return [
        make_job(state_format, numel, generator, element_offset=(seed * 10 + i) * 65536)
        for i, numel in enumerate(sizes)
    ]


def updated(state_format: StateFormat, unit: list[ChunkJob], now) -> list[ChunkJob]:
    """The same unit after a direct update, for comparison."""
    copies = [copy_of(job) for job in unit]
    for job in copies:
        extension().update(state_format, job, now)
    return copies


def all_same(a: list[ChunkJob], b: list[ChunkJob]) -> bool:
    return all(same_bytes(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("state_format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("guard", [False, True])
def test_results_are_those_of_direct_calls(backend, state_format, guard):
    units = [make_unit(state_format, seed) for seed in range(4)]
    expected = [updated(state_format, unit, hyper(seed=3)) for unit in units]
    with OptimizerPool(3, backend=backend, task_numel=4096) as pool:
        tickets = [
            pool.submit(i, -i, JobBatch(state_format, unit), hyper(seed=3), guard=guard) for i, unit in enumerate(units)
        ]
        for i, ticket in enumerate(tickets):
            result = pool.wait(ticket, WAIT_S)
            assert (result.unit_id, result.status) == (i, "done")
            assert 0 < result.started_s <= result.finished_s
            assert result.busy_s > 0
            assert (result.stats is not None) is guard
            assert pool.done(ticket)
    for unit, after in zip(units, expected):
        assert all_same(unit, after)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_sum_of_squares_of_a_unit(backend, threads):
    grads = [torch.randn(n, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (10_000, 1, 4096, 77_777)]
    expected = 0.0
    for grad in grads:
        expected += grad_sumsq_and_finite(grad, backend=extension()).sumsq
    with OptimizerPool(threads, backend=backend, task_numel=8192) as pool:
        stats = pool.wait(pool.submit_sumsq("layer", 0, grads), WAIT_S).stats
        assert stats == (expected, True)
        grads[2][4095] = math.inf
        stats = pool.wait(pool.submit_sumsq("layer", 0, grads), WAIT_S).stats
        assert stats is not None
        assert not stats.all_finite
        assert math.isnan(stats.sumsq)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 2e18])
def test_a_guarded_unit_with_a_bad_gradient_is_left_alone(backend, bad):
    """Also a finite one whose square would overflow the second moment."""
    unit = make_unit(SPLIT, 1)
    unit[1].grad[299] = bad
    before = [copy_of(job) for job in unit]
    with OptimizerPool(2, backend=backend, task_numel=4096) as pool:
        ticket = pool.submit("layer", 0, JobBatch(SPLIT, unit), hyper(), guard=True, notify_chunks=True)
        result = pool.wait(ticket, WAIT_S)
        assert result.status == "skipped"
        assert result.stats is not None
        assert result.stats.all_finite is (bad == 2e18)
        chunks = [pool.next_chunk(WAIT_S) for _ in unit]
        assert [(c.chunk_index, c.status) for c in chunks if c] == [(0, "skipped"), (1, "skipped"), (2, "skipped")]
        scaled = pool.submit("layer", 0, JobBatch(SPLIT, unit), hyper(grad_scale=1e-3), guard=True)
        assert pool.wait(scaled, WAIT_S).status == ("done" if bad == 2e18 else "skipped")
    assert bad == 2e18 or all_same(unit, before)


def test_chunks_are_reported_as_they_complete(backend):
    units = {name: make_unit(SPLIT8, seed) for seed, name in enumerate("abc")}
    with OptimizerPool(2, backend=backend, task_numel=4096) as pool:
        assert pool.next_chunk(0.0) is None
        tickets = {
            name: pool.submit(name, 0, JobBatch(SPLIT8, unit), hyper(), guard=name == "b", notify_chunks=True)
            for name, unit in units.items()
        }
        silent = pool.submit("silent", 0, JobBatch(SPLIT8, make_unit(SPLIT8, 9)), hyper())
        seen = set()
        for _ in range(9):
            chunk = pool.next_chunk(WAIT_S)
            assert chunk is not None
            assert chunk.status == "done"
            assert chunk.ticket is tickets[chunk.ticket.unit_id]  # pyright: ignore[reportArgumentType]
            seen.add((chunk.ticket.unit_id, chunk.chunk_index))
        assert seen == {(name, i) for name in "abc" for i in range(3)}
        pool.wait(silent, WAIT_S)
        assert pool.next_chunk(0.01) is None
        assert pool.num_pending == 0
        assert not pool._live


def test_units_needed_first_are_done_first(backend):
    """With one thread: whatever was queued when a unit started was not needed sooner."""
    sizes = (40_000,) * 4
    units = [JobBatch(FP32, make_unit(FP32, seed, sizes)) for seed in range(8)]
    compared = 0
    for _ in range(50):
        with OptimizerPool(1, backend=backend, task_numel=4096) as pool:
            submitted = []
            for i, unit in enumerate(units):
                priority = -(i % 4)
                ticket = pool.submit(i, priority, unit, hyper())
                submitted.append((priority, time.perf_counter(), ticket))
            results = [(p, at, pool.wait(t, WAIT_S)) for p, at, t in submitted]
        for priority, queued_s, result in results:
            for other_priority, _, other in results:
                if priority < other_priority and queued_s < other.started_s:
                    compared += 1
                    assert result.started_s <= other.started_s
        if compared >= 5:
            return
    pytest.fail("no unit ever waited in the queue")


def test_a_unit_can_be_moved_in_the_queue(backend):
    sizes = (40_000,) * 4
    units = [JobBatch(FP32, make_unit(FP32, seed, sizes)) for seed in range(5)]
    for _ in range(200):
        with OptimizerPool(1, backend=backend, task_numel=4096) as pool:
            tickets = [pool.submit(i, i, unit, hyper()) for i, unit in enumerate(units)]
            moved = pool.reprioritise(tickets[4], -1)
            moved_s = time.perf_counter()
            results = [pool.wait(ticket, WAIT_S) for ticket in tickets]
            assert not pool.reprioritise(tickets[4], 0)  # it has finished
        waiting = [result for result in results[:4] if result.started_s > moved_s]
        if moved and waiting:
            assert all(results[4].started_s < result.started_s for result in waiting)
            return
    pytest.fail("no unit could be moved before it started")


def test_many_threads_submit_at_once(backend):
    units = [[make_unit(SPLIT, 10 * i + j, (700, 256)) for j in range(5)] for i in range(4)]
    expected = [[updated(SPLIT, unit, hyper()) for unit in group] for group in units]
    errors: list[BaseException] = []
    with OptimizerPool(3, backend=backend, task_numel=4096) as pool:

        def work(group) -> None:
            try:
                for ticket in [pool.submit(id(unit), 0, JobBatch(SPLIT, unit), hyper()) for unit in group]:
                    pool.wait(ticket, WAIT_S)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(group,)) for group in units]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors
    assert all(all_same(a, b) for group, after in zip(units, expected) for a, b in zip(group, after))


def test_wait_any_and_drain(backend):
    with OptimizerPool(2, backend=backend) as pool:
        tickets = [pool.submit(i, 0, JobBatch(SPLIT, make_unit(SPLIT, i)), hyper()) for i in range(4)]
        first = pool.wait_any(tickets, WAIT_S)
        assert first in tickets
        assert pool.done(first)
        pool.drain(WAIT_S)
        assert all(ticket.result is not None for ticket in tickets)
        assert "done" in repr(tickets[0])
        assert pool.wait_any(tickets, 0.0) is tickets[0]
        with pytest.raises(ValueError, match="at least one ticket"):
            pool.wait_any([], 1.0)


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
        with pytest.raises(TimeoutError, match=r"within 50 ms: 1 units are pending on 1 threads \(stuck\)"):
            wait()
    assert pool.next_chunk(0.05) is None
    pool.close(cancel=True)
    with pytest.raises(PoolClosed, match="was closed while"):
        pool.wait(ticket, 5.0)


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
    with pytest.raises(PoolClosed, match="is closed"):
        pool.submit(0, 0, JobBatch(SPLIT, unit), hyper())
    with pytest.raises(PoolClosed):
        pool.reprioritise(ticket, 1)
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


@pytest.mark.parametrize("guard", [False, True])
def test_a_failure_in_torch_reaches_who_waits(monkeypatch, guard):
    def fails(*_args):
        raise MemoryError("no room")

    monkeypatch.setattr(torch_backend_module, "sum_squares" if guard else "update_chunk", fails)
    with OptimizerPool(2, backend="torch") as pool:
        batch = JobBatch(SPLIT, make_unit(SPLIT, 0))
        ticket = pool.submit("layer 3", 0, batch, hyper(), guard=guard, notify_chunks=True)
        with pytest.raises(UpdateFailed, match=r"unit 'layer 3' failed \(MemoryError: no room\).*last checkpoint"):
            pool.wait(ticket, WAIT_S)
        chunks = [pool.next_chunk(WAIT_S) for _ in range(3)]
        assert all(chunk is not None and chunk.status == "failed" for chunk in chunks)


def test_tensors_live_until_their_unit_has_finished(backend):
    with OptimizerPool(2, backend=backend, task_numel=4096) as pool:
        ticket = pool.submit(0, 0, JobBatch(FP32, make_unit(FP32, 0, (100_000,) * 3)), hyper())
        assert ticket.ticket_id in pool._pending or pool.done(ticket)
        pool.wait(ticket, WAIT_S)
        assert not pool._pending


def test_workers_may_be_pinned():
    cpu = min(os.sched_getaffinity(0))
    unit = make_unit(SPLIT, 0)
    expected = updated(SPLIT, unit, hyper())
    with OptimizerPool(2, backend=extension(), cpus=[cpu, cpu]) as pool:
        pool.wait(pool.submit(0, 0, JobBatch(SPLIT, unit), hyper()), WAIT_S)
    assert all_same(unit, expected)


def test_what_a_pool_refuses():
    with pytest.raises(ValueError, match="1 to 1024 threads"):
        OptimizerPool(0)
    with pytest.raises(ValueError, match="multiple of 4096"):
        OptimizerPool(1, task_numel=1000)
    with pytest.raises(ValueError, match="cpus must name"):
        OptimizerPool(2, cpus=[0])
    with pytest.raises(ValueError, match="cpus must name"):
        OptimizerPool(1, cpus=[10**6])
    with pytest.raises(ValueError, match="'auto', 'extension' or 'torch'"):
        OptimizerPool(1, backend="gpu")  # pyright: ignore[reportArgumentType]
    with OptimizerPool(1, backend="torch") as pool, pytest.raises(ValueError, match="gradients only"):
        pool.submit(0, 0, JobBatch.of_grads([torch.ones(3)]), hyper())


def test_a_fork_may_not_use_its_parents_pool(backend, monkeypatch):
    with OptimizerPool(1, backend=backend) as pool:
        monkeypatch.setattr(pool, "_pid", -1)
        with pytest.raises(RuntimeError, match="forked"):
            pool.submit(0, 0, JobBatch(SPLIT, make_unit(SPLIT, 0)), hyper())
        with pytest.raises(RuntimeError, match="forked"):
            pool.next_chunk(1.0)
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


def test_defaults():
    assert 1 <= default_num_threads() <= max(1, (os.cpu_count() or 1) - 2)
    assert open_backend("torch").name == "torch"
    assert open_backend("extension").name.startswith("extension")
    with OptimizerPool() as pool:
        assert pool.num_threads == default_num_threads()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="nice values of threads are Linux's")
def test_workers_go_behind_the_threads_that_launch_and_copy():
    def nice_values() -> dict[str, int]:
        return {tid: os.getpriority(os.PRIO_PROCESS, int(tid)) for tid in os.listdir("/proc/self/task")}

    before = nice_values()
    with OptimizerPool(3, backend=extension()) as pool:
        unit = make_unit(FP32, 1)
        pool.wait(pool.submit("unit", 0, JobBatch(FP32, unit), hyper()), WAIT_S)  # a worker is at work
        deadline_s = time.monotonic() + WAIT_S
        while True:
            now = nice_values()
            workers = [nice for tid, nice in now.items() if tid not in before]
            own = now[str(threading.get_native_id())]
            if len(workers) == 3 and set(workers) == {min(19, own + 5)}:
                break
            assert time.monotonic() < deadline_s, (own, workers)
            time.sleep(0.01)
    assert own == before[str(threading.get_native_id())]

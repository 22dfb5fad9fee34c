"""The pool: same results as direct calls whatever threads, order and tasks; failures delivered."""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import replace

import pytest
import torch

from outcore.optim import (
    FORMATS,
    FP32,
    SPLIT,
    SPLIT8,
    JobBatch,
    OptimizerPool,
    UpdateFailed,
)
from outcore.optim import reference as torch_backend_module
from outcore.optim.backend import Backend
from tests.optim.cases import (
    all_same,
    copy_of,
    extension,
    hyper,
    make_unit,
    torch_backend,
    updated,
)
from tests.refused import refused

WAIT_S = 60.0


@pytest.fixture(params=["extension", "torch"])
def backend(request) -> Backend:
    return extension() if request.param == "extension" else torch_backend()


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


@pytest.mark.parametrize("state_format", [f for f in FORMATS if not f.compressed], ids=lambda f: f.name)
def test_an_update_that_can_be_taken_back(backend, state_format):
    """States stay as they were, the new ones are beside them; parameters are new, and kept as they were."""
    unit = make_unit(state_format, 3)
    before, expected = [copy_of(job) for job in unit], updated(state_format, unit, hyper())
    jobs = JobBatch(state_format, unit)
    own = [job.param for job in unit if job.param is not None]
    states, kept = [torch.zeros_like(job.state) for job in unit], torch.zeros_like(torch.cat(own))
    ahead = jobs.ahead(states, kept)
    with OptimizerPool(3, backend=backend, task_numel=4096) as pool:
        pool.wait(pool.submit("layer", 0, ahead, hyper()), WAIT_S)
        assert all(torch.equal(job.state, old.state) for job, old in zip(unit, before))
        assert torch.equal(kept, torch.cat([old.param for old in before if old.param is not None]))
        assert all_same([replace(job, state=to) for job, to in zip(unit, states)], expected)
        for param, old in zip(own, kept.split([len(param) for param in own])):
            param.copy_(old)
        pool.wait(pool.submit("layer", 0, jobs, hyper()), WAIT_S)
        assert all_same(unit, expected)


def test_what_cannot_be_updated_elsewhere():
    state_format = SPLIT.on_drive
    jobs = JobBatch(state_format, make_unit(state_format, 0))
    states, params = [job.state for job in jobs.jobs], torch.zeros(jobs.numel, dtype=torch.bfloat16)
    refused(ValueError, "updated in place", lambda: jobs.ahead(states, params))
    jobs = JobBatch(SPLIT, make_unit(SPLIT, 0))
    states = [job.state for job in jobs.jobs]
    refused(ValueError, "needs .* bytes, got 64", lambda: jobs.ahead([state[:64] for state in states], params))
    refused(ValueError, "kept in as many of that type", lambda: jobs.ahead(states, params.float()))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_sum_of_squares_of_a_unit(backend, threads):
    grads = [torch.randn(n, generator=torch.Generator().manual_seed(n)).bfloat16() for n in (10_000, 1, 4096, 77_777)]
    expected = 0.0
    for grad in grads:
        expected += extension().grad_sumsq_and_finite(grad).sumsq
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
        refused(ValueError, "at least one ticket", lambda: pool.wait_any([], 1.0))


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


def test_what_a_pool_refuses():
    refused(ValueError, "1 to 1024 threads", lambda: OptimizerPool(0))
    refused(ValueError, "multiple of 4096", lambda: OptimizerPool(1, task_numel=1000))
    refused(ValueError, "cpus must name", lambda: OptimizerPool(2, cpus=[0]))
    refused(ValueError, "cpus must name", lambda: OptimizerPool(1, cpus=[10**6]))
    with pytest.raises(ValueError, match="'auto', 'extension' or 'torch'"):
        OptimizerPool(1, backend="gpu")  # pyright: ignore[reportArgumentType]
    with OptimizerPool(1, backend="torch") as pool, pytest.raises(ValueError, match="gradients only"):
        pool.submit(0, 0, JobBatch.of_grads([torch.ones(3)]), hyper())


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

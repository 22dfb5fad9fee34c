"""Parts of the streaming engine: slot plans, prefetching, failures in mid-step, loss scaling, host memory."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outcore.engine.base import EngineError, NonFiniteLossError
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.gradients.download import GradAccumulator, GradientDownload
from outcore.engine.stream.settings import StreamSettings
from outcore.engine.stream.state import LossScaler, seed_of
from outcore.flow.parts import SlabLayout
from outcore.flow.trace import PhaseClock, wait_for
from outcore.flow.weights.prefetch import plan_slots
from outcore.staging.pool.pool import HostMemory, pageable
from tests.engine.inside import parts_of
from tests.flow.models import TINY_SETTINGS, plain_batch, set_dropout, tiny_loaded
from tests.refused import refused

TINY = replace(TINY_SETTINGS, chunk_numel=StreamSettings.chunk_numel)
pytestmark = pytest.mark.usefixtures("one_thread")


@given(st.lists(st.integers(0, 6), max_size=40), st.integers(1, 4))
def test_every_use_finds_its_slab_and_no_copy_overwrites_one_in_use(sequence, num_buffers):
    plan = plan_slots(sequence, num_buffers)
    content: dict[int, int] = {}
    for at, (key, use) in enumerate(zip(sequence, plan, strict=True)):
        assert 0 <= use.buffer < num_buffers
        if use.copy:
            content[use.buffer] = key
            users = [i for i in range(at) if plan[i].buffer == use.buffer]
            assert use.free_after == (users[-1] if users else -1)
            assert not users or users[-1] <= at - num_buffers  # copies go ahead by so many uses
        assert content[use.buffer] == key


@pytest.mark.parametrize("num_buffers", [1, 2, 3, 4])
def test_a_step_copies_each_layer_twice_less_what_is_still_there(num_buffers):
    up = list(range(10))
    plan = plan_slots(up + up[::-1], num_buffers)
    assert sum(use.copy for use in plan) == 2 * len(up) - num_buffers
    refused(ValueError, "at least one", lambda: plan_slots(up, 0))


def test_accumulator_adds_copies_and_clears():
    layout = SlabLayout([("a", torch.nn.Parameter(torch.zeros(3))), ("b", torch.nn.Parameter(torch.zeros(2, 2)))])
    flat = torch.full((layout.numel,), float("nan"))
    total = GradAccumulator(layout, flat)
    total.add([torch.ones(3), None])
    total.add([torch.ones(3), None])
    assert total.complete().tolist() == [2.0, 2.0, 2.0] + [0.0] * (layout.trainable_numel - 3)


def test_loss_scaler_follows_deepspeeds_rules():
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    theirs = DynamicLossScaler(2.0**10, 3, 1.0, 2, False, raise_error_at_min_scale=False)
    mine = LossScaler(True, 2.0**10, 3, 2, 1.0)
    generator = torch.Generator().manual_seed(1)
    for _ in range(60):
        overflow = bool(torch.rand((), generator=generator) < 0.3) and mine.cur_scale > 1
        mine.update(overflow)
        _update(theirs, overflow)
        assert (mine.cur_scale, mine.cur_hysteresis, mine.cur_iter, mine.last_overflow_iter) == (
            theirs.cur_scale, theirs.cur_hysteresis, theirs.cur_iter, theirs.last_overflow_iter,
        )  # fmt: skip
    low = LossScaler(True, 1.0, hysteresis=1)
    refused(EngineError, "lowest loss scale", lambda: low.update(True))
    off = LossScaler(False)
    off.update(True)
    assert off.cur_scale == 1.0 and off.state() == {}
    refused(ValueError, "positive scales", lambda: LossScaler(True, -1.0))


def _update(scaler, overflow: bool) -> None:
    """DeepSpeed's update asks torch.distributed for the rank when it has something to log."""
    with mock.patch("deepspeed.runtime.fp16.loss_scaler.dist.get_rank", return_value=1):
        scaler.update_scale(overflow)


def test_seeds_differ_by_place():
    seeds = {seed_of(s, t, m, u) for s in range(3) for t in range(3) for m in range(3) for u in range(3)}
    assert len(seeds) == 81 and all(0 <= seed < 2**63 for seed in seeds)


class _Lease:
    is_released = False

    def __init__(self, pool, n_bytes):
        self.pool, self.tensor = pool, torch.ones(n_bytes, dtype=torch.uint8)

    def release(self):
        self.is_released = True
        self.pool.free_bytes += len(self.tensor)


class _Pool:
    """A pinned pool of so many bytes."""

    is_pinned = True

    def __init__(self, free_bytes):
        self.free_bytes = free_bytes

    def lease(self, n_bytes, owner):
        assert n_bytes > 0, "as the pool does"
        self.free_bytes -= n_bytes
        return _Lease(self, n_bytes)


def _memory_of(free_bytes, reserve_bytes=0):
    return HostMemory(_Pool(free_bytes), reserve_bytes)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("free_pages", "pinned"), [
    (100, set(range(8))),
    (13, {0, 1, 3, 5, 7}),  # ends of 2 pages, and nine pages for six layers of 3
    (4, {0, 7}),
    (3, {0}),
    (0, set()),
])  # fmt: skip
def test_pinned_memory_is_spread_over_the_layers(free_pages, pinned):
    pages = [2, 3, 3, 3, 3, 3, 3, 2]
    sizes = [(index, count * 4096 - 100) for index, count in enumerate(pages)]
    memory = _memory_of(free_pages * 4096)
    found = memory.which_pinned(sizes)
    assert found == pinned
    assert sum(pages[i] for i in found) <= free_pages
    for index, n_bytes in sizes:
        memory.take(n_bytes, "a home", pinned=index in found)
    assert memory.pinned_bytes == sum(sizes[i][1] for i in found)


def test_nothing_is_pinned_without_a_pool_or_homes():
    assert HostMemory(None).which_pinned([(0, 100)]) == frozenset()
    assert _memory_of(10000).which_pinned([]) == frozenset()
    assert _memory_of(10000).which_pinned([(4, 100)]) == {4}


def test_host_memory_is_pinned_while_the_pool_lasts():
    memory = _memory_of(10000, reserve_bytes=1000)
    first, second, third = memory.take(6000, "a"), memory.take(6000, "b"), memory.take(2000, "c", pinned=False)
    assert (memory.pinned_bytes, memory.pageable_bytes) == (6000, 8000)
    assert [t.numel() for t in (first, second, third)] == [6000, 6000, 2000]
    assert memory.take(0, "nothing of this unit").numel() == 0
    assert not bool(first.any() or second.any())
    memory.give_back(second)
    memory.give_back(first.fill_(1))
    assert (memory.pinned_bytes, memory.pageable_bytes) == (0, 2000)
    again = memory.take(6000, "in its place")
    assert (memory.pinned_bytes, memory.pageable_bytes) == (6000, 2000) and not bool(again.any())
    memory.close()
    memory.close()
    assert pageable(0).numel() == 0 and pageable(5000).data_ptr() % 4096 == 0


def test_phase_clock_adds_up_parts_of_a_phase():
    clock = PhaseClock(torch.device("cpu"))
    for phase in ("forward", "backward", "forward"):
        clock.start(phase)
    clock.stop()
    found = clock.seconds()
    assert set(found) == {"forward", "backward"} and all(math.isfinite(s) and s >= 0 for s in found.values())


class Event:
    """Of a GPU that reaches it at the given query, or never."""

    def __init__(self, at_query: int | None) -> None:
        self.at_query, self.queries = at_query, 0

    def query(self) -> bool:
        self.queries += 1
        return self.queries == self.at_query


def test_waiting_for_a_gpu_is_bounded():
    event = Event(at_query=3)
    wait_for(event, "the step", 60.0)
    assert event.queries == 3
    wait_for(123.0, "a moment of the host's clock", 0.0)
    with pytest.raises(TimeoutError, match=r"the GPU did not finish the step within 50 ms: it hangs"):
        wait_for(Event(at_query=None), "the step", 0.05)


def test_a_gpu_that_hangs_ends_the_step(engine, monkeypatch):
    """The step's end never comes: the reason comes out, and no state has changed."""
    before = [p.detach().clone() for p in engine.loaded.model.parameters()]
    monkeypatch.setattr(PhaseClock, "wait", lambda _: wait_for(Event(at_query=None), "the step", 0.05))
    refused(TimeoutError, "the GPU did not finish the step", lambda: engine.train_step([plain_batch()], 1e-3))
    assert all(torch.equal(a, b) for a, b in zip(before, engine.loaded.model.parameters(), strict=True))


@pytest.fixture
def engine():
    loaded = tiny_loaded("llama")
    set_dropout(loaded.model, 0.0)
    built = build_stream_engine(loaded, replace(TINY, activations="ram"), device="cpu", pinned_grant=False, trial=False)
    yield built
    parts_of(built).updates._pending.clear()
    built.close()


def test_checkpoints_of_longer_rows_replace_those_of_shorter_ones(engine):
    """Frozen layers have no gradient homes to lend: their checkpoints' RAM is their own."""
    activations, memory = parts_of(engine).schedule.activations, parts_of(engine).memory
    activations._first_staying, activations._lend = len(parts_of(engine).units.layers), lambda layer: None
    before = memory.pinned_bytes + memory.pageable_bytes
    for length in (8, 40, 72, 16):
        engine.train_step([plain_batch(2, length)], 1e-3)
        assert memory.pinned_bytes + memory.pageable_bytes - before == activations.host_bytes > 0


def test_a_layer_that_fails_leaves_nothing_under_way(engine):
    """Out of memory in mid-step: the error comes out, lanes are idle, states untouched; a new step works."""
    engine.train_step([plain_batch()], 1e-3)
    parts_of(engine).updates.drain()
    before = [p.detach().clone() for p in engine.loaded.model.parameters()]
    runner, schedule = parts_of(engine).flow.runner, parts_of(engine).schedule
    places = ((runner, "layer", 1), (schedule.head, "one", 0), (schedule.backward, "layer", 0), (
        schedule.backward, "embed", 0,
    ))  # fmt: skip
    for owner, name, call in places:
        original, calls = getattr(owner, name), []

        def fails(*args, original=original, calls=calls, call=call, **kwargs):
            calls.append(1)
            if len(calls) > call:
                raise torch.OutOfMemoryError("out of memory (made by the test)")
            return original(*args, **kwargs)

        setattr(owner, name, fails)
        with pytest.raises(torch.OutOfMemoryError):
            engine.train_step([plain_batch(seed=1), plain_batch(seed=2)], 1e-3)
        setattr(owner, name, original)
        parts_of(engine).upload.drain(5)
        parts_of(engine).download_lane.drain(5)
        assert all(torch.equal(a, b) for a, b in zip(before, engine.loaded.model.parameters(), strict=True))
    assert not engine.train_step([plain_batch()], 1e-3).skipped


def test_a_failed_download_comes_out_where_the_weights_are_needed(engine):
    updates = parts_of(engine).updates
    unit = parts_of(engine).units.layer_units[0]

    class Lost:
        error = OSError(5, "the copy failed (made by the test)")

        def add_done_callback(self, fn):
            fn(self)

    updates.submit(unit, Lost(), None)
    assert updates.is_done(unit)
    refused(EngineError, "the copy failed", lambda: engine.evaluate([plain_batch()]))


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), 2.0**61, 1.0])
def test_a_norm_that_came_with_the_gradient_spares_the_look_at_it(engine, monkeypatch, norm):
    updates, unit = parts_of(engine).updates, parts_of(engine).units.layer_units[0]
    submitted = []
    submit = parts_of(engine).optimizer.submit
    monkeypatch.setattr(
        parts_of(engine).optimizer, "submit", lambda *args, **more: submitted.append(more) or submit(*args, **more)
    )
    updates._arena.try_take(unit).zero_()

    class Here:
        error = None

        def add_done_callback(self, fn):
            fn(self)

    updates.submit(unit, Here(), engine._hyper(1e-3, 1.0), guard=True, norm_of=lambda _: norm)
    if norm == 1.0:
        updates.wait(unit)
        assert submitted == [{"guard": False}]
    else:
        refused(NonFiniteLossError, "was not finite", lambda: updates.wait(unit))
        assert not submitted
        updates._pending.clear()


def test_the_norm_of_a_large_part_is_exact_on_the_cpu():
    """torch's fp32 norm of 8 M values on the CPU is 2e-4 too small, of 100 M 1 %: clipping would clip too little."""
    values = torch.randn(1 << 23, generator=torch.Generator().manual_seed(0))
    download = GradientDownload.__new__(GradientDownload)
    download._sumsq = torch.zeros((), dtype=torch.float64)
    exact = float(values.double().square().sum().sqrt())
    assert float(download.count(values)) == pytest.approx(exact, rel=1e-6)
    assert float(download.norm()) == pytest.approx(exact, rel=1e-6)

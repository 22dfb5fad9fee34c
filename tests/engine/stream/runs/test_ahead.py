"""Updates that begin before the step's norm is known: the same bits, whether they stand or are taken back."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from outcore.common.quantities import GIB
from outcore.engine.base import NonFiniteLossError
from outcore.engine.stream import updates as updates_module
from tests.engine.inside import parts_of
from tests.engine.stream.training import LR, TINY, batches_of, fixtures, freeze_most, homes_of
from tests.refused import refused

(build,) = fixtures
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def keeps_up(monkeypatch):
    """However fast or slow this machine's optimizer is beside its backward."""
    monkeypatch.setattr(updates_module, "LEAST_GAIN", 0.0)
    monkeypatch.setattr(updates_module, "MOST_UNDER_WAY", 1000)


def watched(engine) -> list[tuple[int, bool]]:
    """(updates that began ahead, whether they stood) of each step."""
    updates, found = parts_of(engine).updates, []
    inner = updates.settle

    def settle(hyper, ahead) -> None:
        found.append((len(updates._ahead), hyper == ahead))
        inner(hyper, ahead)

    updates.settle = settle
    return found


@pytest.mark.more(after=2)
@pytest.mark.parametrize("model, dtype, changes", [
    ("llama", torch.bfloat16, {"states": "split"}),
    ("gpt2", torch.float32, {"states": "fp32_m8"}),
    ("qwen3", torch.float16, {"states": "fp32", "initial_loss_scale": 2.0**20}),
    ("mixtral", torch.bfloat16, {"states": "split8", "resident_bytes": 1 << 40}),
    ("llama", torch.bfloat16, {"states": "fp32", "tiling": "on"}),
    ("llama", torch.bfloat16, {"states": "split", "resident_bytes": 100_000}),
])  # fmt: skip
def test_results_are_those_of_updates_that_wait(build, tmp_path, monkeypatch, model, dtype, changes):
    """Over steps of which every third clips, and with fp16 some that are skipped whole."""
    monkeypatch.setattr(updates_module, "MOST_WHOLE", 0.0)
    settings = replace(TINY, **changes)
    waits, begins = (build(model, replace(settings, ahead_bytes=size), dtype=dtype) for size in (0, GIB))
    steps = watched(begins)
    for step in range(10):
        results = []
        for engine in (waits, begins):
            engine.settings = replace(engine.settings, max_grad_norm=1e9 if step % 3 else 0.01)
            result = engine.train_step(batches_of(step), LR)
            results.append(repr((result.loss, result.grad_norm, result.skipped)))
        assert results[0] == results[1]
    units = parts_of(begins).units
    assert {count for count, _ in steps} == {len(units.layers) + (not units.tied)}
    assert {stood for _, stood in steps} == {True, False}
    mine, theirs = homes_of(begins), homes_of(waits)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    files = []
    for number, engine in enumerate((waits, begins)):
        folder = tmp_path / str(number)
        folder.mkdir()
        engine.save(folder, lambda path, crc: None)
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert files[0] == files[1]


def test_as_many_layers_as_memory_keeps(build):
    one = build("llama", replace(TINY, ahead_bytes=GIB, max_grad_norm=1e9))
    size_bytes = parts_of(one).updates.ahead.seconds.size_bytes
    some = build("llama", replace(TINY, ahead_bytes=size_bytes * 3 // 4, max_grad_norm=1e9))
    steps = watched(some)
    assert some.facts().ahead_bytes == 0
    for step in range(3):
        assert one.train_step(batches_of(step), LR).loss == some.train_step(batches_of(step), LR).loss
    assert steps == [(2, True), (2, True)]  # the head, and one of two layers
    assert (one.facts().ahead_bytes, some.facts().ahead_bytes) == (
        size_bytes,
        some._parts.updates.ahead.seconds.size_bytes,
    )


def test_a_pass_without_memory_is_made_again_from_the_old_states(build, monkeypatch):
    """What began ahead in the first try is taken back before the second."""
    engines = [build("llama", replace(TINY, ahead_bytes=size, max_grad_norm=1e9)) for size in (0, GIB)]
    for engine in engines:
        engine.train_step(batches_of(0), LR)
    begins = engines[1]
    backward, tries = begins._parts.schedule.backward, []
    embed = backward.embed

    def short_once(*given):
        tries.append(given)
        if len(tries) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return embed(*given)

    monkeypatch.setattr(backward, "embed", short_once)
    monkeypatch.setattr(begins, "_gives_way", lambda why: True)
    for step in range(1, 4):
        one, other = (engine.train_step(batches_of(step), LR) for engine in engines)
        assert (one.loss, one.grad_norm) == (other.loss, other.grad_norm)
    assert len(tries) > 3
    mine, theirs = homes_of(begins), homes_of(engines[0])
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_a_loss_that_is_not_finite_leaves_no_state_updated(build, monkeypatch):
    engine = build("llama", replace(TINY, ahead_bytes=GIB, max_grad_norm=1e9))
    for step in range(3):
        engine.train_step(batches_of(step), LR)
    before = {name: value.clone() for name, value in homes_of(engine).items()}
    sums = engine._ranks.sums
    monkeypatch.setattr(
        engine._ranks, "sums", lambda values, what: [math.nan, 0.0] if "loss" in what else sums(values, what)
    )
    refused(NonFiniteLossError, "no state was updated with it", lambda: engine.train_step(batches_of(3), LR))
    assert all(torch.equal(value, before[name]) for name, value in homes_of(engine).items())


def test_parts_of_which_a_little_is_trained(build):
    settings = replace(TINY, max_grad_norm=1e9)
    waits = build("llama", settings, prepare=freeze_most)
    begins = build("llama", replace(settings, ahead_bytes=GIB), prepare=freeze_most)
    steps = watched(begins)
    for step in range(4):
        assert waits.train_step(batches_of(step), LR).loss == begins.train_step(batches_of(step), LR).loss
    assert steps == [(1, True)] * 3


@pytest.mark.parametrize("most", [0, 1])
def test_updates_wait_while_the_optimizer_is_behind(build, monkeypatch, most):
    waits, begins = (build("llama", replace(TINY, ahead_bytes=size, max_grad_norm=1e9)) for size in (0, GIB))
    monkeypatch.setattr(updates_module, "MOST_UNDER_WAY", most)
    updates, stood = parts_of(begins).updates, []
    stand, settle = updates.ahead.seconds.stand, updates.settle

    def settle_when_all_is_there(*given) -> None:
        """So that none comes after the norm, when nothing has to wait any more."""
        for pending in updates._ahead.values():
            assert pending.handed_over.wait(60)
        settle(*given)

    monkeypatch.setattr(updates, "settle", settle_when_all_is_there)
    monkeypatch.setattr(updates.ahead.seconds, "stand", lambda part: (stood.append(part.name), stand(part)))
    for step in range(5):
        assert waits.train_step(batches_of(step), LR).loss == begins.train_step(batches_of(step), LR).loss
    assert bool(stood) is bool(most)
    mine, theirs = homes_of(begins), homes_of(waits)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_gradients_that_come_after_the_next_step_began_are_not_lost(build, monkeypatch):
    """Their updates stand already, so nobody makes them later."""
    monkeypatch.setattr("outcore.engine.stream.updates.TIMEOUT_S", 30.0)  # a step that waits for them fails soon
    waits, begins = (build("llama", replace(TINY, ahead_bytes=size, max_grad_norm=1e9)) for size in (0, GIB))
    monkeypatch.setattr(updates_module, "MOST_UNDER_WAY", 0)
    updates, late = parts_of(begins).updates, []
    submit_ahead, begin_step = updates.submit_ahead, updates.begin_step

    def hold(unit, transfer, hyper) -> None:
        held = SimpleNamespace(add_done_callback=lambda fn: late.append((transfer, fn)))
        submit_ahead(unit, held, hyper)

    def let_come() -> None:
        while late:
            transfer, fn = late.pop()
            transfer.add_done_callback(fn)

    monkeypatch.setattr(updates, "submit_ahead", hold)
    monkeypatch.setattr(updates, "begin_step", lambda: (begin_step(), let_come()))
    try:
        for step in range(4):
            assert waits.train_step(batches_of(step), LR).loss == begins.train_step(batches_of(step), LR).loss
            assert bool(late) is bool(step)
    finally:
        let_come()
    mine, theirs = homes_of(begins), homes_of(waits)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("changes", [{"ahead_bytes": GIB}, {"resident_bytes": GIB}])
def test_states_of_which_only_a_last_block_has_no_room(build, tmp_path, changes):
    """A chunk flows, though by the placement, which counts elements, all are in RAM."""

    def freeze(model) -> None:
        model.get_input_embeddings().requires_grad_(False)

    settings = replace(TINY, states="split", max_grad_norm=1e9)
    whole = build("llama", settings, dtype=torch.bfloat16, prepare=freeze)
    homes = parts_of(whole).homes
    size_bytes = sum(chunk.n_bytes for unit in parts_of(whole).units.all for chunk in homes[unit].chunks)
    spilled = replace(settings, nvme_path=str(tmp_path), state_ram_bytes=size_bytes - 1, **changes)
    some = build("llama", spilled, dtype=torch.bfloat16, prepare=freeze)
    for _ in range(4):
        assert whole.train_step(batches_of(0), LR).loss == some.train_step(batches_of(0), LR).loss


def test_the_report_says_so(build):
    words = build("llama", replace(TINY, ahead_bytes=GIB)).describe()
    assert "or before it while most steps clip nothing (" in words and "--ahead_gib)" in words
    assert "clip nothing" not in build("llama", TINY).describe()


def test_none_begins_where_no_step_waits_for_updates(build, monkeypatch):
    monkeypatch.setattr(updates_module, "LEAST_GAIN", 2.0)  # no wait is twice as long as its step
    engine = build("llama", replace(TINY, ahead_bytes=GIB, max_grad_norm=1e9))
    steps = watched(engine)
    for step in range(4):
        engine.train_step(batches_of(step), LR)
    assert not steps
    monkeypatch.setattr(updates_module, "LEAST_GAIN", 0.0)
    for step in range(4, 6):
        engine.train_step(batches_of(step), LR)
    assert steps == [(3, True)]


@pytest.mark.parametrize("clips, begins", [
    ("........", ".xxxxxxx"),
    ("cccc......", "........xx"),
    ("....c.....", ".xxxxxxxxx"),
    ("c.c.c.c.c.c.", "............"),
    ("....cc.....", ".xxxxx.xxxx"),
])  # fmt: skip
def test_updates_begin_where_most_late_steps_clipped_nothing(build, clips, begins):
    engine = build("llama", replace(TINY, ahead_bytes=GIB, max_grad_norm=1e9))
    ahead, found = parts_of(engine).updates.ahead, ""
    for clip in clips:
        found += "x" if ahead.may_begin else "."
        ahead.step_ended({"forward": 1.0, "backward": 1.0, "optimizer": 1.0, "stall_optimizer": 1.0}, clip == ".")
    assert found == begins

"""Units computed in tiles: the same losses, gradients and states as whole ones, chosen by the device's memory."""

from dataclasses import replace

import pytest
import torch

from outcore.common.quantities import MIB
from outcore.engine.base import EngineError
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.check.gradients import try_tiled_copy
from outcore.engine.stream.gradients.arena import gradient_bytes_of
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.parts import StreamUnsupported
from outcore.flow.tiles import TiledPart, TilePlan
from outcore.flow.trace import PhaseClock
from outcore.model.forward import count_target_tokens
from outcore.sizing.tiles import Holding
from tests.engine.inside import parts_of
from tests.engine.stream.training import LR, adapted, batches_of, homes_of, losses_of, same, weights_of, with_drive
from tests.flow.models import (
    TINY_SETTINGS,
    assert_same_grads,
    needs,
    plain_batch,
    tiny_loaded,
)
from tests.refused import refused

TINY = TINY_SETTINGS
TILED = replace(TINY, tiling="on", tile_bytes=7000)
"""Odd on purpose: several tiles to a weight, the last one smaller."""
built, drive = with_drive
FAMILIES = ["llama", "qwen3", "gemma2", "gpt2", "mixtral", "opt"]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def build(built):
    def make(model="llama", settings=TILED, **more):
        return built(model, settings, **more)

    return make


def gradients_of(engine, batches):
    """(loss, norm, gradients by name) of one pass, no update."""
    parts, sent = parts_of(engine), []
    total = sum(count_target_tokens(batch) for batch in batches)
    sums = parts.schedule.train(
        batches, step=1, num_tokens=total, loss_scale=1.0, on_gradient=lambda unit,
        transfer: sent.append((unit, transfer)), clock=PhaseClock(torch.device("cpu")),
    )  # fmt: skip
    found = {}
    for unit, transfer in sent:
        transfer.wait()
        views = unit.layout.grad_views(parts.arena[unit])
        found |= {slot.name: view.clone() for slot, view in zip(unit.layout.trainable_slots, views, strict=True)}
    return float(sums.ce_sum) / total, float(parts.download.norm()), found


@pytest.mark.more(after=3)
@pytest.mark.parametrize(("model", "count"), [
    *((model, 3) for model in FAMILIES if model != "qwen3"), pytest.param("qwen3", 3, marks=pytest.mark.slow),
    ("llama", 1), ("llama", 2),
    *(pytest.param(model, count, marks=pytest.mark.slow) for model in FAMILIES[1:] for count in (1, 2)),
])  # fmt: skip
def test_gradients_in_tiles_equal_those_of_whole_units(build, model, count):
    """fp32; one micro-batch, two (the first waits in its home), three (sums wait in fp32)."""
    whole = gradients_of(build(model, TINY), batches_of(0, count))
    engine = build(model)
    tiled = gradients_of(engine, batches_of(0, count))
    assert tiled[0] == pytest.approx(whole[0], rel=1e-6)
    assert tiled[1] == pytest.approx(whole[1], rel=3e-6)
    assert_same_grads(tiled[2], whole[2], rtol=1e-5)
    plan = parts_of(engine).tile_plan
    assert plan.indices == {unit.index for unit in parts_of(engine).units.all}
    assert any(matrix.num_tiles > 2 for unit in plan.tiled for matrix in unit.all_matrices)
    again = gradients_of(engine, batches_of(0, count))  # nothing is left from the first pass
    assert again[:2] == tiled[:2] and all(torch.equal(again[2][n], tiled[2][n]) for n in tiled[2])


@pytest.mark.more(after=1)
@pytest.mark.parametrize("model", [
    *("ernie4_5_moe", "jetmoe"), pytest.param("afmoe", marks=pytest.mark.slow),
    pytest.param("laguna", marks=[needs("laguna"), pytest.mark.slow]),
])  # fmt: skip
def test_frozen_weights_of_a_model_and_experts_without_a_token_in_tiles(build, model):
    few = [plain_batch(1, 5), plain_batch(1, 4, seed=1)]
    whole = gradients_of(build(model, TINY), few)
    tiled = gradients_of(build(model, replace(TILED, tile_bytes=4096), trial=True), few)
    assert tiled[0] == pytest.approx(whole[0], rel=1e-6)
    assert_same_grads(tiled[2], whole[2], rtol=1e-5)


@pytest.mark.parametrize("model", ["qwen3", "gpt2"])
def test_bf16_gradients_in_tiles_are_as_close_to_fp32_as_whole_ones(build, model):
    """Sums over tiles are made in fp32 and rounded once, so tiling must not add to the error of bf16."""
    loss, _, exact = gradients_of(build(model, TINY), batches_of(0, 3))
    errors = []
    for settings in (TINY, TILED):
        found = gradients_of(build(model, settings, dtype=torch.bfloat16), batches_of(0, 3))
        assert found[0] == pytest.approx(loss, rel=5e-3)
        off = sum(float((found[2][n].float() - exact[n]).square().sum()) for n in exact)
        errors.append((off / sum(float(g.square().sum()) for g in exact.values())) ** 0.5)
    assert errors[1] < 1.25 * errors[0] < 0.1


@pytest.mark.more(after=1)
@pytest.mark.parametrize(("model", "changes"), [
    ("llama", {"max_grad_norm": 0.5}), ("gemma2", {"max_grad_norm": 0.5, "activations": "ram"}),
    ("gpt2", {"max_grad_norm": 0.0}), ("qwen3", {"max_grad_norm": 0.5, "slot_bytes": 4096, "num_slots": 1}),
])  # fmt: skip
def test_training_in_tiles_ends_in_the_same_states(build, model, changes):
    engines = [build(model, replace(settings, **changes)) for settings in (TINY, TILED)]
    runs = [[e.train_step(batches_of(s % 2, 1 + s % 3), LR) for s in range(3)] for e in engines]
    assert [r.loss for r in runs[1]] == pytest.approx([r.loss for r in runs[0]], rel=1e-4)
    assert [r.grad_norm for r in runs[1]] == pytest.approx([r.grad_norm for r in runs[0]], rel=1e-3)
    start = dict(tiny_loaded(model).model.named_parameters())
    whole, tiled = weights_of(engines[0]), weights_of(engines[1])
    off = sum(float((tiled[n] - whole[n]).square().sum()) for n in whole)
    moved = sum(float((whole[n] - start[n].detach()).square().sum()) for n in whole)
    assert moved > 0 and (off / moved) ** 0.5 < 0.01
    losses = [e.evaluate(batches_of(3, 3)).loss for e in engines]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert engines[1].sample([3, 4, 5], 4, None) == engines[0].sample([3, 4, 5], 4, None)


def test_results_in_tiles_do_not_depend_on_lanes_or_residency(build):
    """bf16 with dropout: the same tiles give the same bits, wherever activations wait and however small the slots."""
    expected = None
    for changes in ({}, {"activations": "ram"}, {"slot_bytes": 4096, "num_slots": 1, "chunk_numel": 2048}):
        engine = build("gpt2", replace(TILED, max_grad_norm=0.5, **changes), dtype=torch.bfloat16, dropout=0.1)
        found = losses_of(engine, range(3)), weights_of(engine)
        expected = expected or found
        assert same(found, expected)


@pytest.mark.more
@pytest.mark.parametrize(
    ("model", "max_grad_norm"), [("gpt2", 0.5), pytest.param("mixtral", 0.0, marks=pytest.mark.slow)]
)
def test_tiles_come_from_the_drive_with_the_same_bits(build, tmp_path, model, max_grad_norm):
    """Layers' parameters and their states on NVMe, some or all; embedding and head stay in RAM."""
    settings = replace(TINY, tiling="on", tile_bytes=5000, weight_read_ahead_bytes=1)  # the last tile is smaller
    settings = replace(settings, max_grad_norm=max_grad_norm, chunk_numel=8192, states="split")
    expected = None
    for number, ram_bytes in enumerate((None, 150_000, 0)):
        spilled = {} if ram_bytes is None else {"nvme_path": str(tmp_path / str(number)), "weight_ram_bytes": ram_bytes}
        if ram_bytes == 0:
            spilled["state_ram_bytes"] = 0
        engine = build(model, replace(settings, **spilled), dtype=torch.bfloat16, dropout=0.1, num_hidden_layers=3)
        losses = [engine.train_step(batches_of(s, 1 + s), LR).loss for s in range(2)]
        parts, found = parts_of(engine), homes_of(engine)
        layers = sum(unit.layout.size_bytes for unit in parts.units.layer_units)
        ends = sum(unit.layout.size_bytes for unit in parts.units.all) - layers
        if ram_bytes is not None:
            assert [lane.owner for lane in parts.drive_lanes] == ["tiles from NVMe"]
            spilled_bytes = min(layers, layers + ends - ram_bytes)  # in whole chunks
            assert parts.homes.weights.nvme_bytes == pytest.approx(spilled_bytes, abs=2 * settings.chunk_numel)
        expected = expected or (losses, found)
        assert same((losses, found), expected), ram_bytes


@pytest.mark.more
def test_whole_and_tiled_layers_share_a_drive(build, tmp_path, monkeypatch):
    """Reads of whole units are queued far ahead, and must not stand before the tiles that these wait for."""
    settings = replace(TINY, tile_bytes=2500, max_grad_norm=0.5, chunk_numel=4096, num_layer_buffers=1)
    settings = replace(settings, slot_bytes=4096, weight_read_ahead_bytes=16384)
    monkeypatch.setattr("outcore.engine.stream.blueprint.plan_tiles", _second_layer_in_tiles)
    results = []
    for spilled in ({}, {"nvme_path": str(tmp_path), "weight_ram_bytes": 0}):
        engine = build("llama", replace(settings, **spilled), num_hidden_layers=4, dtype=torch.bfloat16)
        assert len(parts_of(engine).drive_lanes) == (2 if spilled else 0)
        results.append(losses_of(engine, range(2)))
    assert results[0] == results[1]


def _second_layer_in_tiles(units, *_):
    tiled = TiledPart(units.layer_units[1], 2500)
    return TilePlan((tiled,), 2500, "as the test says", None, Holding(frozenset({2}), layer_buffers=1))


def test_a_tile_that_cannot_be_read_stops_the_step(build, drive, tmp_path):
    settings = replace(TILED, nvme_path=str(tmp_path), weight_ram_bytes=0, chunk_numel=512)
    engine = build("llama", settings, dtype=torch.bfloat16, storage=drive)
    engine.train_step(batches_of(0), LR)
    parts_of(engine).updates.drain()
    plan = drive.fail("read", after=9)
    refused(EngineError, r"layer \d+ could not be read from NVMe", lambda: engine.train_step(batches_of(1), LR))
    assert plan.fired
    drive.clear()
    parts_of(engine).updates.drain()
    engine.evaluate(batches_of(2))  # buffers and lanes are in order again


def test_a_frozen_base_in_tiles_trains_its_adapters(build):
    runs = [losses_of(build(adapted(seed=1, r=2), settings), range(4)) for settings in (TINY, TILED)]
    assert runs[1] == pytest.approx(runs[0], rel=1e-5)
    assert runs[0][3] != runs[0][0]


def test_only_what_does_not_fit_is_tiled_and_it_is_said(build):
    """The vocabulary first, when it is the largest; then the layers; nothing when all fits."""
    roomy = build("qwen3", replace(TINY, device_bytes=64 * MIB))
    assert not parts_of(roomy).tile_plan.tiled and "tiles:" not in roomy.describe()
    found = []
    for device_bytes, vocab_size in ((1_500_000, 4096), (900_000, 64), (30_000, 4096)):
        engine = build("qwen3", replace(TINY, device_bytes=device_bytes, tile_bytes=1024), vocab_size=vocab_size)
        found.append(sorted(parts_of(engine).tile_plan.indices))
        line = next(line for line in engine.describe().splitlines() if "tiles:" in line)
        assert "the device has" in line
        assert ("embedding and head" in line, "2 layers" in line) == (0 in found[-1], 1 in found[-1])
    assert found == [[0, 3], [1, 2], [0, 1, 2, 3]]
    tight = build("qwen3", replace(TINY, device_bytes=1_300_000), vocab_size=64)  # less is held, nothing is tiled
    assert not parts_of(tight).tile_plan.tiled
    assert "to fit the device: two layers at a time, gradients leave through one buffer" in tight.describe()
    assert "to fit" not in roomy.describe()
    assert parts_of(tight).flow.arrival.device_bytes + parts_of(tight).download.device_bytes < 0.6 * 1_300_000
    plain = build("qwen3", TINY, vocab_size=4096)
    assert parts_of(engine).flow.arrival.device_bytes < parts_of(plain).flow.arrival.device_bytes / 4
    assert parts_of(engine).download.device_bytes < parts_of(plain).download.device_bytes / 4


def test_a_tied_vocabulary_in_tiles_needs_no_sum_of_it_on_the_device(build):
    whole, tiled = (build("gemma2", settings, vocab_size=4096) for settings in (TINY, TILED))
    assert parts_of(whole).units.tied
    assert parts_of(tiled).download.device_bytes < parts_of(whole).download.device_bytes / 20


def test_a_tied_vocabulary_in_tiles_keeps_its_room_for_gradients_until_the_end(build):
    settings = replace(TILED, max_grad_norm=0.0, update="immediate")
    roomy = build("gpt2", settings)
    sizes = {unit.name: gradient_bytes_of(unit) for unit in parts_of(roomy).units.all}
    least = sizes.pop("embedding and head") + max(sizes.values())
    with pytest.raises(ValueError, match="embedding and head and layer"):
        build("gpt2", replace(settings, gradient_bytes=least - 4096))
    tight = build("gpt2", replace(settings, gradient_bytes=least + 4096))
    assert parts_of(tight).arena.size_bytes < least + max(sizes.values())
    for step in range(2):
        assert tight.train_step(batches_of(step), LR).loss == roomy.train_step(batches_of(step), LR).loss


def test_a_model_is_tried_in_tiles_before_anything_is_spent(build, monkeypatch):
    build("gpt2", trial=True).train_step(batches_of(0), LR)
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaMLP.forward

    def odd(self, x):
        return original(self, x) + 0.0 * torch.einsum("oi->", self.up_proj.weight)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", odd)
    build("llama", TINY).train_step(batches_of(0), LR)
    refused(StreamUnsupported, r"up_proj.weight.*einsum", lambda: build("llama", trial=True))


@pytest.mark.more(after=1)
@pytest.mark.parametrize(("model", "count"), [("llama", 1), ("gpt2", 2)])
def test_an_mlp_takes_its_tokens_in_chunks_where_all_at_once_would_not_fit(build, model, count):
    whole = gradients_of(build(model, TINY), batches_of(0, count))
    engine = build(model, replace(TILED, device_bytes=60_000))
    tiled = gradients_of(engine, batches_of(0, count))
    assert parts_of(engine).flow.runner.tiles.chunks.num_cut == 2 * 2 * count  # two layers, forward and recomputation
    assert tiled[0] == pytest.approx(whole[0], rel=1e-6)
    assert_same_grads(tiled[2], whole[2], rtol=1e-5)


def test_of_chunks_the_last_one_sends_the_sum_home(build):
    """Each of the four before brings its part of the MLPs' gradients to RAM once more; recomputing none adds to it."""
    sent = []
    for settings in (TILED, replace(TILED, device_bytes=60_000)):
        parts = parts_of(engine := build("llama", settings))
        gradients_of(engine, batches_of(0, 1))
        sent.append(parts.download_lane.moved_bytes)
    slots = [slot for unit in parts.units.layer_units for slot in unit.layout.slots if ".mlp." in slot.name]
    assert sent[1] - sent[0] == 4 * sum(4 * slot.numel for slot in slots) > 0


def test_dropout_in_chunks_is_replayed(build):
    """The same gradients from one pass to the next, the first of which tries the module on two tokens."""
    engine = build("gpt2", replace(TILED, device_bytes=60_000), dropout=0.3)
    first, second = (gradients_of(engine, batches_of(0, 1)) for _ in range(2))
    assert parts_of(engine).flow.runner.tiles.chunks.num_cut > 0
    assert first[:2] == second[:2] and all(torch.equal(first[2][n], second[2][n]) for n in first[2])
    assert first[0] != gradients_of(build("gpt2"), batches_of(0, 1))[0]


def test_a_failure_in_mid_step_leaves_nothing_under_way(build):
    engine = build("llama")
    expected = gradients_of(engine, batches_of(0, 3))
    gradients = parts_of(engine).flow.runner.tiles.work.gradients
    original, calls = gradients.add, []

    def fails(*args):
        calls.append(1)
        if len(calls) == 30:
            raise torch.OutOfMemoryError("out of memory (made by the test)")
        return original(*args)

    gradients.add = fails
    with pytest.raises(torch.OutOfMemoryError):
        gradients_of(engine, batches_of(1, 3))
    gradients.add = original
    parts_of(engine).upload.drain(5)
    parts_of(engine).download_lane.drain(5)
    found = gradients_of(engine, batches_of(0, 3))
    assert found[:2] == expected[:2] and all(torch.equal(found[2][n], expected[2][n]) for n in found[2])


def test_settings_of_tiling_are_checked():
    for bad in ({"tiling": "maybe"}, {"tile_bytes": 0}, {"device_bytes": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            StreamSettings(**bad)  # pyright: ignore[reportArgumentType]


def test_the_trial_in_tiles_passes_a_mixture_that_goes_in_tiles():
    try_tiled_copy(tiny_loaded("mixtral"), build_stream_engine)

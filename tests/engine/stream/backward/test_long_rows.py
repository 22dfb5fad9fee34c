"""Rows so long that all of a layer but attention goes in tiles of tokens: the same training, in the bytes counted."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from outcore.engine.stream.backward.head import StreamedHeadGradient
from outcore.engine.stream.backward.layer import AFTER_BACK, BEFORE_BACK, BackwardRunner
from outcore.engine.stream.check.gradients import gradient_difference, run_units, why_not_in_tiles_of_tokens
from outcore.flow.check import slab_of
from outcore.flow.layers import CompiledLayers, Head, HeadInput, LongRows, PartRunner, RowHomes
from outcore.flow.parts import StreamUnsupported, discover_units
from outcore.model import LoraSettings, preset_shape, shape_from_config
from outcore.model.adapters import apply_lora
from outcore.plan import RunRequest, load_hardware
from outcore.plan.hardware import Overrides
from outcore.plan.stream.memory import plan_stream
from outcore.sizing.activations import long_head_bytes, long_layer_bytes, long_rows_bytes
from outcore.sizing.layouts import StreamLayout
from outcore.sizing.tiles import Model, TilingWork, UnitSize, choose_holding, needed_bytes
from outcore.staging.pool import HostMemory
from tests.engine.inside import parts_of
from tests.engine.stream.training import LR, TINY, fixtures, weights_of
from tests.flow.models import FAMILIES, packed_batch, padded_batch, plain_batch, set_dropout, tiny_loaded
from tests.flow.peak import peak_bytes
from tests.refused import refused

(build,) = fixtures
pytestmark = pytest.mark.usefixtures("one_thread")
BATCHES = {"plain": plain_batch, "padded": padded_batch, "packed": packed_batch}
IN_CI = ("llama", "gemma3_text", "mixtral", "qwen3", "gpt2")


@pytest.mark.more(after=3)
@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize(
    "model",
    [*IN_CI, *(pytest.param(m, marks=pytest.mark.slow) for m in FAMILIES if m not in (*IN_CI, "gemma2", "bloom"))],
)
def test_gradients_equal_those_of_whole_rows(model, kind):
    """Whatever the tiles: of three tokens a row, the last of two; of seven; of all but one."""
    loaded = tiny_loaded(model)
    set_dropout(loaded.model, 0.0)
    for tile_tokens in (6, 15, 38):
        for near in (False, True):
            assert gradient_difference(loaded, BATCHES[kind](2, 20), tile_tokens, near=near) < 2e-6


@pytest.mark.more
def test_compiled_tiles_give_the_same_gradients():
    loaded, batch = tiny_loaded("llama"), packed_batch(1, 32)
    objective, expected = run_units(loaded, batch)
    compiled = CompiledLayers(discover_units(loaded), "on", backend="aot_eager")
    found, gradients = run_units(loaded, batch, compiled, tile_tokens=16, near=True)
    roles = {role for role, _, _ in compiled._functions}
    assert roles == {LongRows.BEFORE, LongRows.AFTER, BEFORE_BACK, AFTER_BACK} and not compiled.why_not
    assert float(found) == pytest.approx(float(objective), rel=1e-6)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert all(float((gradients[n] - one).abs().max()) < 1e-6 * largest for n, one in expected.items())


@pytest.mark.parametrize(("model", "fields", "words"), [
    ("gemma2", {}, "its attention is not one that transformers dispatches"),  # eager
    ("bloom", {}, "its attention is not one that transformers dispatches"),
    ("falcon_h1", {}, "it gets other gradients in tiles of tokens"),  # a state beside attention
    ("qwen3_next", {}, "does not come to an attention"),
    ("qwen3", {}, ""),
])  # fmt: skip
def test_a_trial_tells_which_models_layers_can_be_cut(model, fields, words):
    why = why_not_in_tiles_of_tokens(tiny_loaded(model, **fields))
    assert words in why and bool(words) == bool(why)


TOKENS = replace(TINY, tiling="tokens", tile_bytes=1, step_tokens=(48,), row_tokens=48, packed_attention="auto")


@pytest.mark.more(after=1)
@pytest.mark.parametrize("case", ["full", "lora", "no clipping", "two micro-batches", "near"])
def test_an_engine_trains_evaluates_and_samples_as_with_whole_rows(build, case):
    def adapters(model):
        for name, parameter in apply_lora(model, LoraSettings(r=4, dropout=0.0), seed=0).named_parameters():
            if "lora_B" in name:
                torch.nn.init.constant_(parameter, 0.02)

    found = []
    for settings in (TINY, TOKENS):
        settings = replace(settings, max_grad_norm=0.0 if case == "no clipping" else 0.5)
        settings = replace(settings, device_bytes=1 << 30 if case == "near" else None)
        engine = build("qwen3", settings, prepare=adapters if case == "lora" else None)
        count = 2 if case in ("two micro-batches", "near") else 1
        steps = [[packed_batch(1, 48, seed=10 * step + m) for m in range(count)] for step in range(3)]
        results = [engine.train_step(batches, LR) for batches in steps]
        evaluated = engine.evaluate([plain_batch(1, 48, seed=9), plain_batch(2, 8, seed=8)])
        sampled = engine.sample(list(range(2, 40)), 3, None)
        found.append(([r.loss for r in results], [r.grad_norm for r in results], evaluated.loss, sampled))
        weights = weights_of(engine)
        found[-1] += (torch.cat([weights[name].flatten() for name in sorted(weights)]),)
        long_rows = parts_of(engine).flow.runner.long_rows
        assert (long_rows is not None) == (settings.tiling == "tokens")
        if long_rows is not None:  # blocks of near rows never cross
            is_near = bool(long_rows.homes._near_memory)
            assert is_near == (case == "near") and long_rows.tile_tokens == (32 if is_near else 16)
    (losses, norms, evaluated, sampled, weights), tiled = found
    assert tiled[0] == pytest.approx(losses, rel=1e-6) and tiled[1] == pytest.approx(norms, rel=1e-5)
    assert tiled[2] == pytest.approx(evaluated, rel=1e-6) and tiled[3] == sampled
    assert float((tiled[4] - weights).norm() / weights.norm()) < 1e-4


def test_what_cannot_be_cut_is_refused_with_the_reason(build):
    with pytest.raises(StreamUnsupported, match="balancing loss"):
        build("mixtral", TOKENS, output_router_logits=True, router_aux_loss_coef=0.1)
    refused(StreamUnsupported, "dropout is at work", lambda: build("gpt2", TOKENS, dropout=0.1))
    refused(StreamUnsupported, "where a step's tokens", lambda: build("llama", replace(TOKENS, step_tokens=None)))


WIDTHS: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "head_dim": 16}
WIDTHS |= {"num_key_value_heads": 2, "max_position_embeddings": 8192}


def test_counted_bytes_hold_the_head():
    """Neither the last hidden states nor their gradient, nor any norm of them, are ever whole on the device."""
    tokens, tile_tokens = 4096, 64
    loaded = tiny_loaded("llama", **WIDTHS)
    for parameter in loaded.model.parameters():
        parameter.requires_grad_(False)
    units = discover_units(loaded)
    runner = PartRunner(units, long_rows=LongRows(units, tile_tokens, RowHomes(HostMemory())))
    batch, slab = plain_batch(1, tokens), slab_of(units.head)
    log = runner.embed(slab_of(units.embed), batch)
    head = Head(runner, vocab_size=loaded.facts.vocab_size, logits_chunk_bytes=4 * 16 * loaded.facts.vocab_size)
    item, found = HeadInput(log.hidden, batch, log), []
    peak = peak_bytes(lambda: found.append(StreamedHeadGradient(head).one(slab, item, grad_scale=1.0)))
    shape, logits = shape_from_config("llama", loaded.config), 4 * head.logits_chunk_bytes
    counted = long_head_bytes(shape, 4, tokens, tile_tokens) + logits
    assert 0.6 * counted < peak < 1.05 * counted < log.hidden.nbytes, (peak, counted)
    assert found[0].grad_hidden is item.hidden  # in its place


def _peak_bytes(units, tokens, tile_tokens, near=False):
    homes = RowHomes(HostMemory(), near=near)
    runner = PartRunner(units, long_rows=LongRows(units, tile_tokens, homes) if tile_tokens else None)
    backward, log = BackwardRunner(runner), runner.embed(slab_of(units.embed), plain_batch(1, tokens))
    slab, hidden, grad = slab_of(units.layer_units[0]), log.hidden, torch.randn_like(log.hidden)
    if near:
        grad = homes.room_after(log.hidden).copy_(grad)
    return peak_bytes(lambda: backward.layer(0, slab, hidden, log.call(0), grad, (), None))


@pytest.mark.more(after=2)
@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize(("model", "fields", "repeated"), [
    ("llama", {"num_key_value_heads": 8}, 0),
    ("mixtral", {"num_key_value_heads": 8, "num_local_experts": 4}, 0),
    ("qwen3", {}, 2),  # without a GPU's kernels sdpa repeats keys and values for every head of queries
])  # fmt: skip
def test_counted_bytes_hold_a_layers_backward(model, fields, repeated, near):
    """Of a layer whose weights have no gradients, as with adapters; its input and the gradient are there before. Homes
    of whole rows in RAM are not torch's memory."""
    tokens, tile_tokens = 1024, 64
    loaded = tiny_loaded(model, **{**WIDTHS, **fields})
    for parameter in loaded.model.parameters():
        parameter.requires_grad_(False)
    units = discover_units(loaded)
    whole, cut = _peak_bytes(units, tokens, 0), _peak_bytes(units, tokens, tile_tokens, near)
    shape = shape_from_config(model, loaded.config)
    counted = long_layer_bytes(shape, 4, tokens, tile_tokens, near=near) + repeated * 4 * tokens * 8 * 16
    counted += long_rows_bytes(shape, 4, tokens, 0) if near else 0  # the gradient was there before
    assert 0.6 * counted < cut < 1.05 * counted, (cut, counted)
    assert near or cut < 0.4 * whole, (cut, whole)


def test_rows_are_cut_only_where_nothing_else_fits():
    units = tuple(UnitSize(n, 0 < n < 9, 100, 10, True) for n in range(10))
    work = TilingWork(100, 100, 0, layer=5000, tiled_layer=4000, head=50, tiled_head=20, evaluation=0)
    cut = replace(work, tile_tokens=64, layer=500)
    larger, near = replace(cut, tile_tokens=256, layer=1200), replace(cut, rows=1000)
    work = replace(work, long=(near, larger, cut))
    model = Model(units, 2)

    def chosen(device_bytes, **more):
        return choose_holding(model, device_bytes, 1, work=work, **more)

    assert chosen(10_000).tile_tokens == 0 == chosen(5000).tile_tokens and chosen(5000).tiled
    assert chosen(1500).tile_tokens == 64 and not chosen(1500).tiled and not chosen(1500).near
    assert chosen(2000, cuts_rows=False).tile_tokens == 0
    assert chosen(10_000, cuts_rows=True).near and chosen(10_000, cuts_rows=True).tile_tokens == 64
    assert choose_holding(model, 2000, 1, work=replace(work, long=())).tile_tokens == 0
    # What is only faster leaves more free than what is needed.
    shares = []
    for way in work.long:
        least = next(n for n in range(1000, 4000) if chosen(n) == chosen(n).cut_as(way) and not chosen(n).tiled)
        shares.append(needed_bytes(model, chosen(least), work, 1) * 100 / least)
    assert shares == pytest.approx([85, 85, 93], abs=0.2)


def _plan(preset, lora, length, tiling="auto", vram_gib=6.5, quantize=None):
    shape = replace(preset_shape(preset), max_positions=None)
    shape = (shape.with_lora(lora) if lora else shape).packed(quantize)
    hardware = load_hardware("rtx4070-laptop", Overrides(vram_gib=vram_gib))
    layout = StreamLayout(1, 1, "ram", tiling=tiling)
    return plan_stream(shape, RunRequest(seq_length=length), hardware, length, layout)


def test_the_plan_has_rows_of_32k_to_256k_tokens_under_6_5_gib():
    """Whole rows wait in RAM, which 128K tokens of 8 B fill; what the device holds of them hardly grows."""
    for quantize, ram_gib in (None, 56.9), ("nf4", 47.5):
        longest = _plan("llama-8b", 16, 131072, quantize=quantize)
        assert longest.fits and longest.tiers[2].used_bytes == pytest.approx(ram_gib * 2**30, rel=5e-3)
    assert _plan("llama-1b", 0, 262144).fits and _plan("llama-8b", 16, 65536).fits
    assert not _plan("llama-8b", 16, 262144).fits
    cut, whole = _plan("llama-8b", 16, 32768), _plan("llama-8b", 16, 32768, tiling="off")
    assert cut.fits and not whole.fits
    assert any("tiles of 4096 tokens, its whole rows on the GPU" in note for note in cut.notes)
    assert cut.tiers[0].used_bytes < 6.5 * 2**30 and whole.tiers[0].used_bytes > 9 * 2**30
    assert cut.part_bytes("vram", "attention over packed rows") < whole.part_bytes("vram", "attention over packed rows")
    short = _plan("llama-8b", 16, 2048)
    assert short.fits and not any("tokens" in note for note in short.notes)

"""Packed rows by documents' borders in the streaming engine: the same training as with masks."""

import logging
from contextlib import closing
from dataclasses import replace

import pytest
import torch

from outcore.engine.stream import blueprint
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.check.gradients import run_units
from outcore.flow.check import attention_to_packed_rows, sharing_holds
from outcore.flow.check import trial as packed_rows
from outcore.flow.layers import CompiledLayers
from outcore.flow.parts import DeviceBatch, discover_units
from outcore.model import LoraSettings
from outcore.model.adapters import apply_lora
from outcore.model.packed import PACKED_ATTENTION, are_borders, takes_packed_attention
from outcore.sizing import streaming
from tests.engine.inside import parts_of
from tests.flow.layers.test_graphs import CpuGraphs
from tests.flow.models import (
    TINY_SETTINGS,
    assert_same_grads,
    packed_batch,
    padded_batch,
    plain_batch,
    plain_gradients,
    set_dropout,
    tiny_loaded,
)
from tests.model.packed.varlen_kernel import imitated

CPU = torch.device("cpu")
MIXED = [packed_batch(2, 18, seed=1), padded_batch(2, 18, seed=2), plain_batch(2, 18, seed=3), packed_batch(1, 23)]


def with_adapters(loaded):
    torch.manual_seed(3)
    loaded.model = apply_lora(loaded.model, LoraSettings(r=4, alpha=8, dropout=0.0), seed=3)
    return loaded


def results_of(loaded, settings, *, trial=False):
    """Losses, norms, an evaluation, a sample; then the weights."""
    with closing(build_stream_engine(loaded, settings, device="cpu", pinned_grant=False, trial=trial)) as engine:
        steps = [engine.train_step(MIXED, 1e-2) for _ in range(2)]
        seen = engine.evaluate([packed_batch(2, 18, seed=4)]), engine.sample([3, 4, 5], 3, None)
        weights = {name: p.detach().clone() for name, p in loaded.model.named_parameters()}
        return [(r.loss, r.aux_loss, r.grad_norm) for r in steps], seen, weights


CASES = {
    **{name: {} for name in ("llama", "gpt2", "gemma3_text", "mistral", "opt", "gemma2")},
    "qwen3_moe": {"output_router_logits": True},
}


@pytest.mark.more(after=2)
@pytest.mark.parametrize("model_type", list(CASES))
def test_training_is_the_same_bit_for_bit(model_type):
    found = [
        results_of(
            tiny_loaded(model_type, **CASES[model_type]), replace(TINY_SETTINGS, packed_attention=way), trial=True
        )
        for way in ("auto", "masks")
    ]
    assert found[0][:2] == found[1][:2]
    assert all(torch.equal(found[0][2][name], weight) for name, weight in found[1][2].items())


def test_adapters_train_the_same():
    found = [results_of(with_adapters(tiny_loaded("qwen3")), TINY_SETTINGS)]
    found.append(results_of(with_adapters(tiny_loaded("qwen3")), replace(TINY_SETTINGS, packed_attention="masks")))
    assert found[0][:2] == found[1][:2]


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text"])
def test_the_kernel_gives_the_gradients_of_plain_autograd(model_type):
    loaded = tiny_loaded(model_type)
    batch = packed_batch(2, 24)
    _, _, expected = plain_gradients(loaded, [batch])
    assert attention_to_packed_rows(loaded, CPU, torch.float32) == "masks, made in each layer (no GPU)"
    with imitated() as calls:
        _, found = run_units(loaded, DeviceBatch(batch, CPU))
        assert len(calls) == 2 * loaded.facts.num_layers  # forward and recomputation
    assert_same_grads(found, expected)


def test_layers_get_borders_for_packed_rows_only():
    loaded = tiny_loaded("gemma3_text")
    units = discover_units(loaded)
    assert takes_packed_attention(loaded.model) == ""
    log = units.record(DeviceBatch(packed_batch(), CPU))
    masks = [call.kwargs["attention_mask"] for call in log.calls]
    assert all(are_borders(mask) for mask in masks) and len({id(mask) for mask in masks}) == 1
    log.shrink_masks(1)
    assert log.call(0).kwargs["attention_mask"] is masks[0]
    for batch in (plain_batch(), padded_batch()):
        assert not any(
            are_borders(call.kwargs["attention_mask"]) for call in units.record(DeviceBatch(batch, CPU)).calls
        )
    many = {**plain_batch(1, 300), "position_ids": torch.zeros((1, 300), dtype=torch.long)}
    assert DeviceBatch(many, CPU).is_packed and DeviceBatch(many, CPU).borders is None
    assert units.record(DeviceBatch(many, CPU)).calls[0].kwargs["attention_mask"].shape == (1, 1, 300, 300)


@pytest.mark.slow
@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_compiled_layers_take_borders_and_compile_once_for_all_of_them(
    model_type, graphed, fresh_compiler, monkeypatch
):
    """The compiler's front end and autograd's graphs over the operator, without code generation."""
    from torch._dynamo.backends.registry import lookup_backend

    compilations = []

    def counting(graph, inputs):
        compilations.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    def compiled_layers(*args, graphs, **more):
        return CompiledLayers(*args, backend=counting, graphs=CpuGraphs(CPU) if graphed else None, **more)

    monkeypatch.setattr(blueprint, "CompiledLayers", compiled_layers)
    monkeypatch.setattr(streaming, "GRAPH_LONG_S", 60.0)  # however busy the machine is
    losses = {}
    with imitated() as calls:
        for way in ("auto", "masks"):
            loaded = tiny_loaded(model_type)
            set_dropout(loaded.model, 0.0)
            settings = replace(TINY_SETTINGS, packed_attention=way, compile="on")
            engine = build_stream_engine(loaded, settings, device="cpu", pinned_grant=False)
            calls.clear()
            losses[way] = [engine.train_step([packed_batch(2, 18, seed=7)], 1e-2).loss]
            first = len(compilations)
            for lengths in ((2, 1, 5, 10), [1] * 18, (9, 9), (17, 1), [1] * 18):
                losses[way].append(engine.train_step([other_documents(2, 18, lengths)], 1e-2).loss)
            assert len(compilations) == first
            assert set(calls) == ({16, 64} if way == "auto" else set())
            compiled = parts_of(engine).flow.runner.compiled
            assert compiled is not None and (compiled.graphs.num_graphs > 0 if compiled.graphs else not graphed)
            engine.close()
    assert losses["auto"] == pytest.approx(losses["masks"], rel=1e-5)


def other_documents(rows, length, lengths):
    positions = torch.cat([torch.arange(n) for n in lengths])
    return {**packed_batch(rows, length, seed=8), "position_ids": positions.expand(rows, -1).contiguous()}


def test_layers_that_differ_in_their_window_only_are_not_shared():
    """A window that comes from the layer's number, which the structure of two layers does not show."""
    loaded = tiny_loaded("llama")
    attention = type(loaded.model.model.layers[0].self_attn)

    class Windowed(attention):
        def forward(self, hidden_states, **kwargs):
            return super().forward(hidden_states, sliding_window=3 if self.layer_idx else None, **kwargs)

    class Model(type(loaded.model)):
        def __init__(self, config):
            super().__init__(config)
            for layer in self.model.layers:
                layer.self_attn.__class__ = Windowed

    loaded.model.__class__ = Model
    assert sharing_holds(loaded)  # with masks, of which this window is no part
    loaded.model.config._attn_implementation = PACKED_ATTENTION
    assert not sharing_holds(loaded)


# --- who chooses


def test_the_choice_is_told_and_explicit_choices_are_kept():
    assert attention_to_packed_rows(tiny_loaded("llama"), CPU, torch.float32, wanted=False) == "masks, as asked"
    assert attention_to_packed_rows(tiny_loaded("llama", attention="eager"), CPU, torch.float32) == ""
    assert attention_to_packed_rows(tiny_loaded("opt"), CPU, torch.float32) == ""
    in_fp32 = attention_to_packed_rows(tiny_loaded("llama"), torch.device("cuda"), torch.float32)
    assert in_fp32.startswith("masks (") and "bf16" in in_fp32
    loaded = tiny_loaded("llama")
    engine = build_stream_engine(loaded, TINY_SETTINGS, device="cpu", pinned_grant=False)
    assert "  packed rows: masks, made in each layer (no GPU)" in engine.describe().splitlines()
    assert loaded.model.config._attn_implementation == PACKED_ATTENTION
    engine.close()


@pytest.mark.parametrize("which", ["why_no_kernel", "why_masks_differ", "takes_packed_attention"])
def test_a_failed_trial_is_said_once_and_leaves_masks(which, monkeypatch, caplog):
    loaded = tiny_loaded("llama")
    monkeypatch.setattr(packed_rows, "why_no_kernel", lambda *args: "")
    monkeypatch.setattr(packed_rows, which, lambda *args: "it is off")
    with caplog.at_level(logging.WARNING, logger=packed_rows.__name__):
        words = attention_to_packed_rows(loaded, torch.device("cuda"), torch.bfloat16)
    assert words == "masks (it is off)"
    assert [record.getMessage() for record in caplog.records] == ["packed rows are computed with masks: it is off"]
    assert loaded.model.config._attn_implementation == "sdpa"


def test_the_exported_model_knows_nothing_of_it(tmp_path):
    loaded = tiny_loaded("llama")
    engine = build_stream_engine(loaded, TINY_SETTINGS, device="cpu", pinned_grant=False, trial=False)
    engine.export(tmp_path / "model")
    engine.close()
    assert loaded.model.config._attn_implementation == PACKED_ATTENTION
    assert PACKED_ATTENTION not in (tmp_path / "model" / "config.json").read_text()

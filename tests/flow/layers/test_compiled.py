"""Layers that are alike share one compiled function; results are those of the eager layers."""

import os
import threading
from dataclasses import replace

import pytest
import torch

from outcore.engine.base import EngineError
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.check.gradients import run_units
from outcore.flow.check import sharing_holds
from outcore.flow.layers import CompiledLayers, draws_random_numbers
from outcore.flow.layers.compiled import keep_compiled_code
from outcore.flow.parts import alike, discover_units
from outcore.model import LoraSettings
from outcore.model.adapters import apply_lora
from outcore.model.facts import model_facts
from tests.flow.models import TINY_SETTINGS, assert_same_grads, padded_batch, plain_batch, set_dropout, tiny_loaded
from tests.refused import refused

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def with_adapters(model_type: str, targets: str = "auto", **fields):
    """With LoRA, its second matrices not zero, so that every adapter has a gradient."""
    loaded = tiny_loaded(model_type, **fields)
    network = apply_lora(loaded.model, LoraSettings(r=4, alpha=8, dropout=0.0, target_modules=targets), seed=0)
    with torch.no_grad():
        for name, p in network.named_parameters():
            if "lora_B" in name:
                p.normal_(0, 0.1)
    return replace(loaded, model=network.train(), facts=model_facts(network))


def test_layers_of_one_kind_are_alike():
    assert set(alike(discover_units(tiny_loaded("llama", num_hidden_layers=4)).layers)) == {0}
    gemma = tiny_loaded("gemma3_text")
    kinds = gemma.config.get_text_config().layer_types
    found = alike(discover_units(gemma).layers)
    assert all((found[i] == found[j]) == (kinds[i] == kinds[j]) for i in range(len(kinds)) for j in range(len(kinds)))
    mixed = tiny_loaded("qwen3_moe", mlp_only_layers=[1], num_hidden_layers=3)
    assert alike(discover_units(mixed).layers) == [0, 1, 0]
    frozen = tiny_loaded("llama")
    frozen.model.model.layers[1].mlp.up_proj.weight.requires_grad_(False)
    assert alike(discover_units(frozen).layers) == [0, 1]
    assert set(alike(discover_units(with_adapters("llama", num_hidden_layers=4)).layers)) == {0}
    partly = with_adapters("llama", targets="q_proj,1.mlp.up_proj")
    assert alike(discover_units(partly).layers) == [0, 1]
    scaled = tiny_loaded("gpt2", scale_attn_by_inverse_layer_idx=True)
    assert len(set(alike(discover_units(scaled).layers))) == len(scaled.model.transformer.h)


def test_sharing_is_tried_on_a_tiny_copy():
    loaded = tiny_loaded("llama")
    assert sharing_holds(loaded)
    layer = type(loaded.model.model.layers[0])

    class Numbered(layer):
        def forward(self, hidden_states, **kwargs):
            return super().forward(hidden_states, **kwargs) * (1 + self.self_attn.layer_idx)

    class Model(type(loaded.model)):
        def __init__(self, config):
            super().__init__(config)
            for module in self.model.layers:
                module.__class__ = Numbered

    loaded.model.__class__ = Model
    assert not sharing_holds(loaded)
    units = discover_units(tiny_loaded("llama"))
    assert CompiledLayers(units, "auto", share=False).num_kinds == len(units.layers)


@pytest.mark.parametrize("model_type", ["gpt2", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_compiled_layers_equal_eager_ones(model_type):
    """The compiler's own front end and autograd's graphs, without code generation (that needs a C++ compiler)."""
    loaded = tiny_loaded(model_type)
    set_dropout(loaded.model, 0.0)
    for name, p in loaded.model.named_parameters():
        p.requires_grad_("norm" not in name)
    assert_compiled_equals_eager(loaded)


@pytest.mark.more
def test_compiled_adapters_equal_eager_ones():
    compiled = assert_compiled_equals_eager(with_adapters("llama", num_hidden_layers=3))
    assert compiled.num_kinds == 1


def assert_compiled_equals_eager(loaded) -> CompiledLayers:
    batch = padded_batch(2, 16)
    objective, expected = run_units(loaded, batch)
    units = discover_units(loaded)
    compiled = CompiledLayers(units, "on", backend="aot_eager")
    mine, grads = run_units(loaded, batch, compiled)
    assert float(mine) == pytest.approx(float(objective), rel=1e-5)
    assert_same_grads(grads, expected)
    assert len(compiled._functions) == 2 * compiled.num_kinds and not compiled.why_not
    loaded.model.eval()
    assert not compiled.is_active(0)
    return compiled


def test_waiting_for_the_compiler_is_told():
    loaded = tiny_loaded("llama")
    told = []

    def backend(module, inputs):
        told.append(compiled.is_compiling)
        return module

    compiled = CompiledLayers(discover_units(loaded), "on", backend=backend)
    run_units(loaded, plain_batch(), compiled)
    assert told and all(told) and not compiled.is_compiling


@pytest.mark.slow
def test_the_usual_shape_keeps_code_of_its_own():
    """After rows of other lengths, for which code for any length is made."""
    loaded = tiny_loaded("llama")
    units = discover_units(loaded)
    sizes = []

    def backend(module, inputs):
        free = any(isinstance(value, torch.SymInt) for value in inputs)

        def run(*args):
            sizes.append("any" if free else "fixed")
            return module(*args)

        return run

    compiled = CompiledLayers(units, "on", backend=backend)
    found = []
    for length in (16, 12, 10, 14, 16, 9, 16):
        sizes.clear()
        run_units(loaded, plain_batch(2, length), compiled)
        found.append(set(sizes))
    assert found[0] == found[4] == found[6] == {"fixed"}
    assert "any" in found[3] and "any" in found[5]


def test_what_cannot_be_compiled_runs_eagerly_with_the_reason():
    loaded = tiny_loaded("llama")
    batch = plain_batch()
    objective, expected = run_units(loaded, batch)
    layer = type(loaded.model.model.layers[0])

    class Breaking(layer):
        def forward(self, *args, **kwargs):
            torch._dynamo.graph_break()
            return super().forward(*args, **kwargs)

    for module in loaded.model.model.layers:
        module.__class__ = Breaking
    units = discover_units(loaded)
    compiled = CompiledLayers(units, "auto", backend="eager")
    mine, grads = run_units(loaded, batch, compiled)
    assert float(mine) == pytest.approx(float(objective), rel=1e-5)
    assert_same_grads(grads, expected)
    assert "torch.compile failed" in compiled.why_not
    asked = CompiledLayers(units, "on", backend="eager")
    refused(EngineError, "cannot be compiled", lambda: run_units(loaded, batch, asked))


def test_dropout_and_balancing_losses_stay_eager():
    loaded = tiny_loaded("gpt2")
    set_dropout(loaded.model, 0.0)
    assert not draws_random_numbers(discover_units(loaded))
    set_dropout(loaded.model, 0.1)
    assert draws_random_numbers(discover_units(loaded))
    with pytest.raises(EngineError, match="dropout"):
        build_stream_engine(loaded, replace(TINY_SETTINGS, compile="on"), device="cpu", pinned_grant=False, trial=False)
    moe = tiny_loaded("mixtral", output_router_logits=True)
    with pytest.raises(EngineError, match="balancing loss"):
        build_stream_engine(moe, replace(TINY_SETTINGS, compile="on"), device="cpu", pinned_grant=False, trial=False)
    engine = build_stream_engine(moe, TINY_SETTINGS, device="cpu", pinned_grant=False, trial=False)
    assert "eager (compile: auto compiles on a GPU only)" in engine.describe()
    engine.close()


def test_the_compiler_is_imported_beside_the_block_when_layers_are_compiled(monkeypatch: pytest.MonkeyPatch):
    units, loads = discover_units(tiny_loaded("llama")), []

    def load(name: str):
        inside.wait(60)
        loads.append((name, threading.current_thread().name))
        raise ImportError("a compiler that cannot be imported is told at the first step")

    monkeypatch.setattr("outcore.flow.layers.compiled.importlib.import_module", load)
    for compiled in (CompiledLayers(units, "off"), CompiledLayers(units, "on", backend="eager")):
        with compiled.loading_compiler():
            pass
    assert not loads
    inside = threading.Event()
    with CompiledLayers(units, "on").loading_compiler():
        assert not loads
        inside.set()
    assert loads == [("torch._inductor.compile_fx", "load-compiler")]


def test_compiled_code_is_kept_where_no_restart_empties_it(tmp_path, monkeypatch):
    name = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setattr("outcore.flow.layers.compiled.built_folder", lambda: tmp_path / "environment")
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/tmp")
    for before in (None, "/tmp/torchinductor_somebody"):
        monkeypatch.delenv(name, raising=False) if before is None else monkeypatch.setenv(name, before)
        keep_compiled_code()
        assert os.environ[name].startswith(str(tmp_path / "environment" / "torch_compiled" / torch.__version__))
    monkeypatch.setenv(name, "/somewhere/else")
    keep_compiled_code()
    assert os.environ[name] == "/somewhere/else"
    monkeypatch.setenv(name, "/tmp/torchinductor_somebody")
    monkeypatch.setattr("outcore.flow.layers.compiled.built_folder", lambda: tmp_path / "a_file")
    (tmp_path / "a_file").touch()
    keep_compiled_code()
    assert os.environ[name] == "/tmp/torchinductor_somebody"

"""LoRA on fused experts: streamed training gives peft's numbers, also over a packed base, in tiles and from the drive;
what is exported is what peft and transformers read."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outcore.checkpoint.export import export_model
from outcore.engine.stream.build import build_stream_engine
from outcore.infer.opening.model import _with_adapter
from outcore.model import LoraSettings, ModelSettings, load_model
from outcore.model.adapters import apply_lora
from outcore.model.facts import checkpoint_name, model_facts
from tests.engine.inside import parts_of
from tests.engine.stream.training import LR, batches_of, plain_training
from tests.flow.models import TINY_SETTINGS, needs, plain_batch, tiny_loaded
from tests.refused import refused

LORA = LoraSettings(r=4, alpha=8, target_modules=("q_proj", "experts"))
pytestmark = pytest.mark.usefixtures("one_thread")
MIXTURES = [pytest.param(name, marks=needs(name)) for name in ("qwen3_moe", "mixtral", "gpt_oss")]


def adapted(name: str, implementation: str = "grouped_mm", lora: LoraSettings = LORA) -> Any:
    loaded = tiny_loaded(name)
    loaded.model.set_experts_implementation(implementation)
    model = apply_lora(loaded.model, lora, seed=3)
    return replace(loaded, model=model.train(), facts=model_facts(model))


def as_peft_computes(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, ParamWrapper):
            module.__class__ = ParamWrapper
    return model


def assert_trained_alike(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As a whole: AdamW moves a weight whose gradient is all but zero by the rounding of it."""
    assert (found - expected).norm() <= 1e-3 * expected.norm()


def stirred(model: Any) -> Any:
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("name", MIXTURES)
def test_products_and_gradients_are_those_of_peft(name, implementation):
    model, found = stirred(adapted(name, implementation).model), []
    for _ in range(2):
        model.zero_grad()
        result = model(**{key: plain_batch()[key] for key in ("input_ids", "labels")})
        result.loss.backward()
        found.append([result.logits.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
        as_peft_computes(model)
    assert len(found[0]) == 1 + 2 * 3 * len(model.get_base_model().model.layers)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


def trained(loaded: Any, changes: dict[str, Any], engines: list[Any], steps: int = 3):
    engine = build_stream_engine(loaded, replace(TINY_SETTINGS, **changes), device="cpu", pinned_grant=False)
    engines.append(engine)
    losses = [engine.train_step(batches_of(step), LR).loss for step in range(steps)]
    parts_of(engine).updates.drain()
    homes = parts_of(engine).homes.weights
    return losses, {name: homes.read(name).clone() for name in homes.names() if "lora_" in name}


PLACES: dict[str, tuple[str, dict[str, Any]]] = {
    "RAM": ("grouped_mm", {}), "drive": ("grouped_mm", {"weight_ram_bytes": 0, "state_ram_bytes": 0}),
    "tiles": ("eager", {"tiling": "on", "tile_bytes": 2500}),
}  # fmt: skip


@pytest.mark.more(after=1)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", MIXTURES)
def test_streamed_training_is_that_of_peft(name, place, engines, tmp_path):
    implementation, changes = PLACES[place]
    if place == "drive":
        changes = {**changes, "nvme_path": str(tmp_path)}
    reference = adapted(name, implementation)
    as_peft_computes(reference.model)
    expected, _ = plain_training(reference, 3, max_norm=1.0)
    losses, adapters = trained(adapted(name, implementation), changes, engines)
    assert losses == pytest.approx(expected, rel=2e-5)
    wanted = {checkpoint_name(n): p for n, p in reference.model.named_parameters() if "lora_" in n}
    assert set(adapters) == set(wanted) and sum("experts" in n for n in wanted) == 2 * len(wanted) // 3
    for name, value in adapters.items():
        assert_trained_alike(value, wanted[name].detach())


def test_over_a_packed_base_training_is_that_of_peft_over_its_values(engines):
    """The whole mixture in NF4, experts too; peft has the same bits of the base, expanded."""
    settings = ModelSettings(
        preset="tiny-moe", precision="fp32", seq_length=64, lora=LORA, quantize="nf4",
        config_overrides={"vocab_size": 128},
    )  # fmt: skip
    losses, adapters = trained(load_model(settings, lazy=True), {}, engines)
    units = parts_of(engines[-1]).units
    packed = {slot.name for unit in units.all for slot in unit.layout.packed_slots}
    assert {name.split(".")[-1] for name in packed} >= {"gate_up_proj", "down_proj"}
    assert not any(name.endswith("mlp.gate.weight") for name in packed), "routers stay as they are"
    reference = load_model(replace(settings, quantize=None))
    named = {checkpoint_name(n): p for n, p in reference.model.named_parameters()}
    for name in packed:
        named[name].data.copy_(parts_of(engines[-1]).homes.weights.read(name))
    as_peft_computes(reference.model)
    expected, _ = plain_training(reference, 3, max_norm=1.0)
    assert losses == pytest.approx(expected, rel=2e-5)
    for name, value in adapters.items():
        assert_trained_alike(value, named[name].detach())


@pytest.mark.parametrize("name", MIXTURES)
def test_exports_are_what_peft_and_transformers_read(name, tmp_path):
    loaded = adapted(name)
    base = tiny_loaded(name).model
    base.save_pretrained(tmp_path / "base")
    model = stirred(loaded.model).eval()
    ids = plain_batch()["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    export_model(tmp_path / "adapter", model, lambda parameter: parameter.detach(), adapter_only=True)
    export_model(tmp_path / "merged", model, lambda parameter: parameter.detach())
    kinds = {key.split("layers.0.")[-1] for key in load_file(tmp_path / "adapter" / "adapter_model.safetensors")}
    assert {"mlp.experts.base_layer.lora_A.weight", "mlp.experts.lora_B.weight"} <= kinds, "as vLLM looks for them"
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    answering = _with_adapter(tiny_loaded(name).model, tmp_path / "adapter").eval()
    assert not any(type(module) is ParamWrapper for module in answering.modules()), "no merged stack at inference"
    with torch.no_grad():
        for read in (theirs, merged, answering):
            torch.testing.assert_close(read(input_ids=ids).logits, expected, rtol=1e-3, atol=2e-4)


def test_routers_are_frozen_unless_they_are_named():
    frozen = {n: p.requires_grad for n, p in adapted("qwen3_moe").model.named_parameters() if "mlp.gate." in n}
    named = adapted("qwen3_moe", lora=replace(LORA, modules_to_save=("gate",))).model.named_parameters()
    trained_too = {n: p.requires_grad for n, p in named if "mlp.gate." in n}
    assert frozen and not any(frozen.values()) and all(trained_too.values())


@pytest.mark.parametrize(("name", "lora", "words"), [
    ("mixtral", {"dropout": 0.1}, "no dropout on such a weight"),
    ("mixtral", {"use_dora": True}, "no use_dora on such a weight"), ("llama", {}, "no weight that holds all experts"),
    ("mixtral", {"target_modules": ("w1",)}, "write experts for all of them"),
])  # fmt: skip
def test_what_peft_does_not_do_on_experts_is_refused(name, lora, words):
    refused(ValueError, words, lambda: apply_lora(tiny_loaded(name).model, replace(LORA, **lora), 0))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["off", "auto"])
def test_on_a_gpu_training_is_that_of_peft(compiled, engines):
    reference = adapted("qwen3_moe")
    as_peft_computes(reference.model)
    expected, _ = plain_training(reference, 3, max_norm=1.0)
    settings = replace(TINY_SETTINGS, compile=compiled)
    engines.append(build_stream_engine(adapted("qwen3_moe"), settings, device="cuda", trial=False))
    losses = [engines[-1].train_step(batches_of(step), LR).loss for step in range(3)]
    assert losses == pytest.approx(expected, rel=2e-3)

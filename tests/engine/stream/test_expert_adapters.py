"""LoRA on fused experts: streamed training gives peft's numbers, also over a packed base, in tiles and from the drive;
what is exported is what peft and transformers read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from outcore.common.quantities import KIB
from outcore.engine.stream.build import build_stream_engine
from outcore.model.adapters import apply_lora
from outcore.model.facts import model_facts
from outcore.model.load import load_model
from outcore.model.settings import LoraSettings, ModelSettings
from tests.engine.inside import parts_of
from tests.engine.stream.training import LR, batches_of, plain_training
from tests.flow.models import TINY_SETTINGS, needs, plain_batch, tiny_loaded

LORA = LoraSettings(r=4, alpha=8, target_modules=("q_proj", "experts"))
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.no_cover]
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
    "RAM": ("grouped_mm", {}),
    "drive": ("grouped_mm", {"weight_ram_bytes": 0, "state_ram_bytes": 0}),
    "one expert after another in tiles": ("eager", {"tiling": "all", "tile_bytes": 8 * KIB}),
}


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
    known = {checkpoint: value for checkpoint, value in adapters.items() if "experts" in checkpoint}
    assert len(known) == 4 * len(reference.model.get_base_model().model.layers)
    assert all(bool(value.abs().max() > 0) for value in known.values())

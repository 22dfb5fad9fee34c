"""One placement: what a run was told, what the planner forecasts and what the engine builds are the same bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from outcore.common.quantities import GIB, MIB, round_up
from outcore.config import DeepSpeedFile, ProcessFacts, TrainConfig, resolve
from outcore.engine.stream import StreamDecision
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.decision.decide import stream_decision
from outcore.engine.stream.decision.homes import RAM_RESERVE_BYTES, RunSizes
from outcore.flow.parts import discover_units, needs_of_parts, run_shape
from outcore.formats import open_packed
from outcore.model import LoraSettings, ModelSettings, load_model, preset_shape
from outcore.plan.record import Plan
from outcore.plan.run.forecast import plan_layout, run_request
from outcore.plan.stream.memory import BEYOND, RING, SLOTS
from outcore.sizing.shape import ModelShape
from outcore.sizing.training import needs_of_shape
from tests.engine.inside import parts_of
from tests.flow.models import plain_batch
from tests.plan.fakes import server

SHAPES = {
    "8 B": preset_shape("llama-8b"),
    "1 B, tied": preset_shape("llama-1b"),
    "8 B, LoRA": preset_shape("llama-8b").with_lora(16),
    "8 B, LoRA on NF4": preset_shape("llama-8b").with_lora(16).packed("nf4"),
    "4 B with gaps": preset_shape("qwen3-4b"),
}


def decided(
    shape: ModelShape, rows: int, count: int, length: int, ram_gib: int, **said: Any
) -> tuple[StreamDecision, Plan]:
    """The decision of a run on a server with so much RAM, and its forecast."""
    config = TrainConfig(per_device_train_batch_size=rows, gradient_accumulation_steps=count, **said)
    settings = resolve(config, DeepSpeedFile(), ProcessFacts("bf16"))
    tokens = (rows * length,) * count
    needs = needs_of_shape(shape, 2, settings.state_format, tokens)
    sizes = RunSizes(needs, tokens, ram_gib * GIB, has_cuda=True, row_tokens=length)
    decision = stream_decision(settings, sizes, nvme_check=lambda folder, needed_gb: (True, ""))
    hardware = server(ram_bytes=ram_gib * GIB, pinned_bytes=ram_gib * GIB // 2)
    layout = dataclasses.replace(decision.layout, tiling="off", device_bytes=None)
    return decision, plan_layout(shape, run_request(settings, layout, length, 0), hardware, layout)


def in_ram(plan: Plan, *names: str) -> int:
    return sum(plan.part_bytes(tier, name) for tier in ("ram", "pinned") for name in names)


@pytest.mark.parametrize("state_format", ["split", "fp32", "split8"])
@pytest.mark.parametrize("activations", ["ram", "auto", "device"])
@pytest.mark.parametrize("name", SHAPES)
def test_decision_and_plan_place_alike(name: str, activations: str, state_format: str) -> None:
    """4 x 16,384 and 3 x 20,480 tokens: the decision lent checkpoints all gradients' homes in sum, and was 2.7 and 4.6
    GiB off with 8 B."""
    for rows, count, length in ((16, 4, 1024), (10, 3, 2048), (2, 1, 512)):
        decision, plan = decided(
            SHAPES[name], rows, count, length, 512, activations=activations, state_format=state_format
        )
        placed = decision.placed
        assert in_ram(plan, BEYOND) == placed.beyond
        assert in_ram(plan, "gradients") == placed.gradients and in_ram(plan, "parameters") == placed.weights
        assert in_ram(plan, "master", "moments") == placed.states
        assert (placed.beyond > 0) == (activations != "device" and (count > 1 or "LoRA" in name))


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("ram_gib", [100, 40, 24, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_what_leaves_ram_is_what_was_decided(name: str, ram_gib: int, clip: float) -> None:
    """Parameters and states on a drive, what flows from it, gradients that share memory, pinned memory."""
    said = {"nvme_offload_path": "/drive", "zero_stage": "infinity", "activations": "ram", "max_grad_norm": clip}
    decision, plan = decided(SHAPES[name], 2, 4, 1024, ram_gib, **said)
    placed, needs = decision.placed, decision.placed.needs
    assert in_ram(plan, "parameters") == placed.weights and in_ram(plan, "master", "moments") == placed.states
    assert plan.part_bytes("nvme", "parameters") == needs.weights - placed.weights
    assert in_ram(plan, "gradients") == placed.gradients and in_ram(plan, BEYOND) == placed.beyond
    assert in_ram(plan, RING) == placed.ring and in_ram(plan, "weights read ahead") == placed.read_ahead
    assert plan.part_bytes("pinned", SLOTS) == placed.lanes
    blocks = 2 * 4096 * len(needs.parts)  # which homes end within
    pinned_bytes = min(placed.pinned.pool_bytes, placed.lanes + placed.crossing)
    assert pinned_bytes - blocks <= plan.used_bytes("pinned") <= pinned_bytes
    assert placed.on_drive > 0 or ram_gib > 8 or "LoRA" in name
    assert placed.has_homes or not clip
    assert any("gradients share" in note for note in decision.notes) is not placed.has_homes
    assert any("activation checkpoints have RAM of their own" in note for note in decision.notes) == (placed.beyond > 0)


LORA = LoraSettings(r=8)


@pytest.mark.parametrize("changes", [
    {}, {"lora": LORA}, {"lora": LORA, "quantize": "nf4"}, {"lora": LORA, "quantize": "int8"},
    {"lora": dataclasses.replace(LORA, use_dora=True)},
    {"lora": dataclasses.replace(LORA, modules_to_save=("lm_head",))},
])  # fmt: skip
@pytest.mark.parametrize("preset", ["tiny", "gpt2", "tiny-moe"])
def test_a_shape_needs_what_the_models_parts_do(preset: str, changes: dict) -> None:
    """Every part's home and gradient, gaps between parameters and packed matrices with them."""
    if "lora" in changes and changes["lora"].modules_to_save:
        table = "wte" if preset == "gpt2" else "embed_tokens"  # tied
        changes = {"lora": dataclasses.replace(LORA, modules_to_save=(table, "lm_head"))}
    settings = ModelSettings(preset=preset, precision="bf16", seq_length=64, vocab_size=300, **changes)
    loaded = load_model(settings, lazy=True, packed_feed=open_packed)
    tokens, uses_muon = (128, 64), not changes
    units = discover_units(loaded)
    built = needs_of_parts(units, "split", tokens, loaded.facts.hidden_size, uses_muon=uses_muon)
    assert needs_of_shape(run_shape(settings, None), 2, "split", tokens, uses_muon=uses_muon) == built
    assert built.weights == sum(part.layout.home_bytes for part in units.all)
    assert torch.bfloat16.itemsize * built.trained == built.gradients


@pytest.mark.more(after=4)
@pytest.mark.parametrize("activations", ["ram", "device"])
@pytest.mark.parametrize("changes", [{}, {"lora": LORA}, {"lora": LORA, "quantize": "nf4"}])
@pytest.mark.parametrize("spare_mib", [64, 30, 0])
def test_an_engine_is_built_as_it_was_decided(tmp_path, engines, changes: dict, activations: Any, spare_mib: int):
    """Decided from the configuration alone, with room for all, for some, and for nothing that may leave RAM."""
    model = ModelSettings(preset="tiny", precision="bf16", seq_length=64, vocab_size=300, **changes)
    config = TrainConfig(
        per_device_train_batch_size=4, gradient_accumulation_steps=3, activations=activations,
        nvme_offload_path=str(tmp_path), zero_stage="infinity", optimizer="adamw",
    )  # fmt: skip
    settings = resolve(config, DeepSpeedFile(), ProcessFacts("bf16"))
    tokens = (4 * 64,) * 3
    needs = needs_of_shape(run_shape(model, None), 2, settings.state_format, tokens)
    sizes = RunSizes(needs, tokens, RAM_RESERVE_BYTES + spare_mib * MIB, has_cuda=False, row_tokens=64)
    decision = stream_decision(settings, sizes, nvme_check=lambda folder, needed_gb: (True, ""))
    told = dataclasses.replace(decision.told, staging_bytes=256 * MIB)
    engine = build_stream_engine(
        load_model(model, lazy=True, packed_feed=open_packed), told, device="cpu", pinned_grant=False, trial=False
    )
    engines.append(engine)
    parts, placed = parts_of(engine), decision.placed
    engine.train_step([plain_batch(4, 64, seed=number) for number in range(3)], 1e-3)
    assert parts.homes.weights.ram_bytes == placed.weights
    assert parts.arena.size_bytes == sum(round_up(needs.gradient_bytes(part), 4096) for part in needs.parts)
    assert getattr(parts.schedule.activations, "host_bytes", 0) == placed.beyond
    assert (placed.on_drive == 0) == (spare_mib == 64 or (spare_mib == 30 and "lora" in changes))

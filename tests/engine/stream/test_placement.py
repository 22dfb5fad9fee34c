"""One placement: what a run was told, what the planner forecasts and what the engine builds are the same bytes."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outcore.common.quantities import GIB, KIB, MIB, round_up
from outcore.config import DeepSpeedFile, ProcessFacts, TrainConfig, resolve
from outcore.engine.base import Host
from outcore.engine.stream import StreamDecision
from outcore.engine.stream.blueprint import draw_blueprint
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.decision import decide
from outcore.engine.stream.decision.decide import stream_decision
from outcore.engine.stream.ranks import RankPlace
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.parts import discover_units, needs_of_parts, run_shape
from outcore.formats import open_packed
from outcore.model import LoraSettings, ModelSettings, load_model, preset_shape
from outcore.plan.profile import RunRequest
from outcore.plan.record import AHEAD, STAYING, Plan
from outcore.plan.run.forecast import plan_layout, run_request
from outcore.plan.stream.memory import BEYOND, LONG_ROWS, RANK_SLOTS, RING, SLOTS, placement_of, plan_stream, tiling_of
from outcore.plan.terms import Case
from outcore.sizing.layouts import StreamLayout
from outcore.sizing.shape import ModelShape
from outcore.sizing.streaming import CPU_PROCESS_BYTES, LANE_BYTES, PROCESS_BYTES, RAM_RESERVE_BYTES
from outcore.sizing.tiles import Holding
from outcore.sizing.training import (
    PartNeeds,
    Pins,
    TrainingLimits,
    TrainingNeeds,
    TrainingPlacement,
    needs_of_shape,
    place_training,
)
from tests.engine.inside import parts_of
from tests.engine.stream.ranks.world import run_ranks
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
    shape: ModelShape, rows: int, count: int, length: int, ram_gib: float, **said: Any
) -> tuple[StreamDecision, Plan]:
    """The decision of a run on a server with so much RAM, and its forecast."""
    ranks, device_bytes = said.pop("ranks", 1), said.pop("device_bytes", 1 << 60)
    config = TrainConfig(per_device_train_batch_size=rows, gradient_accumulation_steps=count, **said)
    settings = resolve(config, DeepSpeedFile(), ProcessFacts("bf16", ranks))
    tokens = (rows * length,) * count
    uses_muon = settings.optimizer == "muon"
    needs = needs_of_shape(shape, 2, settings.state_format, tokens, uses_muon=uses_muon, ranks=ranks)
    host = Host(True, int(ram_gib * GIB), "run")
    checked: Any = {"nvme_check": lambda folder, needed_gb: (True, "")}
    with pytest.MonkeyPatch.context() as patch:  # a card of this memory
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(decide, "free_device_bytes", lambda device: device_bytes)
        decision = stream_decision(settings, needs, host, tokens, length, shape, **checked)
    hardware = server(ram_bytes=int(ram_gib * GIB), pinned_bytes=int(ram_gib * GIB) // 2, num_gpus=ranks)
    layout = decision.layout
    request = run_request(settings, layout, length, 0)
    case = Case(shape, request, hardware, length, layout)
    planned = placement_of(case, tiling_of(case))
    assert settled(planned) == settled(decision.placed)
    return decision, plan_layout(shape, request, hardware, layout)


def settled(placed: TrainingPlacement) -> dict[str, Any]:
    """Fields that are settled before the engine is built: layers that stay and optimistic updates are found later."""
    later = ("stays", "stay_bytes", "ahead", "weight_budget")
    names = [field.name for field in dataclasses.fields(placed) if field.name not in later]
    return {name: getattr(placed, name) for name in (*names, "waits")}


def in_ram(plan: Plan, *names: str) -> int:
    return sum(plan.part_bytes(tier, name) for tier in ("ram", "pinned") for name in names)


@pytest.mark.parametrize("state_format", ["split", "fp32", "split8"])
@pytest.mark.parametrize("activations", ["ram", "auto", "device", "nvme"])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_decision_and_plan_place_alike(name: str, ranks: int, activations: str, state_format: str) -> None:
    """4 x 16,384 and 3 x 20,480 tokens: the decision lent checkpoints all gradients' homes in sum, and was 2.7 and 4.6
    GiB off with 8 B."""
    said = {"activations": activations, "state_format": state_format, "ranks": ranks}
    said |= {"nvme_offload_path": "/drive", "zero_stage": "infinity"} if activations == "nvme" else {}
    for rows, count, length in ((16, 4, 1024), (10, 3, 2048), (2, 1, 512)):
        decision, plan = decided(SHAPES[name], rows, count, length, 512, **said)
        placed = decision.placed
        assert in_ram(plan, RANK_SLOTS) == placed.rank_slots and (ranks > 1) == (placed.rank_slots > 0)
        assert in_ram(plan, BEYOND) == placed.beyond
        assert in_ram(plan, "gradients") == placed.gradients and in_ram(plan, "parameters") == placed.weights
        assert in_ram(plan, "master", "moments") == placed.states
        waits = activations in ("ram", "auto")
        assert (placed.beyond > 0) == waits or (waits and count == 1 and "LoRA" not in name)
        assert bool(placed.why_none_stays) == (ranks > 1 or state_format == "split8")
        assert bool(placed.why_all_wait) == (ranks > 1)
        assert set(placed.because()) <= set(decision.notes) and (ranks == 1 or len(placed.because()) == 2)


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


@pytest.mark.parametrize("clip", [1.0, 0.0])
@pytest.mark.parametrize("vram_gib", [8, 24])
@pytest.mark.parametrize("name", ["8 B", "1 B, tied", "8 B, LoRA"])
def test_idle_memory_goes_to_what_the_placement_names(name: str, vram_gib: int, clip: float) -> None:
    """Layers that stay and updates that begin early: whole parts, each once, by the rule that the engine asks, too."""
    shape, request = SHAPES[name], RunRequest(max_grad_norm=clip)
    layout = StreamLayout(4, 4, "ram", resident_bytes=1 << 40, ahead_bytes=1 << 40)
    plan = plan_stream(shape, request, server(ram_bytes=400 * GIB, vram_bytes=vram_gib * GIB), 1024, layout)
    needs = needs_of_shape(shape, 2, "split", (4096,) * 4)
    placed = place_training(needs, TrainingLimits(1 << 50, Pins(0), waits_for_norm=clip > 0))
    stays = placed.staying(plan.part_bytes("vram", STAYING), 4096 * shape.hidden_size * 2)
    assert stays.stay_bytes == plan.part_bytes("vram", STAYING) and (stays.stays > 0 or vram_gib == 8)
    begun = stays.beginning_ahead(1 << 50)
    assert plan.part_bytes("ram", AHEAD) in (begun.ahead_bytes, 0) and bool(begun.why_all_wait) == (not clip)
    whole = list(range(stays.stays, shape.num_layers))[::-1]
    assert not clip or list(begun.ahead)[-len(whole) :] == whole
    assert stays.beginning_ahead(begun.ahead_bytes - 1).ahead == begun.ahead[:-1]


@pytest.mark.parametrize("tiled", [frozenset({0, 5}), frozenset({1, 2}), frozenset(range(6))])
def test_tiles_keep_rows_in_ram_and_lend_nothing(tiled: frozenset[int]) -> None:
    """A holding counts parts in the model's order, the placement from the layers on."""
    layer, end = PartNeeds(1 << 20, 1 << 20, 1 << 19), PartNeeds(1 << 22, 1 << 22, 1 << 21)
    needs = TrainingNeeds((layer,) * 4, (end,) * 2, 2, "split", (1 << 10,))
    limits = TrainingLimits(0, Pins(0), states_may_spill=True, weights_may_spill=True, holding=Holding(tiled))
    placed = place_training(needs, limits)
    assert placed.tiled == {index - 1 for index in tiled if 1 <= index <= 4}
    assert [cut > 0 for cut in placed.cuts] == [False] * 4 + [0 in tiled, 5 in tiled]
    assert [lent > 0 for lent in placed.lent] == [number not in placed.tiled and number < 2 for number in range(4)]
    assert placed.on_drive and placed.why_none_stays == "parts are computed in tiles"


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


CHANGES: dict[str, dict] = {"full": {}, "LoRA": {"lora": LORA}, "LoRA on NF4": {"lora": LORA, "quantize": "nf4"}}


def small(changes: str, preset: str = "tiny") -> ModelSettings:
    """A model that is quickly made."""
    return ModelSettings(preset=preset, precision="bf16", seq_length=64, vocab_size=300, **CHANGES[changes])


def decided_here(
    folder: Path, changes: str, activations: Any, *, tiling: Any = "off", spare_mib: int = 64, ranks: int = 1
) -> StreamDecision:
    """The decision of a tiny run on this machine, from the configuration alone, with `spare_mib` of RAM for homes."""
    config = TrainConfig(
        per_device_train_batch_size=4, gradient_accumulation_steps=3, activations=activations, tiling=tiling,
        nvme_offload_path=str(folder), zero_stage="infinity", optimizer="adamw", tile_bytes=256 * KIB,
    )  # fmt: skip
    settings = resolve(config, DeepSpeedFile(), ProcessFacts("bf16", ranks))
    shape, tokens = run_shape(small(changes), None), (4 * 64,) * 3
    needs = needs_of_shape(shape, 2, settings.state_format, tokens, ranks=ranks)
    host = Host(False, ranks * (CPU_PROCESS_BYTES + LANE_BYTES) + RAM_RESERVE_BYTES + spare_mib * MIB, "run")
    checked: Any = {"nvme_check": lambda folder, needed_gb: (True, "")}
    return stream_decision(settings, needs, host, tokens, 64, shape, **checked)


def built(place: RankPlace, cases: list[tuple[str, StreamSettings]]) -> list[dict[str, int]]:
    """Bytes that an engine of this rank holds after a step, by the placement's names."""
    found = []
    for changes, told in cases:
        told = dataclasses.replace(told, staging_bytes=256 * MIB)
        loaded = load_model(small(changes), lazy=True, packed_feed=open_packed)
        engine = build_stream_engine(loaded, told, device="cpu", pinned_grant=False, trial=False, place=place)
        with closing(engine):
            engine.train_step([plain_batch(4, 64, seed=number) for number in range(3)], 1e-3)
            parts = parts_of(engine)
            beyond = getattr(parts.schedule.activations, "host_bytes", 0)
            slots = parts.save_buffer
            found.append({
                "weights": parts.homes.weights.ram_bytes, "gradients": parts.arena.size_bytes,
                "beyond": place.world_size * beyond, "rank_slots": 0 if slots is None else slots.nbytes,
            })  # fmt: skip
    return found


def as_placed(placed: TrainingPlacement) -> dict[str, int]:
    """The bytes that `built` reads, by the placement; gradients of whole blocks."""
    needs = placed.needs
    gradients = sum(round_up(needs.gradient_bytes(part), 4096) for part in needs.parts)
    return {"weights": placed.weights, "gradients": gradients, "beyond": placed.beyond, "rank_slots": placed.rank_slots}


@pytest.mark.more(after=4)
@pytest.mark.parametrize(("activations", "tiling"), [("ram", "off"), ("device", "off"), ("nvme", "off"), ("ram", "on")])
@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize("spare_mib", [64, 30, 0])
def test_an_engine_is_built_as_it_was_decided(tmp_path, changes: str, activations: Any, spare_mib: int, tiling: Any):
    """With room for all, for some, and for nothing that may leave RAM."""
    decision = decided_here(tmp_path, changes, activations, tiling=tiling, spare_mib=spare_mib)
    assert built(RankPlace(), [(changes, decision.told)]) == [as_placed(decision.placed)]
    assert (decision.placed.on_drive == 0) == (spare_mib == 64 or (spare_mib == 30 and "LoRA" in changes))


@pytest.mark.more
def test_ranks_are_built_as_it_was_decided(tmp_path) -> None:
    """Each with its slots and its activation checkpoints, over homes that are there once."""
    found = [(changes, decided_here(tmp_path, changes, "ram", ranks=2)) for changes in ("full", "LoRA")]
    ranks = run_ranks(2, tmp_path / "ranks", built, cases=[(changes, decision.told) for changes, decision in found])
    assert ranks == [[as_placed(decision.placed) for _, decision in found]] * 2


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_every_rank_has_a_ring_of_its_own(ranks: int) -> None:
    """Three ranks had 1.5 GiB of rings, eight 4, and 1 GiB was counted."""
    needs = needs_of_shape(SHAPES["8 B"], 2, "split", (1024,), ranks=ranks)
    placed = place_training(needs, TrainingLimits(0, Pins(0), states_may_spill=True))
    share = {1: GIB, 3: 512 * MIB, 8: 512 * MIB}[ranks]
    assert ranks * 0.9 * share < placed.ring <= ranks * share


FORMATS = st.sampled_from(["split", "fp32", "split8", "fp32_m8"])
ACTIVATIONS = st.sampled_from(["ram", "nvme", "device"])


@given(
    preset=st.sampled_from(["tiny", "gpt2", "tiny-moe"]),
    changes=st.sampled_from(list(CHANGES)),
    ranks=st.sampled_from([1, 1, 2, 3]), state_format=FORMATS, activations=ACTIVATIONS,
    rows=st.integers(1, 8), count=st.integers(1, 4), clip=st.sampled_from([1.0, 0.0]),
    room=st.floats(0, 1.5), drive=st.booleans(), tiling=st.sampled_from(["off", "on", "tokens", "auto"]),
    device_kib=st.integers(200, 20_000),
)  # fmt: skip
@hypothesis.settings(max_examples=15, deadline=None, phases=[hypothesis.Phase.generate])  # shrinking takes minutes
def test_decision_plan_and_blueprint_are_one_placement(
    preset: str, changes: str, ranks: int, state_format: str, activations: Any, rows: int, count: int, clip: float,
    room: float, drive: bool, tiling: str, device_kib: int,
) -> None:  # fmt: skip
    """Of random runs, on a drive and with several ranks, too. `room`: for homes, as a share of what they take."""
    model = small(changes, preset)
    shape, tokens = run_shape(model, None), (rows * 64,) * count
    said = {"nvme_offload_path": "/drive", "zero_stage": "infinity"} if drive or activations == "nvme" else {}
    needs = needs_of_shape(shape, 2, state_format, tokens, ranks=ranks)
    beside = ranks * (PROCESS_BYTES + 2 * LANE_BYTES) + RAM_RESERVE_BYTES
    homes = needs.weights + needs.states + needs.gradients + needs.checkpoints
    decision, plan = decided(
        shape, rows, count, 64, (beside + room * homes) / GIB, state_format=state_format, activations=activations,
        ranks=ranks, max_grad_norm=clip, tiling=tiling, tile_bytes=4 * KIB, compile="off",
        device_bytes=device_kib * KIB, **said,
    )  # fmt: skip
    placed, cut = decision.placed, decision.placed.holding.tile_tokens
    hypothesis.assume(tiling == "off" or not cut or (preset == "tiny" and activations != "nvme"))  # the engine refuses
    drawn = draw_blueprint(
        load_model(model, lazy=True, packed_feed=open_packed),
        decision.told,
        torch.device("cpu"),
        trial=False,
        build=build_stream_engine,
        place=RankPlace(0, ranks),
    )
    assert settled(drawn.placed) == settled(placed)
    assert in_ram(plan, "parameters") == placed.weights and in_ram(plan, "gradients") == placed.gradients
    assert abs(in_ram(plan, "master", "moments") - placed.states) <= 1
    assert in_ram(plan, BEYOND, LONG_ROWS) == placed.beyond and in_ram(plan, RANK_SLOTS) == placed.rank_slots
    assert in_ram(plan, RING) == placed.ring and in_ram(plan, "weights read ahead") == placed.read_ahead
    assert plan.part_bytes("nvme", "parameters") == placed.spilled_weights
    on_drive = placed.needs.checkpoints if activations == "nvme" else 0
    assert plan.part_bytes("nvme", "activation checkpoints") == on_drive
    assert plan.part_bytes("pinned", SLOTS) == placed.lanes

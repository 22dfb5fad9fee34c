"""Forecast of the layer-streaming engine on the GPUs of one host: bytes per tier and seconds per step. Pure functions.

Schedule (vertical): every unit runs all micro-batches before the next, so parameters cross the link once forward and
once backward whatever the accumulation (units in tiles: oftener). Three layer buffers and one for embedding and head,
an fp32 sum of a unit's gradients and two buffers for their way down, AdamW on the CPU. `memory` counts bytes
that stay, `time` those that move, `tiles` asks the engine's rule what is tiled; here they become a `Plan`."""

from __future__ import annotations

from dataclasses import replace

from outcore.common.quantities import format_gib, format_s
from outcore.plan.hardware import Hardware
from outcore.plan.profile import RunRequest
from outcore.plan.record import AHEAD, SPARE, STAYING, Item, Plan
from outcore.plan.stream.memory import (
    GRAPHS,
    beginning_ahead,
    drive_states,
    graph_bytes,
    pinned_and_rest,
    placement_of,
    ram_parts,
    staying,
    tiling_of,
    vram_parts,
)
from outcore.plan.stream.time import Placed, step_time
from outcore.plan.terms import Case, Spill
from outcore.sizing.activations import checkpoint_bytes
from outcore.sizing.layouts import StreamLayout
from outcore.sizing.shape import ModelShape
from outcore.sizing.streaming import LEAST_GAIN
from outcore.sizing.tiles import Tiling


def plan_stream(
    shape: ModelShape, request: RunRequest, hardware: Hardware, seq_length: int, layout: StreamLayout
) -> Plan:
    """The plan of one layout, whether it fits or not. Layers are recomputed whatever the request says."""
    asked, request = request, replace(request, activation_checkpointing=True)
    if shape.stays_eager:
        layout = replace(layout, compiled=False, cuda_graphs=False)
    case = Case(shape, request, hardware, seq_length, layout)
    checkpoints = checkpoint_bytes(shape, request.element_bytes, case.micro_tokens * layout.accumulation)
    tiling = tiling_of(case)
    homes = placement_of(case, tiling)
    spill = Spill(homes.spilled_states / max(1, homes.needs.states), homes.spilled_weights / homes.needs.weights)
    ram, pinned, pageable = pinned_and_rest(homes, ram_parts(case, tiling, homes))
    vram = vram_parts(case, tiling)
    graphs = graph_bytes(case, tiling, vram) if not tiling.layers else None
    tensors, pool = graphs or (0, 0)
    vram.append(Item("vram", GRAPHS, tensors))
    vram = [replace(p, size_bytes=p.size_bytes + pool) if p.name == SPARE else p for p in vram]
    placed = Placed(homes, spill, pageable, checkpoints, tiling, graphs is not None)
    stay = replace(placed, homes=staying(case, homes, vram, pool))
    if layout.resident_bytes is not None or (stay.homes.stays and _gains(case, stay, placed)):
        placed = stay
    vram.append(Item("vram", STAYING, placed.homes.stay_bytes))
    notes = _notes(shape, asked, tiling, pageable, placed.homes.stays)
    begun, time_whole = replace(placed, homes=beginning_ahead(case, placed.homes, [*ram, *pinned])), None
    ahead_bytes = begun.homes.ahead_bytes
    if _gains(case, begun, placed):
        ram.append(Item("ram", AHEAD, ahead_bytes))
        time_whole = step_time(case, begun)[1]
        notes.append(
            f"a step that clips nothing takes {format_s(time_whole.step_s)}: its updates begin in backward, in "
            f"{format_gib(ahead_bytes)} of idle RAM (--ahead_gib 0: all wait for the norm)"
        )
    drive = drive_states(homes, layout.stored_states(request.format))
    if layout.checkpoints_home == "nvme":
        drive.append(Item("nvme", "activation checkpoints", hardware.num_gpus * checkpoints))
    drive += case.kept_checkpoints
    traffic, time = step_time(case, placed)
    return case.plan(
        (*vram, *pinned, *ram, *drive),
        hardware.pinned_bytes,
        traffic,
        engine="stream",
        zero_stage="infinity" if spill != Spill() else "zero3",
        offload=spill.words(),
        state_format=request.format,
        homes={
            "parameters": _home(spill.parameters),
            "optimizer states": _home(spill.states),
            "gradients": "RAM",
            "activation checkpoints": {"vram": "VRAM", "ram": "RAM", "nvme": "NVMe"}[layout.checkpoints_home],
        },
        time=time,
        time_whole=time_whole,
        checkpoint_s=hardware.drive_s(case.saved_bytes * spill.states, case.saved_bytes),
        tiling=layout.tiling,
        notes=tuple(notes),
    )


def _gains(case: Case[StreamLayout], more: Placed, less: Placed) -> bool:
    """Whether a step with `more` is worth the memory."""
    with_s, without_s = (step_time(case, one)[1].step_s for one in (more, less))
    return with_s <= (1 - LEAST_GAIN) * without_s


def _home(share: float) -> str:
    if share <= 0:
        return "RAM"
    return "NVMe" if share >= 1 else f"RAM {100 * (1 - share):.0f} % + NVMe {100 * share:.0f} %"


def _notes(shape: ModelShape, request: RunRequest, tiling: Tiling, pageable: float, stays: int) -> list[str]:
    notes: list[str] = []
    if stays:
        notes.append(
            f"{stays} of {shape.num_layers} layers stay in idle GPU memory, which is given back when a larger "
            "step needs it (--resident_gib 0: none does)"
        )
    if words := tiling.words():
        notes.append(words)
    if pageable > 0.01:
        notes.append(
            f"{100 * pageable:.0f} % of the homes in RAM are pageable and pass the lanes' slots: three times their "
            "bytes in DRAM traffic"
        )
    if not request.activation_checkpointing:
        notes.append("the streaming engine always recomputes layers in the backward pass")
    return notes

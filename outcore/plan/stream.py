"""Forecast of the layer-streaming engine on one GPU: bytes per tier and seconds per step. Pure functions.

Schedule (vertical): every unit runs all micro-batches before the next, so parameters cross the link once forward and
once backward whatever the accumulation. Two or three layer buffers and one for embedding and head, an fp32 sum of a
unit's gradients and two buffers for their way down, AdamW on the CPU. The staging pool holds the lanes' slots and, as
far as it reaches, homes of parameters and gradients; other homes are pageable and copied through the slots.

States live in RAM as far as it goes; what does not fit goes to the drive, optimizer states first (a byte of them moves
twice a step), then gradients, then parameters (three times). Exact clipping needs the norm first, so updates run under
the next forward pass. The time model reproduces the prototype's measured runs within 20 % (tests/test_plan_stream.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.plan import constants as k
from outcore.plan.hardware import Hardware
from outcore.plan.nvme_space import CHECKPOINTS, nvme_use
from outcore.plan.record import Part, Plan, StepTime, TierUse
from outcore.plan.request import RunRequest
from outcore.plan.shape import ModelShape
from outcore.plan.work import checkpoint_bytes, layer_activation_bytes, logits_bytes, overlapped_s, step_flops
from outcore.units import GB

GRADIENT_SLOTS = 4
"""Units' worth of gradients kept without clipping: two on the way down, two being applied."""


PARAMETERS, GRADIENTS = "parameters", "gradients"


@dataclass(frozen=True)
class StreamLayout:
    """One choice of what the planner may vary."""

    micro_batch: int
    accumulation: int
    tiles: int = 1
    """Slices of the largest unit that are on the GPU one at a time; smaller units are cut only to that size."""
    checkpoints_home: str = "vram"
    """'vram' | 'ram' | 'nvme'."""
    layer_buffers: int = k.LAYER_BUFFERS[0]


@dataclass(frozen=True)
class _Spill:
    """Shares of each kind that live on the drive."""

    states: float = 0.0
    gradients: float = 0.0
    parameters: float = 0.0


def plan_stream(
    shape: ModelShape, request: RunRequest, hardware: Hardware, seq_length: int, layout: StreamLayout
) -> Plan:
    """The plan of one layout, whether it fits or not."""
    ram, sizes = _ram_parts(shape, request, seq_length, layout)
    spill, ram = _spill(ram, sizes, hardware, bool(shape.lora_r))
    ram, pinned, pageable = _pin(ram, request, hardware)
    vram = _vram_parts(shape, request, seq_length, layout)
    drive = [
        *_drive_states(sizes, spill),
        *(
            [Part("nvme", "activation checkpoints", _all_checkpoints(shape, request, seq_length, layout))]
            if layout.checkpoints_home == "nvme"
            else []
        ),
    ]
    saved_bytes = k.CHECKPOINT_BYTES_PER_TRAINABLE * shape.trainable_params
    if not request.checkpoints_elsewhere:
        drive.append(Part("nvme", CHECKPOINTS, saved_bytes * (request.save_total_limit + 1)))
    parts = [p for p in (*vram, *pinned, *ram, *drive) if p.size_bytes > 0]
    time, read_bytes, written_bytes = _time(shape, request, hardware, seq_length, layout, sizes, spill, pageable)
    in_drive = saved_bytes * spill.states
    ram_used = sum(p.size_bytes for p in parts if p.tier in ("ram", "pinned"))
    return Plan(
        model=shape.name,
        params=shape.total_params,
        trainable_params=shape.trainable_params,
        machine=hardware.name,
        engine="stream",
        zero_stage="infinity" if spill != _Spill() else "zero3",
        offload=_offload_words(spill),
        state_format=request.format,
        precision=request.precision,
        seq_length=seq_length,
        micro_batch=layout.micro_batch,
        accumulation=layout.accumulation,
        num_gpus=1,
        lora_r=shape.lora_r,
        homes={
            "parameters": _home(spill.parameters),
            "optimizer states": _home(spill.states),
            "gradients": _home(spill.gradients),
            "activation checkpoints": {"vram": "VRAM", "ram": "RAM", "nvme": "NVMe"}[layout.checkpoints_home],
        },
        parts=tuple(parts),
        tiers=(
            TierUse("vram", sum(p.size_bytes for p in vram), hardware.vram_bytes),
            TierUse("pinned", sum(p.size_bytes for p in pinned), hardware.pinned_bytes),
            TierUse("ram", ram_used, hardware.ram_bytes),
            nvme_use(drive, hardware),
        ),
        time=time,
        drive_read_bytes_per_step=int(read_bytes),
        drive_written_bytes_per_step=int(written_bytes),
        drive_rated_write_bytes=hardware.rated_write_bytes,
        checkpoint_bytes=saved_bytes,
        checkpoint_s=hardware.drive_s(in_drive, saved_bytes),
        notes=_notes(request, hardware, layout, pageable),
        compute_known=hardware.compute_tflops is not None,
    )


def _all_checkpoints(shape: ModelShape, request: RunRequest, seq_length: int, layout: StreamLayout) -> int:
    return checkpoint_bytes(shape, request, seq_length * layout.micro_batch * layout.accumulation)


def _vram_parts(shape: ModelShape, request: RunRequest, seq_length: int, layout: StreamLayout) -> list[Part]:
    e, tile = request.element_bytes, -(-shape.largest_unit_params // layout.tiles)
    adapters = -(-shape.adapter_params // shape.num_layers)  # a layer's
    layer, ends = min(max(shape.layer_params) + adapters, tile), min(shape.ends_params, tile)
    tokens = seq_length * layout.micro_batch
    activations = layer_activation_bytes(shape, request, seq_length, tokens)
    if layout.checkpoints_home == "vram":
        checkpoints = _all_checkpoints(shape, request, seq_length, layout)
    else:  # a ring: the layer's own inputs of all micro-batches and the next ones on their way
        checkpoints = 2 * seq_length * layout.micro_batch * layout.accumulation * shape.hidden_size * e
    buffers = min(layout.layer_buffers, shape.num_layers) * layer + ends
    # Sum over micro-batches in fp32: of one unit, and of a tied weight until its second use is in.
    if shape.lora_r:
        trained = summed = adapters
    else:
        trained, summed = max(layer, ends), layer + ends if shape.tied else max(layer, ends)
    parts = [Part("vram", "parameters", e * buffers), Part("vram", "gradients", 4 * summed + 2 * e * trained)]
    return [
        *parts,
        Part("vram", "activation checkpoints", checkpoints),
        Part("vram", "activations of the largest unit", activations),
        Part("vram", "logits chunk beyond it", max(0, logits_bytes(shape, tokens) - activations)),
        Part("vram", "framework overhead", k.VRAM_OVERHEAD_BYTES),
    ]


def _ram_parts(
    shape: ModelShape, request: RunRequest, seq_length: int, layout: StreamLayout
) -> tuple[list[Part], dict[str, int]]:
    """RAM with everything in it, and the sizes of what may spill."""
    e, trained = request.element_bytes, shape.trainable_params
    master, moments = k.STATE_FORMATS[request.format]
    slots = min(GRADIENT_SLOTS * shape.largest_unit_params, trained)
    sizes = {
        PARAMETERS: e * shape.total_params,
        "master": int(master * trained),
        "moments": int(moments * trained),
        GRADIENTS: e * (trained if request.clips else slots),
    }
    fixed = [
        Part("ram", "lanes' slots", k.LANE_BYTES),
        Part("ram", "framework overhead", k.STREAM_RAM_OVERHEAD_BYTES),
        Part("ram", "page cache reserve", k.PAGE_CACHE_RESERVE_BYTES),
    ]
    if layout.checkpoints_home == "ram":
        fixed.append(Part("ram", "activation checkpoints", _all_checkpoints(shape, request, seq_length, layout)))
    return [Part("ram", name, size) for name, size in sizes.items()] + fixed, sizes


def _pin(ram: list[Part], request: RunRequest, hardware: Hardware) -> tuple[list[Part], list[Part], float]:
    """RAM without what the staging pool takes, the pool's parts, and the share of homes that stays pageable."""
    if request.staging_bytes is not None:
        pool = request.staging_bytes
    else:
        pool = min(k.DEFAULT_STAGING_BYTES, max(hardware.pinned_bytes, k.LANE_BYTES))
    left = max(0, pool - k.LANE_BYTES)
    pinned = [Part("pinned", "lanes' slots", k.LANE_BYTES)]
    homes = sum(p.size_bytes for p in ram if p.name in (PARAMETERS, GRADIENTS))
    rest: list[Part] = []
    for part in ram:
        if part.name == "lanes' slots":
            continue
        taken = min(left, part.size_bytes) if part.name in (PARAMETERS, GRADIENTS) else 0
        left -= taken
        if taken:
            pinned.append(Part("pinned", part.name, taken))
        rest.append(Part(part.tier, part.name, part.size_bytes - taken))
    kept = sum(p.size_bytes for p in rest if p.name in (PARAMETERS, GRADIENTS))
    return rest, pinned, kept / homes if homes else 0.0


def _spill(
    parts: list[Part], sizes: dict[str, int], hardware: Hardware, frozen_base: bool
) -> tuple[_Spill, list[Part]]:
    """Shares that go to the drive so that RAM holds the rest, and the RAM parts that stay.

    What moves least per byte and step goes first: states twice, gradients twice, parameters three times. A frozen base
    moves twice and is never written, so with adapters it goes first.
    """
    over = sum(p.size_bytes for p in parts) - hardware.ram_bytes
    groups = [("master", "moments"), (GRADIENTS,), (PARAMETERS,)]
    shares: dict[str, float] = dict.fromkeys(sizes, 0.0)
    for names in reversed(groups) if frozen_base else groups:
        group = sum(sizes[name] for name in names)
        if over <= 0 or not group or not hardware.nvme_free_bytes:
            continue
        shares |= dict.fromkeys(names, min(1.0, over / group))
        over -= group
    stay = [Part(p.tier, p.name, int(p.size_bytes * (1 - shares.get(p.name, 0.0)))) for p in parts if p.tier == "ram"]
    return _Spill(shares["master"], shares[GRADIENTS], shares[PARAMETERS]), stay


def _drive_states(sizes: dict[str, int], spill: _Spill) -> list[Part]:
    share = {"master": spill.states, "moments": spill.states, GRADIENTS: spill.gradients}
    return [Part("nvme", name, int(size * share.get(name, spill.parameters))) for name, size in sizes.items()]


def _time(
    shape: ModelShape, request: RunRequest, hardware: Hardware, seq_length: int, layout: StreamLayout,
    sizes: dict[str, int], spill: _Spill, pageable: float,
) -> tuple[StepTime, float, float]:  # fmt: skip
    """The step, and the bytes the drive reads and writes in it."""
    e, trained = request.element_bytes, shape.trainable_params
    tokens = seq_length * layout.micro_batch * layout.accumulation
    flops = step_flops(shape, request, seq_length, tokens)
    per_s = hardware.compute_tflops * 1e12 if hardware.compute_tflops else float("inf")
    forward_s, backward_s = flops.forward / per_s, flops.backward / per_s
    head = shape.head_params + (shape.head_weight_numel if shape.tied else 0)
    up_forward = e * (shape.embedding_params + sum(shape.layer_params) + shape.adapter_params + head)
    up_backward = e * (sum(shape.layer_params) + shape.adapter_params)
    moved = _all_checkpoints(shape, request, seq_length, layout) if layout.checkpoints_home != "vram" else 0
    down = e * trained
    states = spill.states * (sizes["master"] + sizes["moments"])
    gradients = spill.gradients * sizes[GRADIENTS]
    weights = spill.parameters * e * shape.total_params
    in_drive = moved if layout.checkpoints_home == "nvme" else 0
    forward_read = spill.parameters * up_forward + states + gradients
    forward_written = states + in_drive + (weights if not shape.lora_r else 0.0)
    backward_read, backward_written = spill.parameters * up_backward + in_drive, gradients
    dram_per_s = k.DRAM_SHARE * hardware.ram_gb_per_s * GB
    optimizer_s = k.OPTIMIZER_DRAM_BYTES[request.format] * trained / dram_per_s
    ring = 1 + 2 * pageable  # a pageable home is copied once more, through a slot: a read and a write
    copies_s = [
        (ring * copied + through_drive) / dram_per_s
        for copied, through_drive in (
            (up_forward + moved, forward_read + forward_written),
            (up_backward + moved + down, backward_read + backward_written),
        )
    ]
    h2d_rate, d2h_rate = hardware.h2d_gb_per_s * GB, hardware.d2h_gb_per_s * GB
    drive_s = [
        hardware.drive_s(read, written) / k.STREAM_DRIVE_SHARE
        for read, written in ((forward_read, forward_written), (backward_read, backward_written))
    ]
    h2d_s = [up_forward / h2d_rate, (up_backward + moved) / h2d_rate]
    d2h_s = [moved / d2h_rate, down / d2h_rate]
    if request.clips:  # updates wait for the norm, then run under the next forward pass
        step_s = overlapped_s(forward_s, h2d_s[0], d2h_s[0], optimizer_s + copies_s[0], drive_s[0])
        step_s += overlapped_s(backward_s, h2d_s[1], d2h_s[1], copies_s[1], drive_s[1])
    else:
        step_s = overlapped_s(forward_s + backward_s, sum(h2d_s), sum(d2h_s), optimizer_s + sum(copies_s), sum(drive_s))
    read, written = forward_read + backward_read, forward_written + backward_written
    both_s, alone = sum(drive_s), read + written
    return (
        StepTime(
            compute_s=forward_s + backward_s,
            h2d_s=sum(h2d_s),
            d2h_s=sum(d2h_s),
            drive_read_s=both_s * read / alone if alone else 0.0,
            drive_write_s=both_s * written / alone if alone else 0.0,
            cpu_optimizer_s=optimizer_s + sum(copies_s),
            host_overhead_s=0.0,
            step_s=step_s,
        ),
        read,
        written,
    )


def _home(share: float) -> str:
    if share <= 0:
        return "RAM"
    return "NVMe" if share >= 1 else f"RAM {100 * (1 - share):.0f} % + NVMe {100 * share:.0f} %"


def _offload_words(spill: _Spill) -> str:
    if spill == _Spill():
        return "all in RAM"
    named = (("states", spill.states), ("gradients", spill.gradients), ("parameters", spill.parameters))
    whole = [what for what, share in named if share >= 1]
    if len(whole) == len(named):
        return "all on NVMe"
    parts = [f"{100 * share:.0f} % of {what}" for what, share in named if 0 < share < 1]
    return " and ".join([*whole, *parts]) + " on NVMe"


def _notes(request: RunRequest, hardware: Hardware, layout: StreamLayout, pageable: float) -> tuple[str, ...]:
    notes = []
    if layout.tiles > 1:
        notes.append(
            f"the largest unit is computed in {layout.tiles} tiles, so that its weights and gradients fit the GPU"
        )
    if pageable > 0.01:
        notes.append(
            f"{100 * pageable:.0f} % of the homes in RAM are pageable and pass the lanes' slots: three times their "
            "bytes in DRAM traffic"
        )
    if not request.activation_checkpointing:
        notes.append("the streaming engine always recomputes layers in the backward pass")
    return tuple(notes)

"""Bytes of the streaming engine by part and tier, and what goes to the drive so that RAM holds the rest.

What must be in RAM: gradients (all of them with clipping, because updates wait for the global norm; else at least three
of the largest), the lanes' slots, the ring through which states on the drive flow. What may leave it: master and
moments together, chunk by chunk, because every byte of both moves the same way; then parameters. A frozen base leaves
first: it is read twice a step and never written.

Forecast of the layer-streaming engine on the GPUs of one host: bytes per tier and seconds per step. Pure functions.

Schedule (vertical): every unit runs all micro-batches before the next, so parameters cross the link once forward and
once backward whatever the accumulation (units in tiles: oftener). Three layer buffers and one for embedding and head,
an fp32 sum of a unit's gradients and two buffers for their way down, AdamW on the CPU. `memory` counts bytes
that stay, `time` those that move, `tiles` asks the engine's rule what is tiled; here they become a `Plan`."""

from __future__ import annotations

from dataclasses import replace

from outcore.common.quantities import format_gib, format_s
from outcore.plan import constants as k
from outcore.plan.hardware import Hardware
from outcore.plan.profile import RunRequest
from outcore.plan.record import AHEAD, BORDERS, EVALUATION, MASKS, NOT_TENSORS, OVERHEAD, SPARE, STAYING, Item, Plan
from outcore.plan.stream.time import Placed, step_time
from outcore.plan.terms import Case, Spill, device_bytes, step_flops
from outcore.sizing.activations import (
    compiled_activation_bytes,
    forward_bytes,
    layer_activation_bytes,
    long_ram_bytes,
)
from outcore.sizing.layouts import StoredStates, StreamLayout
from outcore.sizing.shape import ModelShape
from outcore.sizing.states import STATE_FORMATS, muon_device_bytes
from outcore.sizing.streaming import (
    AHEAD_OF_IDLE_RAM,
    CPU_STAGING_BYTES,
    GRAPH_FREE_SHARE,
    LANE_BYTES,
    LEAST_GAIN,
    PROCESS_BYTES,
    RAM_RESERVE_BYTES,
    STAGING_BYTES,
    DeviceUse,
    PinnedMemory,
    is_worth_a_graph,
)
from outcore.sizing.tiles import Tiling
from outcore.sizing.training import (
    Pins,
    TrainingLimits,
    TrainingPlacement,
    least_gradients,
    needs_of_shape,
    place_training,
)
from outcore.sizing.work import step_work, tiling_of_shape

PARAMETERS, GRADIENTS = "parameters", "gradients"
STATES = ("master", "moments")
TILES = "tiles and their gradients"
GRAPHS = "CUDA graphs of layers"
MATRICES = "Muon's updates of matrices"
MATRIX_STATES = "states of Muon's matrices"
RANK_SLOTS = "gradients of ranks on their way into the sum"
BEYOND = "activation checkpoints beyond gradients' homes"
LONG_ROWS, NEAR_ROWS = "rows that the device has tiles of", "whole rows of a layer"
SLOTS, RING = "lanes' slots", "ring of states on their way"
TILED_SUMS_FROM = 3
"""Micro-batches from which a tiled layer's gradients have an fp32 home."""
GRAPH_SHAPES = 2
"""Kinds of micro-batches that layers are captured for: with borders of documents, and without."""


def vram_parts(case: Case[StreamLayout], tiling: Tiling) -> list[Item]:
    """Parts in the GPU's memory. The peak is the worse of a layer's backward and the head's: activations or logits,
    and gradients as
    autograd returns them, before they are added to the sum. Tiled units hold tiles instead of all that."""
    shape, layout, e, holding, held = case.shape, case.layout, case.element_bytes, tiling.holding, tiling.held
    tile_bytes, chunk_bytes = tiling.tile_bytes, tiling.chunk_bytes
    needs = step_work(shape, e, case.seq_length, case.micro_tokens, layout, tile_bytes, chunk_bytes).of(holding)
    peaks = {
        "activations of the largest unit": (needs.tiled_layer if tiling.layers else needs.layer, held.made_by_layer),
        "logits of one chunk": (needs.tiled_head if tiling.ends else needs.head, held.made_by_ends),
        "hidden states at the embedding": (needs.at_embedding, 0),
        "their gradient at the embedding": (needs.at_embedding // 2, held.made_by_ends if needs.at_embedding else 0),
    }
    name, (work, gradients) = max(peaks.items(), key=lambda peak: sum(peak[1]))
    # Instead of checkpoints and gradients of hidden states, an evaluation holds hidden states of some micro-batches.
    in_step = work + gradients + needs.checkpoints + needs.between
    beyond = 0 if tiling.ends else max(0, needs.evaluation - in_step)
    return [
        Item("vram", PARAMETERS, held.weights),
        Item("vram", TILES, held.tiles),
        Item("vram", GRADIENTS, held.sums + held.leaving),
        Item("vram", "gradients before they are summed", gradients),
        Item("vram", "activation checkpoints", needs.checkpoints),
        Item("vram", "activations and gradients between units", needs.between),
        Item("vram", name, work),
        Item("vram", MASKS if case.masks else BORDERS, needs.masks),
        Item("vram", NEAR_ROWS, needs.rows),
        Item("vram", EVALUATION, beyond),
        Item("vram", MATRICES, muon_device_bytes(case.muon, STATE_FORMATS[case.request.format][0], e)),
        Item("vram", OVERHEAD, case.hardware.gpu_context_bytes),
        Item("vram", SPARE, k.GPU_SPARE_BYTES),
        Item("vram", "desktop reserve", k.VRAM_RESERVE_BYTES),
    ]


def graph_bytes(case: Case[StreamLayout], tiling: Tiling, vram: list[Item]) -> tuple[int, int] | None:
    """(tensors, memory that nothing else may use) that CUDA graphs of layers keep on the GPU. None where nothing is
    captured: layers compute long or the GPU is rather full."""
    shape, hardware, layout, tokens = case.shape, case.hardware, case.layout, case.micro_tokens
    if hardware.is_cpu or not layout.cuda_graphs or hardware.compute_tflops is None or tiling.tile_tokens:
        return None
    flops = step_flops(shape, case.request, case.seq_length, tokens)
    passed, *_ = device_bytes(shape, case.request, case.seq_length, tokens, 1)
    head = 2.0 * tokens * shape.head_weight_numel
    slower = 1.0 if layout.compiled else k.EAGER_SLOWDOWN
    launches = k.STREAM_HOST_LAYERS_PER_CALL if layout.compiled else k.STREAM_EAGER_HOST_LAYERS_PER_CALL
    layers_s = slower * hardware.compute_s(flops.forward - head, passed, flops.attention_forward)
    back = flops.backward - (1 if shape.lora_r else 2) * head
    back_s = slower * hardware.compute_s(back, 2 * passed, flops.attention_backward)
    forward, backward = (
        is_worth_a_graph(pass_s / shape.num_layers, hardware.host_s(host_layers))
        for pass_s, host_layers in zip((layers_s, back_s), launches, strict=True)
    )
    tensors = sum(p.size_bytes for p in vram if p.name not in NOT_TENSORS)
    if not forward or tensors > (1 - GRAPH_FREE_SHARE) * (device_bytes_of(hardware, layout) or 0):
        return None
    hidden, buffers = tokens * shape.hidden_size * case.element_bytes, tiling.holding.layer_buffers
    pool = forward_bytes(shape, case.element_bytes, tokens)
    if backward and layout.compiled:
        borders = sum(p.size_bytes for p in vram if p.name == BORDERS)
        pool = compiled_activation_bytes(shape, case.element_bytes, case.seq_length, tokens) + borders
    elif backward:
        kept = layer_activation_bytes(shape, case.element_bytes, case.seq_length, tokens)
        pool = int(k.EAGER_GRAPH_POOL * kept)
    # Inputs, and a result for each weight buffer; again where a micro-batch's rows are of one document each.
    held = GRAPH_SHAPES * ((1 + buffers) + (2 + buffers if backward else 0))
    return held * hidden + k.GRAPH_WORKSPACE_BYTES, pool


def staying(
    case: Case[StreamLayout], placed: TrainingPlacement, vram: list[Item], pool_bytes: int
) -> TrainingPlacement:
    """With what the engine will keep on the GPU beside `vram` (`sizing.training`), where graphs have `pool_bytes`
    alone."""
    layout, hardware = case.layout, case.hardware
    device_bytes = device_bytes_of(hardware, layout)
    if hardware.is_cpu or device_bytes is None:
        return placed
    tensors = {p.name: p.size_bytes for p in vram if p.name not in NOT_TENSORS}
    kept = sum(tensors.get(name, 0) for name in (PARAMETERS, GRADIENTS, GRAPHS))
    idle = DeviceUse(device_bytes, kept + pool_bytes, sum(tensors.values()) - kept).idle
    idle = min(idle, hardware.vram_bytes - sum(p.size_bytes for p in vram))
    idle = idle if layout.resident_bytes is None else min(idle, layout.resident_bytes)
    return placed.staying(idle, case.micro_tokens * case.shape.hidden_size * case.element_bytes)


def placement_of(case: Case[StreamLayout], tiling: Tiling) -> TrainingPlacement:
    """The engine's placement in RAM and on the drive, within what it was told."""
    shape, request, hardware, layout, e = case.shape, case.request, case.hardware, case.layout, case.element_bytes
    tokens = (case.micro_tokens,) * layout.accumulation
    needs = needs_of_shape(
        shape, e, request.format, tokens, uses_muon=request.optimizer == "muon", ranks=hardware.num_gpus
    )
    gradient_bytes = None if request.clips or layout.residency is None else layout.residency.gradient_bytes
    has_drive = hardware.nvme_free_bytes > 0
    limits = TrainingLimits(
        ram_bytes=hardware.ram_bytes - sum(item.size_bytes for item in fixed_ram(case, tiling)),
        pins=_pins(case),
        checkpoints_in_ram=layout.checkpoints_home == "ram",
        states_may_spill=has_drive,
        weights_may_spill=has_drive and hardware.num_gpus == 1,  # ranks share the parameters in RAM
        gradient_bytes=None if gradient_bytes is None else max(gradient_bytes, least_gradients(needs)),
        waits_for_norm=request.clips,
        holding=tiling.holding,
        long_rows=long_ram_bytes(shape, e, case.micro_tokens, layout.accumulation, tiling.holding),
        told=layout.residency,
    )
    return place_training(needs, limits)


def fixed_ram(case: Case[StreamLayout], tiling: Tiling) -> list[Item]:
    """RAM beside homes and what flows."""
    fixed = [
        Item("ram", "framework overhead", case.hardware.num_gpus * PROCESS_BYTES),
        Item("ram", "page cache reserve", RAM_RESERVE_BYTES),
    ]
    if tiling.layers and case.layout.accumulation >= TILED_SUMS_FROM and not case.shape.lora_r:
        largest = max(case.shape.layer_params[i] for i in tiling.layers)
        fixed.append(Item("ram", "sums of tiled gradients", 4 * largest))
    return fixed


def ram_parts(case: Case[StreamLayout], tiling: Tiling, placed: TrainingPlacement) -> list[Item]:
    """All that is in RAM, by name."""
    needs, share = placed.needs, placed.states / max(1, placed.needs.states)
    master = int(share * STATE_FORMATS[needs.state_format][0] * (needs.trained - needs.muon_params))
    matrices = int(share * needs.matrix_states)
    sizes = {
        PARAMETERS: placed.weights,
        "master": master,
        "moments": placed.states - master - matrices,
        MATRIX_STATES: matrices,
        GRADIENTS: placed.gradients,
        RANK_SLOTS: placed.rank_slots,
        LONG_ROWS if tiling.tile_tokens else BEYOND: placed.beyond,
        RING: placed.ring,
        "weights read ahead": placed.read_ahead,
    }
    return [*(Item("ram", name, size) for name, size in sizes.items()), *fixed_ram(case, tiling)]


def beginning_ahead(case: Case[StreamLayout], placed: TrainingPlacement, in_ram: list[Item]) -> TrainingPlacement:
    """With updates that may begin ahead of the global norm in RAM that is idle beside `in_ram`. Steps that clip leave
    their second homes alone."""
    limit = case.layout.ahead_bytes
    idle = max(0, case.hardware.ram_bytes - sum(p.size_bytes for p in in_ram))
    limit = idle // AHEAD_OF_IDLE_RAM if limit is None else min(limit, idle)
    return placed.beginning_ahead(0 if case.hardware.is_cpu else limit)


CROSSING = (RANK_SLOTS, PARAMETERS, MATRIX_STATES, GRADIENTS, BEYOND, LONG_ROWS)
"""Homes in RAM that cross to the device, in the order in which they are pinned."""


def _pins(case: Case[StreamLayout]) -> Pins | PinnedMemory:
    """Take the pinned memory that an engine was told, else what one would choose."""
    layout, asked_bytes = case.layout, case.request.staging_bytes
    if layout.staging_bytes is not None:
        return PinnedMemory(layout.staging_bytes, layout.lane_bytes)
    if case.hardware.is_cpu:
        return Pins(asked_bytes or CPU_STAGING_BYTES, pins_homes=False)
    can_bytes = max(case.hardware.pinned_bytes, LANE_BYTES)
    return Pins(min(asked_bytes or STAGING_BYTES, can_bytes), can_bytes if asked_bytes is None else 0)


def pinned_and_rest(placed: TrainingPlacement, ram: list[Item]) -> tuple[list[Item], list[Item], float]:
    """RAM without what the staging pool takes, the pool's parts, and the share of homes that stays pageable.

    The pool is as large as parameters, gradients and activation checkpoints need, up to what it may take.
    """
    left = max(0, placed.pinned.pool_bytes - placed.lanes)
    pinned = [Item("pinned", SLOTS, placed.lanes)]
    rest: list[Item] = []
    for part in ram:
        taken = min(left, part.size_bytes) if part.name in CROSSING else 0
        left -= taken
        if taken:
            pinned.append(Item("pinned", part.name, taken))
        rest.append(Item(part.tier, part.name, part.size_bytes - taken))
    kept, homes = (sum(p.size_bytes for p in parts if p.name in CROSSING) for parts in (rest, ram))
    return rest, pinned, kept / homes if homes else 0.0


def drive_states(placed: TrainingPlacement, stored: StoredStates) -> list[Item]:
    """List what lives on the drive during the run."""
    needs, share = placed.needs, placed.spilled_states / max(1, placed.needs.states)
    trained = share * (needs.trained - needs.muon_params)
    return [
        Item("nvme", MATRIX_STATES, int(share * needs.matrix_states)),
        Item("nvme", PARAMETERS, placed.spilled_weights),
        Item("nvme", "master", int(stored.master * trained)),
        Item("nvme", "moments", int((stored.moments + stored.room) * trained)),
    ]


def device_bytes_of(hardware: Hardware, layout: StreamLayout) -> int | None:
    """Memory that the engine plans tiles for; None without a GPU, where no limit is known."""
    if layout.device_bytes is not None:
        return layout.device_bytes
    return None if hardware.is_cpu else hardware.tensor_bytes


def tiling_of(case: Case[StreamLayout]) -> Tiling:
    """Choose the tiling as the engine will for this model on this machine."""
    device_bytes = device_bytes_of(case.hardware, case.layout)
    return tiling_of_shape(
        case.shape, case.element_bytes, case.seq_length, case.micro_tokens, case.layout, device_bytes
    )


def plan_stream(
    shape: ModelShape, request: RunRequest, hardware: Hardware, seq_length: int, layout: StreamLayout
) -> Plan:
    """The plan of one layout, whether it fits or not. Layers are recomputed whatever the request says."""
    asked, request = request, replace(request, activation_checkpointing=True)
    if shape.stays_eager:
        layout = replace(layout, compiled=False, cuda_graphs=False)
    case = Case(shape, request, hardware, seq_length, layout)
    tiling = tiling_of(case)
    homes = placement_of(case, tiling)
    spill = Spill(homes.spilled_states / max(1, homes.needs.states), homes.spilled_weights / homes.needs.weights)
    ram, pinned, pageable = pinned_and_rest(homes, ram_parts(case, tiling, homes))
    vram = vram_parts(case, tiling)
    graphs = graph_bytes(case, tiling, vram) if not tiling.layers else None
    tensors, pool = graphs or (0, 0)
    vram.append(Item("vram", GRAPHS, tensors))
    vram = [replace(p, size_bytes=p.size_bytes + pool) if p.name == SPARE else p for p in vram]
    placed = Placed(homes, spill, pageable, tiling, graphs is not None)
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
        drive.append(Item("nvme", "activation checkpoints", homes.needs.checkpoints))
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

"""Forecast of DeepSpeed 0.19.8 at every ZeRO stage: bytes per tier and seconds per step. Pure functions.

Stage 3 with offloaded states is planned as the run does it, with outcore's staged offload (`deepspeed_staged`); here is
the rest, and the offload of stock DeepSpeed, which a run takes where `outcore.offload` says stock.

What it does was read in its source and measured (constants.py). Per parameter on the GPU without offload: weight 2,
gradient 2, master 4, moments 8, and the fp32 copy of the gradients made in the optimizer step 4 (ZeRO-3: of one sub-
group only), when activations are gone. Stages 1 / 2 / 3 divide states / gradients too / parameters too by the number of
GPUs. With offload, parameters cross the link twice per micro-batch, and the optimizer phase runs after the last
backward pass, alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.engine.deepspeed.settings import Device
from outcore.plan import constants as k
from outcore.plan.cpu import without_gpu
from outcore.plan.deepspeed_staged import NOTE as STAGED_NOTE
from outcore.plan.deepspeed_staged import (
    Staged,
    StagedHomes,
    staged_drive_parts,
    staged_homes,
    staged_host_parts,
    staged_update,
)
from outcore.plan.hardware import Hardware
from outcore.plan.nvme_space import CHECKPOINTS, nvme_use
from outcore.plan.record import COMMUNICATOR, MASKS, OVERHEAD, SPARE, Part, Plan, StepTime, TierUse
from outcore.plan.request import RunRequest
from outcore.plan.shape import ModelShape
from outcore.plan.stream_layout import Spill
from outcore.plan.work import (
    checkpoint_bytes,
    chunk_tokens,
    layer_activation_bytes,
    logits_bytes,
    mask_bytes,
    step_flops,
    step_traffic,
)
from outcore.units import GB

STAGE_NUMBER = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3, "infinity": 3}
OFFLOADS: dict[str, tuple[tuple[Device, Device], ...]] = {
    "none": (("none", "none"),),
    "zero1": (("none", "none"), ("cpu", "none")),
    "zero2": (("none", "none"), ("cpu", "none")),
    "zero3": (("none", "none"), ("cpu", "none"), ("cpu", "cpu")),
    "infinity": (("nvme", "cpu"), ("nvme", "nvme")),
}
"""Stage -> (optimizer, parameters) homes worth planning, fastest first."""
UNMEASURED = "measured only as ZeRO-3 and without ZeRO, on one GPU; these bytes are derived from DeepSpeed's source"


@dataclass(frozen=True)
class DeepSpeedLayout:
    """One choice of what the planner may vary."""

    stage: str
    optimizer: Device
    """'none' (GPU) | 'cpu' | 'nvme'."""
    params: Device
    micro_batch: int
    accumulation: int
    staged: Staged | None = None
    """How outcore moves what is offloaded in DeepSpeed's place; None: stock DeepSpeed, or nothing is offloaded."""

    @property
    def homes(self) -> tuple[Device, Device]:
        return self.optimizer, self.params


def plan_deepspeed(
    shape: ModelShape, request: RunRequest, hardware: Hardware, seq_length: int, layout: DeepSpeedLayout
) -> Plan:
    """The plan of one layout, whether it fits or not."""
    gpus = hardware.num_gpus
    vram = _vram_parts(shape, request, hardware, seq_length, layout)
    homes = None
    if layout.staged is not None:
        homes = staged_homes(shape, request, gpus, layout.optimizer, layout.params, layout.staged)
        ram, pinned = staged_host_parts(homes, layout.staged, hardware)
        drive, buffers_note = staged_drive_parts(homes, layout.staged), [STAGED_NOTE] if "nvme" in layout.homes else []
    else:
        ram, pinned, buffers_note = _host_parts(shape, request, gpus, layout)
        drive = _drive_parts(shape, request, layout)
    saved_bytes = k.CHECKPOINT_BYTES_PER_TRAINABLE * shape.trainable_params
    in_drive = sum(p.size_bytes for p in drive if p.name in ("master", "moments"))
    if not request.checkpoints_elsewhere:
        drive.append(Part("nvme", CHECKPOINTS, saved_bytes * (request.save_total_limit + 1)))
    parts = tuple(p for p in (*vram, *pinned, *ram, *drive) if p.size_bytes > 0)
    pinned_bytes = sum(p.size_bytes for p in pinned)
    time, read, written = _time(shape, request, hardware, seq_length, layout, homes)
    notes = list(buffers_note)
    if layout.stage in ("zero1", "zero2") or gpus > 1:
        notes.append(UNMEASURED)
    if layout.stage in ("zero1", "zero2") and gpus == 1 and layout.optimizer == "none":
        notes.append(f"on one GPU {layout.stage} divides nothing: it is plain training with smaller buckets")
    plan = Plan(
        model=shape.name,
        params=shape.total_params,
        trainable_params=shape.trainable_params,
        machine=hardware.name,
        engine="deepspeed",
        zero_stage=layout.stage,
        offload=_words(layout) if homes is None else _staged_words(homes, layout),
        state_format=layout.staged.states if layout.staged is not None else "fp32",
        precision=request.precision,
        seq_length=seq_length,
        micro_batch=layout.micro_batch,
        accumulation=layout.accumulation,
        num_gpus=gpus,
        lora_r=shape.lora_r,
        homes={
            "parameters": _home(layout.params, homes and homes.params_in_ram, homes and homes.params_on_drive),
            "optimizer states": _home(layout.optimizer, homes and homes.states_in_ram, homes and homes.states_on_drive),
            "gradients": "VRAM" if layout.optimizer == "none" else "RAM",
            "activation checkpoints": "VRAM",
        },
        parts=parts,
        tiers=(
            TierUse("vram", sum(p.size_bytes for p in vram), hardware.vram_bytes),
            # Stock DeepSpeed's swap buffers are locked, not registered with CUDA: RAM is their limit.
            TierUse("pinned", pinned_bytes, hardware.ram_bytes if homes is None else hardware.pinned_bytes),
            TierUse("ram", sum(p.size_bytes for p in ram) + pinned_bytes, hardware.ram_bytes),
            nvme_use(drive, hardware),
        ),
        time=time,
        drive_read_bytes_per_step=int(read),
        drive_written_bytes_per_step=int(written),
        drive_rated_write_bytes=hardware.rated_write_bytes,
        checkpoint_bytes=saved_bytes,
        checkpoint_s=hardware.drive_s(in_drive, saved_bytes),
        notes=tuple(notes),
        compute_known=hardware.compute_tflops is not None,
        staged=layout.staged is not None,
        ram_budget_bytes=layout.staged.ram_budget_bytes if layout.staged is not None else None,
    )
    return without_gpu(plan, hardware) if hardware.is_cpu else plan


_HOME: dict[str, str] = {"none": "VRAM", "cpu": "RAM", "nvme": "NVMe"}


def _home(device: str, in_ram: int | None, on_drive: int | None) -> str:
    if device != "nvme" or not in_ram or on_drive is None:
        return _HOME[device]
    share = on_drive / (in_ram + on_drive)
    return "RAM" if share == 0 else f"RAM {100 * (1 - share):.0f} % + NVMe {100 * share:.0f} %"


def _staged_words(homes: StagedHomes, layout: DeepSpeedLayout) -> str:
    """As the streaming engine says it, where the drive takes a part of what may go there."""
    both = ((homes.states_in_ram, homes.states_on_drive), (homes.params_in_ram, homes.params_on_drive))
    if "nvme" not in layout.homes or not any(in_ram and on_drive for in_ram, on_drive in both):
        return _words(layout)
    states, parameters = (on_drive / max(1, in_ram + on_drive) for in_ram, on_drive in both)
    return Spill(states, parameters).words()


def _words(layout: DeepSpeedLayout) -> str:
    homes = (layout.optimizer, layout.params)
    if homes == ("none", "none"):
        return "all on the GPU"
    if homes[0] == homes[1]:
        return f"all in {_HOME[homes[0]]}" if homes[0] == "cpu" else "all on NVMe"
    where = {"none": "GPU", "cpu": "RAM", "nvme": "NVMe"}
    return f"optimizer {where[layout.optimizer]}, parameters {where[layout.params]}"


def _vram_parts(
    shape: ModelShape, request: RunRequest, hardware: Hardware, seq_length: int, layout: DeepSpeedLayout
) -> list[Part]:
    gpus = hardware.num_gpus
    e, stage = request.element_bytes, STAGE_NUMBER[layout.stage]
    base, trained, tokens = shape.total_params, shape.trainable_params, seq_length * layout.micro_batch
    bucket = e * k.DEEPSPEED_BUCKET_NUMEL if stage else 0  # of reductions; what is prefetched counts as gathered
    params = e * base // (gpus if stage == 3 else 1)
    gradients = e * trained // (gpus if stage >= 2 else 1)
    share = gpus if stage >= 1 else 1
    master, moments, fp32_gradients = 4 * trained // share, 8 * trained // share, 4 * trained // share
    parts = []
    if stage == 3:
        fp32_gradients = min(fp32_gradients, 4 * 2 * k.DEEPSPEED_BUCKET_NUMEL)  # one sub-group of 100 M elements
        largest = max(shape.largest_weight_numel, max(shape.layer_params) if shape.is_moe else 0)
        # Measured alike with parameters in RAM and on NVMe: the limit on live parameters is used up either way.
        gathered = e * min(base, k.DEEPSPEED_LIVE_NUMEL + largest) if gpus > 1 or layout.params != "none" else 0
        parts.append(Part("vram", "gathered parameters", gathered))
    if layout.optimizer != "none":
        master = moments = fp32_gradients = gradients = 0
    if layout.params != "none":
        params = 0
    activations = layer_activation_bytes(shape, request, seq_length, tokens)
    checkpoints = checkpoint_bytes(shape, request, tokens)
    if not request.activation_checkpointing:
        activations, checkpoints = activations * shape.num_layers, 0
    # The worse of a layer's backward and the head's, with gradients as autograd returns them.
    largest_layer = 0 if shape.lora_r else e * max(shape.layer_params)
    held = min(k.HEAD_GRADIENTS, -(-tokens // chunk_tokens(shape, tokens)))
    head_gradients = 0 if shape.lora_r else held * e * shape.head_weight_numel
    logits = logits_bytes(shape, tokens)
    layer_peak, head_peak = (activations, largest_layer), (logits, head_gradients)
    work, before_sum = max(layer_peak, head_peak, key=sum)
    name = "activations of the largest unit" if (work, before_sum) == layer_peak else "logits of one chunk"
    in_step = max(0, fp32_gradients - work - before_sum - checkpoints)  # none of these is there in the step
    return [
        Part("vram", "parameters", params),
        Part("vram", "gradients", gradients),
        Part("vram", "master", master),
        Part("vram", "moments", moments),
        Part("vram", "gradients before they are summed", before_sum),
        Part("vram", "fp32 gradients in the step beyond activations", in_step),
        *parts,
        Part("vram", "buckets", bucket),
        Part("vram", "activation checkpoints", checkpoints),
        Part("vram", name, work),
        Part("vram", MASKS, mask_bytes(shape, request, seq_length, tokens)),
        Part("vram", OVERHEAD, hardware.gpu_context_bytes),
        Part("vram", COMMUNICATOR, k.NCCL_BYTES),
        Part("vram", SPARE, k.GPU_SPARE_BYTES),
        Part("vram", "desktop reserve", k.VRAM_RESERVE_BYTES),
    ]


def _host_parts(
    shape: ModelShape, request: RunRequest, gpus: int, layout: DeepSpeedLayout
) -> tuple[list[Part], list[Part], list[str]]:
    """RAM, locked swap buffers, and what there is to say of them."""
    e, trained = request.element_bytes, shape.trainable_params
    frozen = shape.total_params - trained
    ram = [Part("ram", "page cache reserve", k.PAGE_CACHE_RESERVE_BYTES)]
    if layout.optimizer == "none" and layout.params == "none":
        return [*ram, Part("ram", "framework overhead", k.STREAM_RAM_OVERHEAD_BYTES * gpus)], [], []
    if layout.optimizer != "nvme":
        # The measured line holds for parameters in RAM as well; with them on the GPU 2 B less.
        extra = int((k.DEEPSPEED_RAM_BYTES_PER_PARAM - 16) * trained)
        in_ram = layout.params == "cpu"
        return (
            [
                *ram,
                Part("ram", "parameters", e * (trained + frozen) if in_ram else 0),
                Part("ram", "gradients", e * trained),
                Part("ram", "master", 4 * trained),
                Part("ram", "moments", 8 * trained),
                Part("ram", "DeepSpeed's further copies", extra),
                Part("ram", "framework overhead", k.DEEPSPEED_RAM_OVERHEAD_BYTES * gpus),
            ],
            [],
            [],
        )
    buffer_bytes = 4 * -(-shape.largest_weight_numel // gpus)
    count = next(
        (n for n in k.DEEPSPEED_OPTIMIZER_BUFFERS if n * buffer_bytes * gpus <= k.DEEPSPEED_SWAP_BUDGET_BYTES),
        k.DEEPSPEED_OPTIMIZER_BUFFERS[-1],
    )
    pinned = [Part("pinned", "optimizer swap buffers", count * buffer_bytes * gpus)]
    if layout.params == "nvme":
        size = e * shape.largest_weight_numel
        pinned.append(Part("pinned", "parameter swap buffers", (k.DEEPSPEED_PARAM_BUFFERS + gpus) * size))
    notes = [] if count > 4 else ["the swap buffers are so large that DeepSpeed's optimizer I/O is not pipelined"]
    measured = int(k.DEEPSPEED_NVME_RAM_BYTES_PER_PARAM * trained)
    params_bytes = e * (trained + frozen) if layout.params == "cpu" else 0
    ram += [
        Part("ram", "parameters", params_bytes),
        Part("ram", "gradients", e * trained),
        Part("ram", "DeepSpeed's further copies", max(0, measured - 2 * e * trained)),
        Part("ram", "framework overhead", k.STREAM_RAM_OVERHEAD_BYTES * gpus),
    ]
    if layout.params == "nvme":
        # Measured alike with parameters in RAM and on NVMe: what is saved is taken by buffers and copies.
        ram.append(Part("ram", "parameters kept or copied in RAM", e * trained))
    return ram, pinned, notes


def _drive_parts(shape: ModelShape, request: RunRequest, layout: DeepSpeedLayout) -> list[Part]:
    trained, parts = shape.trainable_params, []
    if layout.optimizer == "nvme":
        parts += [
            Part("nvme", "master", 4 * trained),
            Part("nvme", "moments", 8 * trained),
            Part("nvme", "gradients", 4 * trained),
        ]
    if layout.params == "nvme":
        parts.append(Part("nvme", "parameters", request.element_bytes * shape.total_params))
    return parts


def _time(
    shape: ModelShape,
    request: RunRequest,
    hardware: Hardware,
    seq_length: int,
    layout: DeepSpeedLayout,
    homes: StagedHomes | None,
) -> tuple[StepTime, float, float]:
    """The step, and the bytes that the drive reads and writes in it (all ranks)."""
    e, trained, gpus = request.element_bytes, shape.trainable_params, hardware.num_gpus
    stage, passes = STAGE_NUMBER[layout.stage], layout.accumulation
    tokens = seq_length * layout.micro_batch * passes
    traffic = step_traffic(shape, request, seq_length * layout.micro_batch, passes)
    flops = step_flops(shape, request, seq_length, tokens)
    compute_s = k.EAGER_SLOWDOWN * hardware.compute_s(
        flops.forward + flops.backward, traffic.forward + traffic.backward, flops.attention
    )
    calls = 0 if hardware.is_cpu else shape.num_layers * passes
    host_s = calls * (k.DEEPSPEED_HOST_S_PER_LAYER if stage == 3 else k.DEEPSPEED_PLAIN_HOST_S_PER_LAYER)
    update_host_s = 0.0
    swept = 2 * e * shape.total_params // (gpus if stage == 3 else 1)  # forward, and backward with its recomputation
    h2d = swept * passes if layout.params != "none" else 0
    d2h = e * trained // gpus * passes if layout.optimizer != "none" else 0
    if layout.params == "none" and layout.optimizer != "none":
        h2d += e * trained // gpus  # updated weights return
    rate = k.DEEPSPEED_DRIVE_SHARE if homes is None else k.STREAM_DRIVE_SHARE
    on_drive = homes.params_on_drive if homes is not None else e * shape.total_params
    params_read = 2 * on_drive * passes if layout.params == "nvme" else 0
    params_read_s = hardware.drive_s(params_read, 0) / rate
    h2d_s, d2h_s = h2d / (hardware.h2d_gb_per_s * GB), d2h / (hardware.d2h_gb_per_s * GB)
    pass_s = max(compute_s, host_s, h2d_s, d2h_s, params_read_s)
    optimizer_s = optimizer_drive_s = read = written = 0.0
    if layout.staged is not None and homes is not None:
        update = staged_update(shape, homes, layout.staged, hardware)
        read, written = update.read_bytes, update.written_bytes
        optimizer_drive_s, optimizer_s = update.drive_s, update.cpu_s
    elif layout.optimizer == "none" and not hardware.is_cpu:
        update_host_s = k.DEEPSPEED_GPU_UPDATE_S_PER_LAYER * shape.num_layers
    elif layout.optimizer == "cpu":
        optimizer_s = k.DEEPSPEED_OPTIMIZER_DRAM_BYTES * trained / (hardware.ram_gb_per_s * GB)
    elif layout.optimizer == "nvme":
        # fp32 gradients 4 out and 4 in, master and moments 12 in and 12 out; 16-bit weights out when they live there
        read, written = 16.0 * trained, 16.0 * trained + (e * trained if layout.params == "nvme" else 0)
        optimizer_drive_s = hardware.drive_s(read, written) / rate
        optimizer_s = k.OPTIMIZER_DRAM_BYTES["fp32"] * trained / (k.DRAM_SHARE * hardware.ram_gb_per_s * GB)
    step_s = pass_s + max(optimizer_drive_s, optimizer_s, update_host_s)
    drive_read_s = params_read_s + (optimizer_drive_s * read / (read + written) if read else 0.0)
    return (
        StepTime(
            compute_s=compute_s,
            h2d_s=h2d_s,
            d2h_s=d2h_s,
            drive_read_s=drive_read_s,
            drive_write_s=optimizer_drive_s * written / (read + written) if written else 0.0,
            cpu_optimizer_s=optimizer_s,
            host_overhead_s=max(0.0, host_s - max(compute_s, h2d_s, d2h_s, params_read_s)) + update_host_s,
            step_s=step_s,
        ),
        read + params_read,
        written,
    )

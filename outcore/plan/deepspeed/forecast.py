"""Forecast of DeepSpeed 0.19.8 at every ZeRO stage: bytes per tier and seconds per step. Pure functions.

Stage 3 with offloaded states is planned as the run does it, with outcore's staged offload (`deepspeed_staged`); here is
the rest, and the offload of stock DeepSpeed, which a run takes where `outcore.offload` says stock.

What it does was read in its source and measured (constants.py). Per parameter on the GPU without offload: weight 2,
gradient 2, master 4, moments 8, and the fp32 copy of the gradients made in the optimizer step 4 (ZeRO-3: of one
sub-group only), when activations are gone. Stages 1 / 2 / 3 divide states / gradients too / parameters too by the
number of GPUs. With offload, parameters cross the link twice per micro-batch, and the optimizer phase runs after the
last backward pass, alone.
"""

from __future__ import annotations

from outcore.common.quantities import GB
from outcore.plan import constants as k
from outcore.plan.cpu import without_gpu
from outcore.plan.deepspeed.memory import STAGE_NUMBER, DeepSpeedLayout, drive_parts, host_parts, vram_parts
from outcore.plan.deepspeed.staged import NOTE as STAGED_NOTE
from outcore.plan.deepspeed.staged import (
    StagedHomes,
    gradient_traffic,
    params_read,
    staged_drive_parts,
    staged_homes,
    staged_host_parts,
    staged_update,
)
from outcore.plan.hardware import Hardware
from outcore.plan.nvme_space import CHECKPOINTS, nvme_use
from outcore.plan.record import Item, Plan, StepTime, TierUse
from outcore.plan.request import RunRequest
from outcore.plan.stream.layout import Spill
from outcore.plan.work import step_flops, step_traffic
from outcore.sizing.activations import has_masks
from outcore.sizing.deepspeed import Device
from outcore.sizing.shape import ModelShape

OFFLOADS: dict[str, tuple[tuple[Device, Device], ...]] = {
    "none": (("none", "none"),),
    "zero1": (("none", "none"), ("cpu", "none")),
    "zero2": (("none", "none"), ("cpu", "none")),
    "zero3": (("none", "none"), ("cpu", "none"), ("cpu", "cpu")),
    "infinity": (("nvme", "cpu"), ("nvme", "nvme")),
}
"""Stage -> (optimizer, parameters) homes worth planning, fastest first."""
UNMEASURED = "measured only as ZeRO-3 and without ZeRO, on one GPU; these bytes are derived from DeepSpeed's source"


def plan_deepspeed(
    shape: ModelShape, request: RunRequest, hardware: Hardware, seq_length: int, layout: DeepSpeedLayout
) -> Plan:
    """The plan of one layout, whether it fits or not."""
    gpus = hardware.num_gpus
    vram = vram_parts(shape, request, hardware, seq_length, layout)
    homes = None
    if layout.staged is not None:
        homes = staged_homes(shape, request, hardware, layout.optimizer, layout.params, layout.staged)
        ram, pinned = staged_host_parts(homes, layout.staged, hardware)
        drive, buffers_note = staged_drive_parts(homes, layout.staged), [STAGED_NOTE] if "nvme" in layout.homes else []
    else:
        ram, pinned, buffers_note = host_parts(shape, request, gpus, layout)
        drive = drive_parts(shape, request, layout)
    saved_bytes = (request.element_bytes + k.CHECKPOINT_STATE_BYTES) * shape.trainable_params
    in_drive = sum(p.size_bytes for p in drive if p.name in ("master", "moments"))
    if not request.checkpoints_elsewhere:
        drive.append(Item("nvme", CHECKPOINTS, saved_bytes * (request.save_total_limit + 1)))
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
        lora_targets=shape.lora_targets,
        homes={
            "parameters": _home(layout.params, homes and homes.params_in_ram, homes and homes.params_on_drive),
            "optimizer states": _home(layout.optimizer, homes and homes.states_in_ram, homes and homes.states_on_drive),
            "gradients": _gradients_home(layout, homes),
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


def _gradients_home(layout: DeepSpeedLayout, homes: StagedHomes | None) -> str:
    if homes is not None and homes.gradients_on_drive:
        return "NVMe"
    return "VRAM" if layout.optimizer == "none" else "RAM"


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
    traffic = step_traffic(shape, request, seq_length, seq_length * layout.micro_batch, passes)
    flops = step_flops(shape, request, seq_length, tokens)
    compute_s = k.EAGER_SLOWDOWN * hardware.compute_s(
        flops.forward + flops.backward,
        traffic.forward + traffic.backward,
        flops.attention,
        k.MASKED_ATTENTION_SHARE if has_masks(layout.packed_attention, request.element_bytes) else k.ATTENTION_SHARE,
    )
    per_call = k.DEEPSPEED_HOST_LAYERS if stage == 3 else k.DEEPSPEED_PLAIN_HOST_LAYERS
    host_s = hardware.host_s(per_call * shape.num_layers * passes)
    update_host_s = 0.0
    swept = 2 * e * shape.total_params // (gpus if stage == 3 else 1)  # forward, and backward with its recomputation
    h2d = swept * passes if layout.params != "none" else 0
    d2h = e * trained // gpus * passes if layout.optimizer != "none" else 0
    if layout.params == "none" and layout.optimizer != "none":
        h2d += e * trained // gpus  # updated weights return
    rate = k.DEEPSPEED_DRIVE_SHARE if homes is None else k.STREAM_DRIVE_SHARE
    weights_read = 0.0
    if layout.params == "nvme":
        weights_read = swept * passes * gpus if homes is None else params_read(homes, passes)
    gradients_read, gradients_written = gradient_traffic(homes, passes) if homes is not None else (0, 0)
    h2d += gradients_read // gpus
    passes_read = weights_read + gradients_read
    passes_drive_s = hardware.drive_s(passes_read, gradients_written) / rate
    h2d_s, d2h_s = h2d / (hardware.h2d_gb_per_s * GB), d2h / (hardware.d2h_gb_per_s * GB)
    pass_s = max(compute_s, host_s, h2d_s, d2h_s, passes_drive_s)
    optimizer_s = optimizer_drive_s = read = written = 0.0
    if layout.staged is not None and homes is not None:
        update = staged_update(shape, homes, layout.staged, hardware)
        read, written = update.read_bytes, update.written_bytes
        optimizer_drive_s, optimizer_s = update.drive_s, update.cpu_s
    elif layout.optimizer == "none":
        update_host_s = hardware.host_s(k.DEEPSPEED_GPU_UPDATE_HOST_LAYERS * shape.num_layers)
    elif layout.optimizer == "cpu":
        optimizer_s = k.DEEPSPEED_OPTIMIZER_DRAM_BYTES * trained / (hardware.ram_gb_per_s * GB)
    elif layout.optimizer == "nvme":
        # fp32 gradients 4 out and 4 in, master and moments 12 in and 12 out; 16-bit weights out when they live there
        read, written = 16.0 * trained, 16.0 * trained + (e * trained if layout.params == "nvme" else 0)
        optimizer_drive_s = hardware.drive_s(read, written) / rate
        optimizer_s = k.OPTIMIZER_DRAM_BYTES["fp32"] * trained / (k.DRAM_SHARE * hardware.ram_gb_per_s * GB)
    step_s = pass_s + max(optimizer_drive_s, optimizer_s, update_host_s)
    drive_read_s, drive_write_s = 0.0, 0.0
    for seconds, reads, writes in (
        (passes_drive_s, passes_read, gradients_written),
        (optimizer_drive_s, read, written),
    ):
        if reads or writes:
            drive_read_s += seconds * reads / (reads + writes)
            drive_write_s += seconds * writes / (reads + writes)
    return (
        StepTime(
            compute_s=compute_s,
            h2d_s=h2d_s,
            d2h_s=d2h_s,
            drive_read_s=drive_read_s,
            drive_write_s=drive_write_s,
            cpu_optimizer_s=optimizer_s,
            host_overhead_s=max(0.0, host_s - max(compute_s, h2d_s, d2h_s, passes_drive_s)) + update_host_s,
            step_s=step_s,
        ),
        read + passes_read,
        written + gradients_written,
    )

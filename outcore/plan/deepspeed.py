"""Forecast of stock DeepSpeed 0.19.8 at every ZeRO stage: bytes per tier and seconds per step. Pure functions.

What it does was read in its source and measured (constants.py). Per parameter on the GPU without offload: weight 2,
gradient 2, master 4, moments 8, and the fp32 copy of the gradients made in the optimizer step 4 (ZeRO-3: of one
sub-group only). Stages 1 / 2 / 3 divide states / gradients too / parameters too by the number of GPUs. With offload,
parameters cross the link twice per micro-batch, and the optimizer phase runs after the last backward pass, alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.plan import constants as k
from outcore.plan.cpu import without_gpu
from outcore.plan.hardware import Hardware
from outcore.plan.nvme_space import CHECKPOINTS, nvme_use
from outcore.plan.record import Part, Plan, StepTime, TierUse
from outcore.plan.request import RunRequest
from outcore.plan.shape import ModelShape
from outcore.plan.work import checkpoint_bytes, layer_activation_bytes, logits_bytes, step_flops, step_traffic
from outcore.units import GB

STAGE_NUMBER = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3, "infinity": 3}
OFFLOADS: dict[str, tuple[tuple[str, str], ...]] = {
    "none": (("none", "none"),),
    "zero1": (("none", "none"), ("cpu", "none")),
    "zero2": (("none", "none"), ("cpu", "none")),
    "zero3": (("none", "none"), ("cpu", "none"), ("cpu", "cpu")),
    "infinity": (("nvme", "cpu"), ("nvme", "nvme")),
}
"""Stage -> (optimizer, parameters) homes worth planning, fastest first."""
UNMEASURED = "measured only as ZeRO-3 on one GPU; this stage's bytes are derived from DeepSpeed's source"


@dataclass(frozen=True)
class DeepSpeedLayout:
    """One choice of what the planner may vary."""

    stage: str
    optimizer: str
    """'none' (GPU) | 'cpu' | 'nvme'."""
    params: str
    micro_batch: int
    accumulation: int
    staged_states: str | None = None
    """Format of the states where outcore's own optimizer step runs in DeepSpeed's place (ZeRO-3 with the optimizer in
    RAM); None: stock DeepSpeed."""


def plan_deepspeed(
    shape: ModelShape, request: RunRequest, hardware: Hardware, seq_length: int, layout: DeepSpeedLayout
) -> Plan:
    """The plan of one layout, whether it fits or not."""
    gpus = hardware.num_gpus
    vram = _vram_parts(shape, request, gpus, seq_length, layout)
    ram, pinned, buffers_note = _host_parts(shape, request, gpus, layout)
    saved_bytes = k.CHECKPOINT_BYTES_PER_TRAINABLE * shape.trainable_params
    drive = _drive_parts(shape, request, layout)
    in_drive = sum(p.size_bytes for p in drive if p.name in ("master", "moments"))
    if not request.checkpoints_elsewhere:
        drive.append(Part("nvme", CHECKPOINTS, saved_bytes * (request.save_total_limit + 1)))
    parts = tuple(p for p in (*vram, *pinned, *ram, *drive) if p.size_bytes > 0)
    pinned_bytes = sum(p.size_bytes for p in pinned)
    time, read, written = _time(shape, request, hardware, seq_length, layout)
    notes = list(buffers_note)
    if layout.stage in ("none", "zero1", "zero2") or gpus > 1:
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
        offload=_words(layout),
        state_format=layout.staged_states or "fp32",
        precision=request.precision,
        seq_length=seq_length,
        micro_batch=layout.micro_batch,
        accumulation=layout.accumulation,
        num_gpus=gpus,
        lora_r=shape.lora_r,
        homes={
            "parameters": _HOME[layout.params],
            "optimizer states": _HOME[layout.optimizer],
            "gradients": "VRAM" if layout.optimizer == "none" else "RAM",
            "activation checkpoints": "VRAM",
        },
        parts=parts,
        tiers=(
            TierUse("vram", sum(p.size_bytes for p in vram), hardware.vram_bytes),
            TierUse("pinned", pinned_bytes, hardware.ram_bytes),  # locked, not registered with CUDA: RAM is its limit
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
    )
    return without_gpu(plan, hardware) if hardware.is_cpu else plan


_HOME = {"none": "VRAM", "cpu": "RAM", "nvme": "NVMe"}


def _words(layout: DeepSpeedLayout) -> str:
    homes = (layout.optimizer, layout.params)
    if homes == ("none", "none"):
        return "all on the GPU"
    if homes[0] == homes[1]:
        return f"all in {_HOME[homes[0]]}" if homes[0] == "cpu" else "all on NVMe"
    where = {"none": "GPU", "cpu": "RAM", "nvme": "NVMe"}
    return f"optimizer {where[layout.optimizer]}, parameters {where[layout.params]}"


def _vram_parts(
    shape: ModelShape, request: RunRequest, gpus: int, seq_length: int, layout: DeepSpeedLayout
) -> list[Part]:
    e, stage = request.element_bytes, STAGE_NUMBER[layout.stage]
    base, trained, tokens = shape.total_params, shape.trainable_params, seq_length * layout.micro_batch
    bucket = e * k.DEEPSPEED_BUCKET_NUMEL if stage else 0
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
        parts.append(Part("vram", "gradient of the largest weight", 0 if shape.lora_r else e * largest))
        bucket *= 2  # reduction and prefetch
    if layout.optimizer != "none":
        master = moments = fp32_gradients = gradients = 0
    if layout.params != "none":
        params = 0
    activations = layer_activation_bytes(shape, request, seq_length, tokens)
    checkpoints = checkpoint_bytes(shape, request, tokens)
    if not request.activation_checkpointing:
        activations, checkpoints = activations * shape.num_layers, 0
    return [
        Part("vram", "parameters", params),
        Part("vram", "gradients", gradients),
        Part("vram", "master", master),
        Part("vram", "moments", moments),
        Part("vram", "fp32 gradients in the step", fp32_gradients),
        *parts,
        Part("vram", "buckets", bucket),
        Part("vram", "activation checkpoints", checkpoints),
        Part("vram", "activations of the largest unit", activations),
        Part("vram", "logits chunk beyond it", max(0, logits_bytes(shape, tokens) - activations)),
        Part("vram", "framework overhead", k.GPU_FRAMEWORK_BYTES),
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
    if layout.staged_states is not None:
        master, moments = k.STATE_FORMATS[layout.staged_states]
        return (
            [
                *ram,
                Part("ram", "parameters", e * (trained + frozen) if layout.params == "cpu" else 0),
                Part("ram", "gradients", e * trained),
                Part("ram", "master", int(master * trained)),
                Part("ram", "moments", int(moments * trained)),
                Part("ram", "framework overhead", k.STAGED_RAM_OVERHEAD_BYTES * gpus),
            ],
            [],
            [],
        )
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
    shape: ModelShape, request: RunRequest, hardware: Hardware, seq_length: int, layout: DeepSpeedLayout
) -> tuple[StepTime, float, float]:
    """The step, and the bytes that the drive reads and writes in it (all ranks)."""
    e, trained, gpus = request.element_bytes, shape.trainable_params, hardware.num_gpus
    stage, passes = STAGE_NUMBER[layout.stage], layout.accumulation
    tokens = seq_length * layout.micro_batch * passes
    traffic = step_traffic(shape, request, seq_length * layout.micro_batch, passes)
    compute_s = k.EAGER_SLOWDOWN * hardware.compute_s(
        step_flops(shape, request, seq_length, tokens).total, traffic.forward + traffic.backward
    )
    host_s = k.DEEPSPEED_HOST_S_PER_LAYER * shape.num_layers * passes if stage == 3 and not hardware.is_cpu else 0.0
    swept = 2 * e * shape.total_params // (gpus if stage == 3 else 1)  # forward, and backward with its recomputation
    h2d = swept * passes if layout.params != "none" else 0
    d2h = e * trained // gpus * passes if layout.optimizer != "none" else 0
    if layout.params == "none" and layout.optimizer != "none":
        h2d += e * trained // gpus  # updated weights return
    params_read = 2 * e * shape.total_params * passes if layout.params == "nvme" else 0
    rate = k.DEEPSPEED_DRIVE_SHARE
    params_read_s = hardware.drive_s(params_read, 0) / rate
    h2d_s, d2h_s = h2d / (hardware.h2d_gb_per_s * GB), d2h / (hardware.d2h_gb_per_s * GB)
    pass_s = max(compute_s, host_s, h2d_s, d2h_s, params_read_s)
    optimizer_s = optimizer_drive_s = read = written = 0.0
    if layout.staged_states is not None:
        moved = k.OPTIMIZER_DRAM_BYTES[layout.staged_states] * trained
        optimizer_s = moved / (k.DRAM_SHARE * hardware.ram_gb_per_s * GB)
    elif layout.optimizer == "cpu":
        optimizer_s = k.DEEPSPEED_OPTIMIZER_DRAM_BYTES * trained / (hardware.ram_gb_per_s * GB)
    elif layout.optimizer == "nvme":
        # fp32 gradients 4 out and 4 in, master and moments 12 in and 12 out; 16-bit weights out when they live there
        read, written = 16.0 * trained, 16.0 * trained + (e * trained if layout.params == "nvme" else 0)
        optimizer_drive_s = hardware.drive_s(read, written) / rate
        optimizer_s = k.OPTIMIZER_DRAM_BYTES["fp32"] * trained / (k.DRAM_SHARE * hardware.ram_gb_per_s * GB)
    step_s = pass_s + max(optimizer_drive_s, optimizer_s)
    drive_read_s = params_read_s + (optimizer_drive_s * read / (read + written) if read else 0.0)
    return (
        StepTime(
            compute_s=compute_s,
            h2d_s=h2d_s,
            d2h_s=d2h_s,
            drive_read_s=drive_read_s,
            drive_write_s=optimizer_drive_s * written / (read + written) if written else 0.0,
            cpu_optimizer_s=optimizer_s,
            host_overhead_s=max(0.0, host_s - max(compute_s, h2d_s, d2h_s, params_read_s)),
            step_s=step_s,
        ),
        read + params_read,
        written,
    )

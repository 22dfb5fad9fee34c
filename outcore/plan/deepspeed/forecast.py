"""Forecast of DeepSpeed 0.19.8 at every ZeRO stage: bytes per tier and seconds per step. Pure functions.

Stage 3 with offloaded states is planned as the run does it, with outcore's staged offload (`deepspeed_staged`); here is
the rest, and the offload of stock DeepSpeed to RAM, which a run takes where `outcore.offload` says stock.

What it does was read in its source and measured (constants.py). Per parameter on the GPU without offload: weight 2,
gradient 2, master 4, moments 8, and the fp32 copy of the gradients made in the optimizer step 4 (ZeRO-3: of one
sub-group only), when activations are gone. Stages 1 / 2 / 3 divide states / gradients too / parameters too by the
number of GPUs. With offload, parameters cross the link twice per micro-batch, and the optimizer phase runs after the
last backward pass, alone.

What a step of DeepSpeed moves: all micro-batches' passes, and after the last of them the update, alone."""

from __future__ import annotations

from outcore.plan import constants as k
from outcore.plan.deepspeed.memory import STAGE_NUMBER, host_parts, vram_parts
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
from outcore.plan.profile import RunRequest
from outcore.plan.record import Item, Plan, StepTime
from outcore.plan.terms import Case, Pass, Rates, Spill, Traffic
from outcore.sizing.layouts import DeepSpeedLayout
from outcore.sizing.shape import ModelShape
from outcore.sizing.swapping import Device


class DeepSpeedRates(Rates):
    """A phase takes its longest term, and launches count as far as nothing else hides them."""

    def seconds(self, traffic: Traffic) -> StepTime:
        """Phase after phase."""
        found = [self.of(one) for one in traffic.passes]
        cpu_s = [self.cpu_s(one) for one in traffic.passes]
        both = list(zip(traffic.passes, found, strict=True))
        reads_s, writes_s = (
            sum(s.drive_s * moved(one) / (one.read_bytes + one.written_bytes) for one, s in both if s.drive_s)
            for moved in (lambda one: one.read_bytes, lambda one: one.written_bytes)
        )
        return StepTime(
            compute_s=sum(s.device_s for s in found),
            h2d_s=sum(s.h2d_s for s in found),
            d2h_s=sum(s.d2h_s for s in found),
            drive_read_s=reads_s,
            drive_write_s=writes_s,
            cpu_optimizer_s=sum(cpu_s),
            host_overhead_s=sum(max(0.0, s.host_s - max(s.device_s, s.h2d_s, s.d2h_s, s.drive_s)) for s in found),
            step_s=sum(max(s.gpu_s, s.h2d_s, s.d2h_s, s.drive_s, cpu) for s, cpu in zip(found, cpu_s, strict=True)),
        )


def deepspeed_rates(case: Case[DeepSpeedLayout]) -> DeepSpeedRates:
    """The machine's, as the engine reaches them."""
    staged = case.layout.staged
    return DeepSpeedRates(
        case.hardware,
        staged.states if staged is not None else "fp32",
        k.STREAM_DRIVE_SHARE,
        case.attention_share,
        k.EAGER_SLOWDOWN,
    )


def deepspeed_traffic(case: Case[DeepSpeedLayout], homes: StagedHomes | None) -> Traffic:
    """Forward and backward of all micro-batches, then the update. What the drive moves is that of all ranks."""
    shape, layout, e, gpus = case.shape, case.layout, case.element_bytes, case.hardware.num_gpus
    stage, passes = STAGE_NUMBER[layout.stage], layout.accumulation
    per_call = k.DEEPSPEED_HOST_LAYERS if stage == 3 else k.DEEPSPEED_PLAIN_HOST_LAYERS
    swept = 2 * e * shape.total_params // (gpus if stage == 3 else 1)  # forward, and backward with its recomputation
    h2d = swept * passes if layout.params != "none" else 0
    if layout.params == "none" and layout.optimizer != "none":
        h2d += e * shape.trainable_params // gpus  # updated weights return
    weights_read = params_read(homes, passes) if homes is not None and layout.params == "nvme" else 0
    gradients_read, gradients_written = gradient_traffic(homes, passes) if homes is not None else (0, 0)
    both = Pass(
        flops=case.flops.forward + case.flops.backward,
        attention_flops=case.flops.attention,
        device_bytes=sum(case.device_bytes),
        launched_layers=per_call * shape.num_layers * passes,
        h2d_bytes=h2d + gradients_read // gpus,
        d2h_bytes=e * shape.trainable_params // gpus * passes if layout.optimizer != "none" else 0,
        read_bytes=weights_read + gradients_read,
        written_bytes=gradients_written,
    )
    return Traffic((both, _update(case, homes)))


def _update(case: Case[DeepSpeedLayout], homes: StagedHomes | None) -> Pass:
    shape, layout, trained = case.shape, case.layout, case.shape.trainable_params
    if layout.staged is not None and homes is not None:
        return staged_update(shape, homes, layout.staged)
    if layout.optimizer == "none":
        return Pass(launched_layers=k.DEEPSPEED_GPU_UPDATE_HOST_LAYERS * shape.num_layers)
    return Pass(ram_bytes=k.DEEPSPEED_OPTIMIZER_DRAM_BYTES * trained)


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
    case = Case(shape, request, hardware, seq_length, layout)
    gpus = hardware.num_gpus
    vram = vram_parts(case)
    homes = None
    pinned, drive, notes = list[Item](), list[Item](), list[str]()
    if layout.staged is not None:
        homes = staged_homes(case, layout.staged)
        ram, pinned = staged_host_parts(homes, layout.staged, hardware)
        drive, notes = staged_drive_parts(homes, layout.staged), [STAGED_NOTE] if "nvme" in layout.homes else []
    else:
        ram = host_parts(case)
    in_drive = sum(p.size_bytes for p in drive if p.name in ("master", "moments"))
    drive += case.kept_checkpoints
    traffic = deepspeed_traffic(case, homes)
    if layout.stage in ("zero1", "zero2") or gpus > 1:
        notes.append(UNMEASURED)
    if layout.stage in ("zero1", "zero2") and gpus == 1 and layout.optimizer == "none":
        notes.append(f"on one GPU {layout.stage} divides nothing: it is plain training with smaller buckets")
    return case.plan(
        (*vram, *pinned, *ram, *drive),
        hardware.pinned_bytes,
        traffic,
        engine="deepspeed",
        zero_stage=layout.stage,
        offload=_words(layout) if homes is None else _staged_words(homes, layout),
        state_format=layout.staged.states if layout.staged is not None else "fp32",
        homes={
            "parameters": _home(layout.params, homes and homes.params_in_ram, homes and homes.params_on_drive),
            "optimizer states": _home(layout.optimizer, homes and homes.states_in_ram, homes and homes.states_on_drive),
            "gradients": _gradients_home(layout, homes),
            "activation checkpoints": "VRAM",
        },
        time=deepspeed_rates(case).seconds(traffic),
        checkpoint_s=hardware.drive_s(in_drive, case.saved_bytes),
        notes=tuple(notes),
        staged=layout.staged is not None,
        ram_budget_bytes=layout.staged.ram_budget_bytes if layout.staged is not None else None,
    )


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
    """Words as the streaming engine says it, where the drive takes a part of what may go there."""
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

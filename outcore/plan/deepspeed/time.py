"""What a step of DeepSpeed moves: all micro-batches' passes, and after the last of them the update, alone."""

from __future__ import annotations

from outcore.plan import constants as k
from outcore.plan.deepspeed.memory import STAGE_NUMBER
from outcore.plan.deepspeed.staged import StagedHomes, gradient_traffic, params_read, staged_update
from outcore.plan.record import StepTime
from outcore.plan.terms.case import Case
from outcore.plan.terms.rates import Rates
from outcore.plan.terms.traffic import Pass, Traffic
from outcore.sizing.layouts import DeepSpeedLayout


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
        k.DEEPSPEED_DRIVE_SHARE if staged is None else k.STREAM_DRIVE_SHARE,
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
    weights_read = 0
    if layout.params == "nvme":
        weights_read = swept * passes * gpus if homes is None else params_read(homes, passes)
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
    if layout.optimizer == "cpu":
        return Pass(ram_bytes=k.DEEPSPEED_OPTIMIZER_DRAM_BYTES * trained)
    # fp32 gradients 4 out and 4 in, master and moments 12 in and 12 out; 16-bit weights out when they live there
    return Pass(
        read_bytes=16.0 * trained,
        written_bytes=16.0 * trained + (case.element_bytes * trained if layout.params == "nvme" else 0),
        ram_bytes=k.OPTIMIZER_DRAM_BYTES["fp32"] * trained / k.DRAM_SHARE,
    )

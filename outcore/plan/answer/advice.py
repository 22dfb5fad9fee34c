"""What limits a plan, and the one change that would help it most: found by planning again, not by rule of thumb."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from outcore.common.quantities import GIB, format_gb, format_gib, format_s
from outcore.plan.choose import choose, smaller_micro_batches
from outcore.plan.hardware import Hardware
from outcore.plan.record import TIER_WORDS, Plan
from outcore.plan.request import RunRequest
from outcore.sizing.shape import ModelShape
from outcore.sizing.states import QUANTIZED

WORTH_SAYING = 1.05
"""A change that gains less than this is not advised."""
WORTH_MORE = 1.02
"""Ratio that decides: of two changes the former, which is the milder, unless the latter gains this much more."""
MORE_RAM_BYTES = 32 * GIB
TERM_WORDS = {
    "compute_s": "the GPU's arithmetic",
    "h2d_s": "the link to the GPU (parameters up)",
    "d2h_s": "the link from the GPU (gradients down)",
    "drive_s": "the drive",
    "cpu_optimizer_s": "the update on the CPU (cores and memory bandwidth)",
    "host_overhead_s": "Python between the layers",
}


@dataclass(frozen=True)
class Advice:
    """The binding constraint, and the best single change (None when none is worth it)."""

    constraint: str
    change: str | None = None
    gain: float = 1.0
    """Tokens per second after the change against before."""
    packed: str = ""
    """What packing the frozen base would change, in a sentence; '' where it saves nothing that is short."""

    def words(self) -> str:
        """Both in a sentence each."""
        text = f"Limited by {self.constraint}."
        if self.change:
            text += f" One change that helps most: {self.change} ({self.gain:.1f} x the tokens per second)."
        return f"{text} {self.packed}".strip()


def advise(shape: ModelShape, request: RunRequest, hardware: Hardware, plan: Plan) -> Advice:
    """What limits `plan`, and which of the usual changes gains most tokens per second on it."""
    packed = packed_words(shape, request, hardware, plan)
    if not plan.fits:
        return Advice(shortage_words(plan), packed=packed)
    seconds = plan.time.terms_s
    longest = plan.time.longest
    taken_s = seconds["drive_read_s"] + seconds["drive_write_s"] if longest == "drive_s" else seconds[longest]
    words = TERM_WORDS[longest].replace("GPU", "CPU") if hardware.is_cpu else TERM_WORDS[longest]
    constraint = f"{words}: {format_s(taken_s)} of a step of {format_s(plan.time.step_s)}"
    best_words, best_gain, least_gain = None, 1.0, WORTH_SAYING
    same = dataclasses.replace(request, engine=plan.engine)
    for words, changed, machine in _changes(shape, same, hardware, plan):
        try:
            other = choose(shape, changed, machine).plan
        except ValueError:
            continue
        if other.fits and (gain := other.tokens_per_s / plan.tokens_per_s) > least_gain:
            best_words, best_gain, least_gain = words, gain, gain * WORTH_MORE
    return Advice(constraint, best_words, best_gain, packed)


def packed_words(shape: ModelShape, request: RunRequest, hardware: Hardware, plan: Plan) -> str:
    """Which packed base saves the drive, or makes the run fit at all, and what that costs; '' where none does, or a
    16-bit base is in RAM already. The wider format is proposed where it does as much."""
    reads = plan.engine == "stream" and plan.drive_read_bytes_per_step > 0
    if not shape.lora_r or shape.quantize or not shape.matrices or (plan.fits and not reads):
        return ""
    request = dataclasses.replace(request, engine="stream", zero_stage=None)
    for name, size in QUANTIZED.items():
        try:
            packed = shape.packed(name)
            other = choose(packed, request, hardware).plan
        except ValueError:
            continue
        if not other.fits or other.drive_read_bytes_per_step:
            continue
        e = request.element_bytes
        now, then = (format_gib(e * one.base_params - one.saved_bytes(e)) for one in (shape, packed))
        instead = f" instead of {format_s(plan.time.step_s)}" if plan.fits else ""
        read = f", nothing read from the drive ({format_gb(plan.drive_read_bytes_per_step)} now)" if reads else ""
        return (
            f"--quantize {name} keeps the frozen base in RAM: {then} instead of {now}{read}, "
            f"{format_s(other.time.step_s)} a step{instead}; {size.bits:g} bits a weight, {size.quality}."
        )
    return ""


def shortage_words(plan: Plan) -> str:
    """Which tiers are too small and by how much."""
    said = []
    for use in plan.short_tiers:
        amount = format_gb if use.tier == "nvme" else format_gib
        largest = max((p for p in plan.parts if p.tier == use.tier), key=lambda p: p.size_bytes)
        said.append(
            f"{TIER_WORDS[use.tier]}: {amount(use.used_bytes)} needed, {amount(use.capacity_bytes)} there, "
            f"{amount(use.short_bytes)} short (most of it {largest.name}, {amount(largest.size_bytes)})"
        )
    return "; ".join(said)


def _changes(
    shape: ModelShape, request: RunRequest, hardware: Hardware, plan: Plan
) -> list[tuple[str, RunRequest, Hardware]]:
    replace = dataclasses.replace
    found: list[tuple[str, RunRequest, Hardware]] = []
    if plan.engine == "stream" and not shape.lora_r:
        if plan.state_format in ("fp32", "split") and request.precision == "bf16":
            found.append(("8-bit moments, --state_format split8", replace(request, state_format="split8"), hardware))
        elif plan.state_format == "split8":
            words = "masters of 24 bits, --state_format fp24_m8"
            found.append((words, replace(request, state_format="fp24_m8"), hardware))
        if request.clips:
            found.append(("no clipping, --max_grad_norm 0", replace(request, max_grad_norm=0.0), hardware))
    doubled = 2 * plan.accumulation
    found.append(
        (
            f"twice the batch, --gradient_accumulation_steps {doubled}",
            replace(request, micro_batch=plan.micro_batch, accumulation=doubled),
            hardware,
        )
    )
    # Fewer rows at a time: layers may fit whole, and need no tiles.
    for rows, times in smaller_micro_batches(plan.micro_batch) if plan.engine == "stream" else ():
        more = times * plan.accumulation
        found.append(
            (
                f"the same batch in smaller micro-batches, --per_device_train_batch_size {rows} "
                f"--gradient_accumulation_steps {more}",
                replace(request, micro_batch=rows, accumulation=more),
                hardware,
            )
        )
    if plan.engine == "deepspeed" and plan.zero_stage != "none" and not shape.is_encoder_decoder:
        found.append(
            ("the streaming engine, --engine stream", replace(request, engine="stream", zero_stage=None), hardware)
        )
    if plan.uses_drive:
        found.append(
            (
                f"{format_gib(MORE_RAM_BYTES)} more RAM",
                request,
                replace(hardware, ram_bytes=hardware.ram_bytes + MORE_RAM_BYTES),
            )
        )
    return found

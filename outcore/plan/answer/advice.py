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

    def words(self) -> str:
        """Both in a sentence each."""
        text = f"Limited by {self.constraint}."
        if self.change:
            text += f" One change that helps most: {self.change} ({self.gain:.1f} x the tokens per second)."
        return text


def advise(shape: ModelShape, request: RunRequest, hardware: Hardware, plan: Plan) -> Advice:
    """What limits `plan`, and which of the usual changes gains most tokens per second on it."""
    if not plan.fits:
        return Advice(shortage_words(plan))
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
    return Advice(constraint, best_words, best_gain)


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

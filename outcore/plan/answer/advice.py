"""Limits of a plan, and the one change that would help it most: found by planning again, not by rule of thumb.

`outcore plan --upgrade`: which purchase halves the step, found by planning the same run on the machine with it.

Whether several GPUs are worth it: the same tokens a step on one of them, planned and corrected by finished runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from outcore.common.quantities import GIB, format_gb, format_gib, format_s
from outcore.machine.cards import CARDS, card_by_name
from outcore.plan.choose import choose, smaller_micro_batches
from outcore.plan.hardware import Hardware
from outcore.plan.learned import LEARNED, expected_s
from outcore.plan.profile import RunRequest
from outcore.plan.record import TIER_WORDS, Plan
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
    """Effect of packing the frozen base, in a sentence; '' where it neither spares the drive nor makes the run fit."""

    def words(self) -> str:
        """Both in a sentence each."""
        text = f"Limited by {self.constraint}."
        if self.change:
            text += f" One change that helps most: {self.change} ({self.gain:.1f} x the tokens per second)."
        return f"{text} {self.packed}".strip()


def advise(shape: ModelShape, request: RunRequest, hardware: Hardware, plan: Plan) -> Advice:
    """Find what limits `plan`, and which of the usual changes gains most tokens per second on it."""
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


ENOUGH = 2.0
"""Tokens per second after against before: half the step."""
MORE_RAM_GIB = (32, 64, 128)
CARDS_OFFERED = ("rtx 5060 ti", "rtx 3090", "rtx 5070 ti", "rtx 4090", "rtx 5090", "rtx pro 6000")
"""Cards with 16 GiB or more in the order of their usual prices, 2025; the 3090 used."""


@dataclass(frozen=True)
class Upgrade:
    """One purchase and what the run becomes with it."""

    words: str
    step_s: float
    gain: float | None
    """Tokens per second after against before; None where the run does not fit without it."""

    @property
    def is_enough(self) -> bool:
        return self.gain is None or self.gain >= ENOUGH

    def line(self) -> str:
        """The purchase in a line."""
        return f"{self.words}: {format_s(self.step_s)} a step, " + (
            "and the run fits" if self.gain is None else f"{self.gain:.2g} x the tokens per second"
        )


def upgrades(shape: ModelShape, request: RunRequest, hardware: Hardware, plan: Plan) -> tuple[Upgrade, ...]:
    """Purchases with which the run fits or is faster, in the usual order of prices: drive, RAM, card."""
    found = []
    for words, machine in _purchases(hardware):
        try:
            other = choose(shape, request, machine).plan
        except ValueError:
            continue
        gain = other.tokens_per_s / plan.tokens_per_s if plan.fits else None
        if other.fits and (gain is None or gain > WORTH_SAYING):
            found.append(Upgrade(words, other.time.step_s, gain))
    return tuple(found)


def upgrade_lines(found: tuple[Upgrade, ...]) -> list[str]:
    """The answer first, then each purchase."""
    enough = next((one for one in found if one.is_enough), None)
    if enough is not None:
        what = "makes the run fit" if enough.gain is None else "halves the step"
        first = f"The cheapest purchase that {what}: {enough.words}."
    elif best := max(found, key=lambda one: one.gain or 0.0, default=None):
        first = f"No single purchase halves the step; the most gains {best.words}."
    else:
        return ["No single purchase that was tried gains anything, or makes the run fit."]
    return [first, *(f"  {one.line()}" for one in found), "  (in the order of usual prices: look at yours)"]


def _purchases(hardware: Hardware) -> Iterator[tuple[str, Hardware]]:
    if hardware.nvme_total_bytes:
        mixed = hardware.drive_mixed_gb_per_s
        yield (
            "a second drive like the first, striped",
            replace(
                hardware,
                nvme_free_bytes=hardware.nvme_free_bytes + hardware.nvme_total_bytes,
                nvme_total_bytes=2 * hardware.nvme_total_bytes,
                drive_read_gb_per_s=2 * hardware.drive_read_gb_per_s,
                drive_write_gb_per_s=2 * hardware.drive_write_gb_per_s,
                drive_mixed_gb_per_s=2 * mixed if mixed else None,
            ),
        )
    here = card_by_name(hardware.identity)
    if here is not None and here.kind == "unified":
        return  # its memory is soldered, and no card beside it shares that
    for gib in MORE_RAM_GIB:
        more = gib * GIB
        yield (
            f"{format_gib(more)} more RAM",
            replace(hardware, ram_bytes=hardware.ram_bytes + more, pinned_bytes=hardware.pinned_bytes + more // 2),
        )
    if here is not None and here.kind == "laptop":
        return
    for card in (CARDS[key] for key in CARDS_OFFERED):
        peak, memory = card.peak_tflops * card.layers_share, card.memory_gb_per_s
        is_more = card.vram_bytes > hardware.vram_bytes or peak > (hardware.compute_tflops or 0.0) * 1.2
        if hardware.is_cpu or not is_more:
            continue
        yield f"{card.key.upper()} with {format_gib(card.vram_bytes)} instead of the card", replace(
            hardware, vram_bytes=card.vram_bytes, compute_tflops=peak, device_memory_gb_per_s=memory,
            is_rate_of_layers=True,
        )  # fmt: skip


@dataclass(frozen=True)
class BesideOne:
    """A plan for several GPUs beside the best one of a single GPU with the same global batch."""

    num_gpus: int
    tokens: int
    step_s: float
    one_s: float
    is_measured: bool
    """Whether runs on this machine corrected a forecast."""

    @property
    def is_slower(self) -> bool:
        return self.step_s > self.one_s

    def words(self) -> str:
        """A sentence, and what to do where one GPU is faster."""
        by = "by what runs on this machine took" if self.is_measured else "by forecast"
        text = (
            f"{by} {self.num_gpus} GPUs take {format_s(self.step_s)} a step of {self.tokens:,} tokens and one GPU "
            f"{format_s(self.one_s)}"
        )
        if self.is_slower:
            return f"{text}: one GPU is faster. Start with --num_gpus=1, or give a step more tokens"
        return f"{text}: {self.one_s / self.step_s:.1f} x"


def beside_one(
    shape: ModelShape, request: RunRequest, hardware: Hardware, plan: Plan, path: Path = LEARNED
) -> BesideOne | None:
    """Give nothing for a plan of one GPU, and where its model does not fit one or rates are not known."""
    if plan.num_gpus == 1 or not plan.compute_known:
        return None
    same = replace(request, micro_batch=plan.micro_batch, accumulation=plan.accumulation * plan.num_gpus)
    one = choose(shape, same, replace(hardware, num_gpus=1)).plan
    if not one.fits:
        return None
    (step_s, was_seen), (one_s, one_seen) = expected_s(plan, hardware, path), expected_s(one, hardware, path)
    return BesideOne(plan.num_gpus, plan.tokens_per_step, step_s, one_s, was_seen or one_seen)

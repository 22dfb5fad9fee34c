"""`outcore plan --upgrade`: which purchase halves the step, found by planning the same run on the machine with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from outcore.common.quantities import GIB, format_gib, format_s
from outcore.machine.cards import CARDS, card_by_name
from outcore.plan.answer.advice import WORTH_SAYING
from outcore.plan.choose import choose
from outcore.plan.hardware import Hardware
from outcore.plan.record import Plan
from outcore.plan.request import RunRequest
from outcore.sizing.shape import ModelShape

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

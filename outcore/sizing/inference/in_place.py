"""Choice of the travelling layers that the CPU computes where their bytes are, and up to how many tokens of a pass:
from rates measured at the start.

While the CPU computes some of the layers that do not fit in VRAM, the link brings the others. A pass takes the longer
of the two; for each number of tokens that was tried, so many layers go to the CPU as make it shortest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from outcore.common.quantities import format_s
from outcore.sizing.inference.placement import Placement
from outcore.sizing.inference.rates import InPlaceRates


def compute_in_place(
    placement: Placement, candidates: Mapping[str, int], rates: InPlaceRates, most_tokens: int | None = None
) -> Placement:
    """The placement with some of `candidates` (travelling layers that are whole in RAM, in order, with their
    bytes) on the CPU in passes of few tokens. `most_tokens`: the user's threshold; None: the measured one, 0: none."""
    if not candidates or most_tokens == 0:
        return placement
    names, count = list(candidates), len(candidates)
    one = sum(candidates.values()) / count

    def seconds(on_cpu: int, tokens: int) -> float:
        return rates.pass_s(on_cpu, on_cpu * one, (count - on_cpu) * one, tokens)

    chosen: dict[int, tuple[str, ...]] = {}
    for tokens in sorted(rates.cpu_gb_per_s):
        on_cpu = min(range(count + 1), key=lambda n, tokens=tokens: seconds(n, tokens))
        if seconds(on_cpu, tokens) > rates.WORTH * seconds(0, tokens) or (
            chosen and most_tokens is not None and max(chosen) >= most_tokens
        ):
            break
        chosen[tokens] = rates.evenly(names, on_cpu)
    least = min(rates.cpu_gb_per_s)
    words = (
        f"{rates.cpu_gb_per_s[least]:.1f} GB/s measured on the CPU beside {rates.link_gb_per_s:.1f} over the link, "
        f"{format_s(rates.part_s)} of hand-overs a layer"
    )
    if not chosen:
        reasons = (*placement.reasons, f"every layer is computed on the GPU: {words}")
        return replace(placement, cpu_parts={}, cpu_tokens=0, cpu_rates=rates, reasons=reasons)
    threshold = min(max(chosen), most_tokens or max(chosen))
    layers = ", ".join(f"{len(parts)} for up to {tokens}" for tokens, parts in chosen.items())
    reason = (
        f"in passes of up to {threshold} tokens the CPU computes some of the {count} layers that travel, where they "
        f"are ({layers}): {format_s(seconds(len(chosen[least]), least))} a pass instead of "
        f"{format_s(seconds(0, least))} ({words})"
    )
    reasons = (*placement.reasons, reason)
    return replace(placement, cpu_parts=chosen, cpu_tokens=threshold, cpu_rates=rates, reasons=reasons)

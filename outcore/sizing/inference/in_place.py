"""Which travelling layers the CPU computes where their bytes are, and up to how many tokens of a pass: from rates
measured at the start.

While the CPU computes some of the layers that do not fit in VRAM, the link brings the others. A pass takes the longer
of the two; the number of layers on the CPU is the one that makes it shortest for one token, and the threshold the most
tokens for which that still beats bringing them all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from outcore.common.quantities import GB, format_s
from outcore.sizing.inference.placement import Placement


@dataclass(frozen=True)
class InPlaceRates:
    """What a trial on this machine measured."""

    cpu_gb_per_s: Mapping[int, float]
    """Packed bytes a second of the CPU's kernels, by tokens of a pass."""
    link_gb_per_s: float
    part_s: float
    """Hand-overs of one layer: its activations to the CPU and back, once for each matrix, and its launches."""


def compute_in_place(
    placement: Placement, candidates: Mapping[str, int], rates: InPlaceRates, most_tokens: int | None = None
) -> Placement:
    """The placement with some of `candidates` (travelling packed layers that are whole in RAM, in order, with their
    bytes) on the CPU in passes of few tokens. `most_tokens`: the user's threshold; None: the measured one, 0: none."""
    if not candidates or most_tokens == 0:
        return placement
    names, count = list(candidates), len(candidates)
    one = sum(candidates.values()) / count

    def seconds(on_cpu: int, tokens: int) -> float:
        cpu_s = on_cpu * (one / (rates.cpu_gb_per_s[tokens] * GB) + rates.part_s)
        return max(cpu_s, (count - on_cpu) * one / (rates.link_gb_per_s * GB))

    least = min(rates.cpu_gb_per_s)
    on_cpu = min(range(count + 1), key=lambda n: seconds(n, least))
    paying = [tokens for tokens in rates.cpu_gb_per_s if seconds(on_cpu, tokens) < seconds(0, tokens)]
    threshold = most_tokens or max(paying, default=0)
    words = (
        f"{rates.cpu_gb_per_s[least]:.1f} GB/s measured on the CPU, {rates.link_gb_per_s:.1f} over the link, "
        f"{format_s(rates.part_s)} of hand-overs a layer"
    )
    if not on_cpu or not threshold:
        return replace(placement, reasons=(*placement.reasons, f"every layer is computed on the GPU: {words}"))
    chosen = tuple(names[(2 * n + 1) * count // (2 * on_cpu)] for n in range(on_cpu))
    reason = (
        f"in passes of up to {threshold} tokens the CPU computes {on_cpu} of the {count} layers that travel, where "
        f"they are: {format_s(seconds(on_cpu, least))} a pass instead of {format_s(seconds(0, least))} ({words})"
    )
    return replace(placement, cpu_parts=chosen, cpu_tokens=threshold, reasons=(*placement.reasons, reason))

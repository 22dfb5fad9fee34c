"""What a trial at the start measures of packed weights that the CPU computes where they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from outcore.common.quantities import GB


@dataclass(frozen=True)
class InPlaceRates:
    """Rates of this machine, each beside the other: both read the same memory."""

    cpu_gb_per_s: Mapping[int, float]
    """Packed bytes a second of the CPU's kernels, by tokens of a pass."""
    link_gb_per_s: float
    part_s: float
    """Hand-overs of one layer: its activations to the CPU and back, once for each matrix, and its launches."""

    def cpu_s(self, layers: int, size_bytes: float, tokens: float) -> float:
        """Seconds in which the CPU computes layers of so many bytes together, for so many tokens."""
        tried = min((n for n in self.cpu_gb_per_s if n >= tokens), default=max(self.cpu_gb_per_s))
        return size_bytes / (self.cpu_gb_per_s[tried] * GB) + layers * self.part_s

    def slower(self, link_gb_per_s: float, times: Mapping[int, float]) -> InPlaceRates:
        """The rates as whole passes had them: `times`, by tokens of a pass, so many times as long as these say, for
        other numbers of tokens the most of it."""
        most = max(times.values())
        cpu = {tokens: rate / times.get(tokens, most) for tokens, rate in self.cpu_gb_per_s.items()}
        return replace(self, cpu_gb_per_s=cpu, link_gb_per_s=link_gb_per_s, part_s=self.part_s * most)

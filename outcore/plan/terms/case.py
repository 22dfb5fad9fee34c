"""One question to the planner: this model, run and machine, and one layout of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from outcore.plan import constants as k
from outcore.plan.hardware import Hardware
from outcore.plan.request import RunRequest
from outcore.plan.terms.work import Flops, device_bytes, step_flops
from outcore.sizing.activations import has_masks
from outcore.sizing.layouts import DeepSpeedLayout, StreamLayout
from outcore.sizing.shape import ModelShape

Layout = TypeVar("Layout", StreamLayout, DeepSpeedLayout)


@dataclass(frozen=True)
class Case(Generic[Layout]):
    """What is planned; every count of bytes and seconds starts from this."""

    shape: ModelShape
    request: RunRequest
    hardware: Hardware
    seq_length: int
    layout: Layout

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or activation as it is computed with."""
        return self.request.element_bytes

    @property
    def micro_tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.seq_length * self.layout.micro_batch

    @property
    def checkpoint_ends(self) -> list[int]:
        """Bytes of a layer's activation checkpoints up to the end of each micro-batch of a step."""
        hidden_bytes = self.element_bytes * self.micro_tokens * self.shape.hidden_size
        return [hidden_bytes * (number + 1) for number in range(self.layout.accumulation)]

    @cached_property
    def muon(self) -> list[tuple[int, int]]:
        """Sides of each matrix that Muon updates; none with AdamW."""
        return self.shape.layer_matrices if self.request.optimizer == "muon" else []

    @property
    def masks(self) -> bool:
        """Whether packed rows are attended to through masks."""
        return has_masks(self.layout.packed_attention, self.element_bytes)

    @property
    def attention_share(self) -> float:
        """Share of the rate of matrix products that attention reaches."""
        return k.MASKED_ATTENTION_SHARE if self.masks else k.ATTENTION_SHARE

    @cached_property
    def flops(self) -> Flops:
        """Arithmetic of a step on one GPU."""
        return step_flops(self.shape, self.request, self.seq_length, self.micro_tokens * self.layout.accumulation)

    @cached_property
    def device_bytes(self) -> tuple[float, float, float]:
        """Bytes that pass through the GPU's own memory in a step, (forward, head, backward)."""
        return device_bytes(self.shape, self.request, self.seq_length, self.micro_tokens, self.layout.accumulation)

"""A model of equal layers and nothing else, as a decision is told of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outcore.config import RunSettings
from outcore.engine.base import Host
from outcore.engine.stream.decision.decide import StreamDecision, stream_decision
from outcore.sizing.training import PartNeeds, TrainingNeeds, checkpoint_ends


@dataclass(frozen=True)
class EvenModel:
    """Model, batch and machine."""

    total_params: int
    trainable_params: int
    num_layers: int
    hidden_size: int
    step_tokens: tuple[int, ...]
    ram_available_bytes: int
    has_cuda: bool
    row_tokens: int | None = None
    is_wsl2: bool = False
    write_combined: bool | None = None
    muon_params: int = 0
    num_ranks: int = 1

    def needs(self, settings: RunSettings) -> TrainingNeeds:
        n, e = self.num_layers, settings.element_bytes
        matrices = (self.muon_params // n,) if self.muon_params else ()
        size_bytes = e * self.total_params // n
        layer = PartNeeds(size_bytes, size_bytes, self.trainable_params // n, matrices)
        ends = checkpoint_ends(self.step_tokens, e * self.hidden_size)
        return TrainingNeeds((layer,) * n, (), e, settings.state_format, ends, self.num_ranks)

    def decide(self, settings: RunSettings, **checks: Any) -> StreamDecision:
        host = Host(
            self.has_cuda, self.ram_available_bytes, "run", is_wsl2=self.is_wsl2, write_combined=self.write_combined
        )
        return stream_decision(settings, self.needs(settings), host, self.step_tokens, self.row_tokens, **checks)

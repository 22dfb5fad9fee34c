"""Learning-rate schedules as pure functions of the step, so that both engines and a resumed run agree exactly.

`warmup_decay` is DeepSpeed's WarmupDecayLR with linear warm-up: up to the peak over `warmup_steps`, then linearly to 0
at `total_steps`. `cosine` ends at a tenth of the peak (Hoffmann et al. 2022). `constant` stays after warm-up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

COSINE_FLOOR = 0.1
"""Share of the peak at which the cosine ends; https://arxiv.org/abs/2203.15556, appendix B."""


@dataclass(frozen=True)
class LrSchedule:
    """lr(step) for step = 0 .. total_steps - 1 (the update number)."""

    kind: str
    peak_lr: float
    warmup_steps: int
    total_steps: int

    def lr(self, step: int) -> float:
        """Learning rate of update number `step` (0-based); the first update already moves the weights."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return self.peak_lr
        span = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        if self.kind == "cosine":
            return self.peak_lr * (COSINE_FLOOR + (1 - COSINE_FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))
        if self.kind == "warmup_decay":
            return self.peak_lr * (1.0 - progress)
        raise ValueError(f"unknown learning-rate schedule {self.kind!r}: warmup_decay, cosine or constant")


@dataclass(frozen=True)
class RunLength:
    """How long the run is and what happens when; steps count from 1."""

    total_steps: int
    eval_steps: int
    sample_steps: int
    save_steps: int
    accumulation: int

    def due(self, step: int, every: int) -> bool:
        """True at every `every`-th step (0: never) but the last, which has its own turn."""
        return every > 0 and step % every == 0 and step < self.total_steps

"""Learning-rate schedules as pure functions of the step, so that both engines and a resumed run agree exactly.

All start with a linear warm-up over `warmup_steps`, whose first step has a rate of 0, as in HF's Trainer; then, to
`total_steps`:
`warmup_decay` falls linearly, `cosine` along half a cosine, both to `min_ratio` of the peak (0 unless it is given);
`constant` stays; `wsd` (warm-up, stable, decay) stays and falls linearly over its last `decay_steps`."""

from __future__ import annotations

import math
from dataclasses import dataclass

COSINE_FLOOR = 0.1
"""Share of the peak at which cosine_with_min_lr ends unless told; https://arxiv.org/abs/2203.15556, appendix B."""
WSD_DECAY_SHARE = 0.1
"""Share of the run in which wsd falls unless told; https://arxiv.org/abs/2404.06395, section 4.2."""
KINDS = ("warmup_decay", "cosine", "constant", "wsd")


@dataclass(frozen=True)
class LrSchedule:
    """lr(step) for step = 0 .. total_steps - 1 (the update number)."""

    kind: str
    peak_lr: float
    warmup_steps: int
    total_steps: int
    min_ratio: float = 0.0
    """Share of the peak at which it ends."""
    decay_steps: int = 0
    """Steps of wsd: its last steps, in which it falls."""
    first: int = 0
    """Number of the warm-up's first step: 0, or 1 where a DeepSpeed file's scheduler has it begin above 0."""

    def lr(self, step: int) -> float:
        """Learning rate of update number `step` (0-based)."""
        if step < self.warmup_steps:
            return self.peak_lr * (step + self.first) / self.warmup_steps
        return self.peak_lr * (self.min_ratio + (1.0 - self.min_ratio) * self._height(step))

    def _height(self, step: int) -> float:
        """Compute how much is left of the way from the peak down, 1 .. 0."""
        if self.kind == "constant":
            return 1.0
        start = self.total_steps - self.decay_steps if self.kind == "wsd" else self.warmup_steps
        progress = min(1.0, max(0.0, (step - start) / max(1, self.total_steps - start)))
        if self.kind == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        if self.kind in KINDS:
            return 1.0 - progress
        raise ValueError(f"unknown learning-rate schedule {self.kind!r}: {', '.join(KINDS)}")

    @property
    def words(self) -> str:
        """For the screen: what the rate does over the run."""
        ends = {"constant": "", "wsd": f", falling over the last {self.decay_steps}"}.get(self.kind, ", falling")
        down = f" to {self.min_ratio * self.peak_lr:g}" if ends else ""
        return f"{self.kind}: {self.peak_lr:g} after {self.warmup_steps} of {self.total_steps} steps{ends}{down}"


@dataclass(frozen=True)
class RunLength:
    """Length of the run, and every how many steps something happens; steps count from 1."""

    total_steps: int
    eval_steps: int
    sample_steps: int
    save_steps: int
    accumulation: int

    def due(self, step: int, every: int) -> bool:
        """True at every `every`-th step (0: never) but the last, which has its own turn."""
        return every > 0 and step % every == 0 and step < self.total_steps

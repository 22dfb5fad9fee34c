"""What the plan said of a server's passes, beside what they took: summed up while it runs, kept when it ends."""

from __future__ import annotations

from typing import Any

import torch

from outcore.infer.opening import OpenedModel
from outcore.plan import InferencePlan


class AgainstPlan:
    """`passed` after each pass of the engine; `facts` at any time. `plan` None: this machine was not measured."""

    def __init__(self, opened: OpenedModel, plan: InferencePlan | None) -> None:
        self._opened, self._plan = opened, plan
        self._passes, self._measured_s, self._forecast_s = 0, 0.0, 0.0

    def passed(self) -> None:
        """Count the pass that has just run."""
        counts = self._opened.engine.counts
        self._passes += 1
        self._measured_s += counts.last_pass_s
        if self._plan is not None:
            self._forecast_s += self.forecast_s()

    def forecast_s(self) -> float:
        """What the plan says of the last pass."""
        assert self._plan is not None
        engine = self._opened.engine
        running = list(engine.scheduler.running)
        kv_tokens = sum(sequence.computed for sequence in running)
        return self._plan.pass_time(engine.counts.last_pass_rows, kv_tokens, len(running)).seconds

    def facts(self) -> dict[str, Any]:
        """Seconds and tokens a second of all passes, measured and forecast; bytes of VRAM, placed and taken."""
        opened, tokens = self._opened, self._opened.engine.counts.answer_tokens
        found: dict[str, Any] = {
            "model": opened.found.words,
            "placement": opened.placement.lines(),
            "passes": self._passes,
            "answer_tokens": tokens,
            "measured_s": self._measured_s,
            "measured_tokens_per_s": tokens / self._measured_s if self._measured_s else None,
        }
        if self._forecast_s:
            found["forecast_s"] = self._forecast_s
            found["forecast_tokens_per_s"] = tokens / self._forecast_s
            found["measured_over_forecast"] = self._measured_s / self._forecast_s
        if opened.device.type == "cuda":
            found["vram_placed_bytes"] = sum(opened.placement.vram_bytes.values())
            found["vram_peak_bytes"] = torch.cuda.max_memory_reserved(opened.device)
        return found

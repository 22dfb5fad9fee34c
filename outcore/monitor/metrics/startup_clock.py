"""Clock of the start: where the time before training goes: seconds by part, from the process's first line to the end
of the first step.

Parts: `imports`, `settings` (flags, files, tokenizer, engine choice), `data`, `plan` (the forecast's look at model and
machine), `model_load`, `engine_init` (pinned memory, homes, first weights), `logs` (sensors, log files); then
`first_step`, and `compile`, the part of it that torch.compile took. Written to plan.json and, with the first step, to
metrics.jsonl."""

from __future__ import annotations

import sys
import time

from outcore.common.quantities import format_s


class StartupClock:
    """Each `mark` gives the time since the last one to a part. `began_s`: the process's first line, by
    time.perf_counter."""

    def __init__(self, began_s: float | None = None) -> None:
        self._marked_s = time.perf_counter()
        self.parts_s: dict[str, float] = {}
        if began_s is not None:
            self.parts_s["imports"] = self._marked_s - began_s

    def mark(self, part: str, *, of_it: dict[str, float] | None = None) -> None:
        """`of_it`: parts within that are known by themselves, and counted apart."""
        now_s = time.perf_counter()
        passed_s = now_s - self._marked_s
        for name, seconds in (of_it or {}).items():
            self.parts_s[name] = min(seconds, passed_s)
            passed_s -= self.parts_s[name]
        self.parts_s[part] = self.parts_s.get(part, 0.0) + passed_s
        self._marked_s = now_s

    def of_first_step(self, step_s: float) -> dict[str, float]:
        """All parts, with the first step's."""
        return {**self.parts_s, "first_step": step_s, "compile": min(step_s, compile_s())}

    def words(self) -> str:
        """One line for people, longest first."""
        parts = sorted(self.parts_s.items(), key=lambda item: -item[1])
        named = ", ".join(f"{name.replace('_', ' ')} {format_s(seconds)}" for name, seconds in parts if seconds >= 0.1)
        return f"start: {format_s(sum(self.parts_s.values()))} ({named})"


def compile_s() -> float:
    """Seconds that torch.compile took in this process so far, caches included; 0 when it was not used."""
    utils = sys.modules.get("torch._dynamo.utils")  # imported by the first compilation, not here
    return 0.0 if utils is None else float(utils.calculate_time_spent().get("entire_frame_compile", 0.0))

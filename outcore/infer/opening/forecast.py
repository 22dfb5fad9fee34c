"""Forecast of passes beside the seconds that they took: summed up while a model runs, told and kept when it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from outcore.common.quantities import counted, format_gib, format_s
from outcore.formats import PLAIN_FORMATS
from outcore.infer.opening.build import OpenedModel
from outcore.infer.schedule import Work, rows_of
from outcore.plan import Hardware, InferencePlan, PassTime, load_hardware, plan_of
from outcore.plan.learned import remember_rates
from outcore.sizing.inference import pairs


class AgainstPlan:
    """Hears of every pass of the engine from its making on. `plan` None: this machine was not measured, or `why_not`.

    Seconds in which graphs were captured count for neither side: each size is captured once."""

    def __init__(self, opened: OpenedModel, plan: InferencePlan | None, why_not: str = "") -> None:
        self._opened, self.plan, self.why_not = opened, plan, why_not
        self.passes, self.measured_s, self.forecast_s, self.last_forecast_s = 0, 0.0, 0.0, 0.0
        self.last_forecast: PassTime | None = None
        self._small = getattr(opened.engine.runner, "small", None)
        self._captured_s = self._capture_s()
        self._tokens_before = opened.engine.counts.answer_tokens
        opened.engine.observers.append(self.passed)
        if opened.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(opened.device)

    def passed(self, works: Sequence[Work], seconds: float) -> None:
        """Count the pass that has just run."""
        captured_s = self._capture_s()
        self.passes += 1
        self.measured_s += max(0.0, seconds - (captured_s - self._captured_s))
        self._captured_s = captured_s
        if self.plan is not None:
            kv_tokens = sum(work.start + work.count for work in works)
            answers = sum(work.num_drafts + 1 for work in works if work.is_last)
            seen = sum(pairs(work.start, work.count) for work in works)
            experts = self._opened.experts
            hit_rate = 0.0 if experts is None else experts.counts.hit_rate or 0.0
            self.last_forecast = self.plan.pass_time(rows_of(works), kv_tokens, answers, seen, hit_rate)
            self.last_forecast_s = self.last_forecast.seconds
            self.forecast_s += self.last_forecast_s

    def scored(self, lengths: Sequence[int], seconds: float) -> None:
        """Count texts of so many tokens each that were scored together."""
        tokens = sum(lengths)
        most = getattr(getattr(self._opened.engine.runner, "limits", None), "score_tokens", tokens)
        passes = -(-tokens // max(1, most))
        self.passes, self.measured_s = self.passes + passes, self.measured_s + seconds
        if self.plan is not None and passes:
            each, seen = tokens / passes, sum(pairs(0, length) for length in lengths) / passes
            self.forecast_s += passes * self.plan.pass_time(each, 0, round(each), seen).seconds

    def facts(self) -> dict[str, Any]:
        """Seconds and tokens a second of all passes, measured and forecast; bytes of VRAM, placed and taken."""
        opened, tokens = self._opened, self._opened.engine.counts.answer_tokens - self._tokens_before
        found: dict[str, Any] = {
            "model": opened.found.words,
            "placement": opened.placement.lines(),
            "passes": self.passes,
            "answer_tokens": tokens,
            "measured_s": self.measured_s,
            "measured_tokens_per_s": tokens / self.measured_s if self.measured_s else None,
        }
        if (experts := opened.experts) is not None:
            counts = experts.counts
            found |= {"experts_asked": counts.asked, "expert_hit_rate": counts.hit_rate}
            found["expert_read_bytes"] = counts.read_bytes + counts.for_cpu_bytes
        if self.plan is None:
            found["why_no_forecast"] = self.why_not
        if self.forecast_s:
            found["forecast_s"] = self.forecast_s
            found["forecast_tokens_per_s"] = tokens / self.forecast_s
            found["measured_over_forecast"] = self.measured_s / self.forecast_s
        if opened.device.type == "cuda":
            found["vram_placed_bytes"] = sum(opened.placement.vram_bytes.values())
            found["vram_peak_bytes"] = taken_bytes(opened.device)
        return found

    def words(self) -> str:
        """Forecast and run in a line, and how often experts were there; '' where there is nothing to tell."""
        facts, said = self.facts(), list[str]()
        if self.forecast_s:
            said.append(
                f"{counted(self.passes, 'pass', 'passes')} took {format_s(self.measured_s)}, "
                f"{facts['measured_over_forecast']:.2f} times the forecast of {format_s(self.forecast_s)}"
            )
            if "vram_peak_bytes" in facts:
                placed, taken = facts["vram_placed_bytes"], facts["vram_peak_bytes"]
                said.append(f"VRAM: {format_gib(placed)} placed, {format_gib(taken)} taken")
        if facts.get("experts_asked"):
            read = format_gib(facts["expert_read_bytes"])
            said.append(f"{facts['expert_hit_rate']:.0%} of {facts['experts_asked']:,} experts were there, {read} read")
        return "; ".join(said)

    def _capture_s(self) -> float:
        return 0.0 if self._small is None else self._small.capture_s


def taken_bytes(device: torch.device) -> int:
    """Most bytes of a GPU that tensors took since its peaks were reset, and what CUDA graphs keep beside, which tensors
    cannot use."""
    kept = [
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and tuple(segment["segment_pool_id"]) != (0, 0)
    ]
    return torch.cuda.max_memory_allocated(device) + sum(kept)


def against_plan(opened: OpenedModel) -> AgainstPlan:
    """The plan's view of this model as it is placed on this machine, if that was measured."""
    loaded = opened.found.loaded
    if opened.weights is None:
        return AgainstPlan(opened, None, "passes over pictures are not forecast")
    try:
        hardware, rates = load_hardware(), opened.placement.cpu_rates
        dtype = next(p.dtype for p in loaded.model.parameters())
        name = loaded.quantize or ("" if loaded.packed or dtype not in PLAIN_FORMATS else PLAIN_FORMATS[dtype].name)
        if rates is not None and name:
            remember_rates(name, rates, hardware)
        plan = plan_as_opened(opened, hardware)
    except (ValueError, RuntimeError, OSError) as error:  # ProfileError is one: nothing was measured here
        return AgainstPlan(opened, None, str(error))
    return AgainstPlan(opened, plan)


def plan_as_opened(opened: OpenedModel, hardware: Hardware) -> InferencePlan:
    """The plan of a model that is open, on a machine of these rates. ValueError for one whose layers cannot be
    counted."""
    loaded, sizes = opened.found.loaded, Counter[str]()
    for spec in loaded.packed.values():
        sizes[spec.format.name] += spec.size_bytes
    most = sizes.most_common(1)  # of a file with several formats
    return plan_of(
        opened.found.words,
        loaded.config,
        hardware,
        opened.placement,
        next(p.dtype for p in loaded.model.parameters()).itemsize,
        kv_format=opened.engine.scheduler.cache.settings.kv_format,
        packed=loaded.quantize or (most[0][0] if most else None),
    )

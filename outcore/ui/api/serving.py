"""Metrics of the loaded model's server, looked at again and again, as figures for graphs and alerts."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from outcore.serve.additions import ApiError
from outcore.ui.api.model import ModelHost

KEPT_SAMPLES = 450
FULL_SHARE = 0.98
"""Room for keys and values above which answers wait or begin again."""


class ServingWatch:
    """Samples of whatever engine serves. `look` is called every few seconds; without a model it asks nobody."""

    def __init__(self, host: ModelHost) -> None:
        self.host = host
        self._samples: deque[dict[str, Any]] = deque(maxlen=KEPT_SAMPLES)
        self._before: tuple[float, Mapping[str, Any]] | None = None
        self._began_at: float | None = None

    def look(self) -> None:
        """Take a sample."""
        state = self.host.state()
        if state["state"] != "ready":
            return
        if state["began_at"] != self._began_at:  # another model: its counters begin again
            self._samples.clear()
            self._before, self._began_at = None, state["began_at"]
        try:
            found = self.host.metrics()
        except ApiError:  # it is loading, ending or gone: the model's state says so
            return
        now = time.time()
        since = self._before or (now, found)
        self._before = (now, found)
        self._samples.append({"time": now, **sample_of(found, since[1], now - since[0], _degree(state))})

    def live(self) -> dict[str, Any]:
        """Samples, the launch descriptor, alerts. Empty while no model is loaded."""
        state = self.host.state()
        if state["state"] != "ready" or state["began_at"] != self._began_at:
            return {"samples": [], "launch": {}, "alerts": []}
        samples = list(self._samples)
        return {"samples": samples, "launch": state.get("launch") or {}, "alerts": alerts_of(samples)}


def _degree(state: Mapping[str, Any]) -> int:
    return (state.get("launch") or {}).get("pipeline_parallel") or 1


def sample_of(now: Mapping[str, Any], before: Mapping[str, Any], seconds: float, stages: int) -> dict[str, Any]:
    """Figures of one moment. Rates are None without a moment before.

    `stages_idle_share`: a request is in one pipeline stage at a time, so with fewer requests than stages at least this
    share of the stages computes nothing (the bubble)."""

    def total(page: Mapping[str, Any], *names: str) -> float | None:
        for name in names:
            if (value := page.get(name)) is not None:
                return sum(value.values()) if isinstance(value, Mapping) else value
        return None

    def rate(*names: str) -> float | None:
        new, old = total(now, *names), total(before, *names)
        return (new - old) / seconds if seconds > 0 and new is not None and old is not None else None

    running = total(now, "num_requests_running", "running_answers")
    passes, pass_s = rate("pass_seconds_count"), rate("pass_seconds_sum")
    pages: Mapping[str, float] = now.get("kv_pages") or {}
    used = sum(count for label, count in pages.items() if label.endswith("used"))
    kv = used / sum(pages.values()) if sum(pages.values()) else total(now, "kv_cache_usage_perc")
    idle = None if running is None or stages < 2 or not running else max(0.0, 1 - running / stages)
    return {
        "running": running,
        "waiting": total(now, "num_requests_waiting", "waiting_answers"),
        "prompt_tokens_per_s": rate("prompt_tokens"),
        "answer_tokens_per_s": rate("generation_tokens", "answer_tokens"),
        "pass_s": pass_s / passes if passes and pass_s is not None else None,
        "link_gb_per_s": None if (link := total(now, "link_bytes_per_second")) is None else link / 1e9,
        "kv_used_share": kv,
        "stages_idle_share": idle,
        "preempted": total(now, "num_preemptions", "preempted_answers"),
        "restarts": total(now, "engine_restarts"),
        "engine_up": total(now, "engine_up"),
    }


def alerts_of(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """List what is wrong now, by the newest sample and the oldest."""
    if not samples:
        return []
    first, last = samples[0], samples[-1]
    found = []
    if last["engine_up"] == 0:
        found.append(("engine_up", "The engine does not answer; it is started again."))
    if grown := (last["restarts"] or 0) - (first["restarts"] or 0):
        found.append(("restarts", f"The engine was started again {grown:.0f} time(s); its log says why."))
    if (last["kv_used_share"] or 0) > FULL_SHARE and last["waiting"]:
        found.append(("kv_used_share", f"Room for keys and values is full and {last['waiting']:.0f} answers wait."))
    if (grown := (last["preempted"] or 0) - (first["preempted"] or 0)) > 0:
        words = f"{grown:.0f} answer(s) lost their keys and values and began again: fewer at a time, or more room."
        found.append(("preempted", words))
    return [{"name": name, "words": words} for name, words in found]

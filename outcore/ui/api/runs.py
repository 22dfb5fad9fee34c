"""Runs as they lie on disk: list, figures as they grow, forecast beside measurement, comparison, export, deletion."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from outcore.checkpoint import list_checkpoints
from outcore.common import read_object, stats_below
from outcore.monitor import Metrics
from outcore.runs import RunState, delete, list_runs
from outcore.serve.additions import ApiError
from outcore.ui.api.children import Child, complaint_of, lines_of
from outcore.ui.api.place import Place
from outcore.ui.api.training import Training

SERIES = (
    "loss", "lr", "tokens_per_s", "step_s", "grad_norm", "gpu_mem_bytes", "ram_rss_bytes", "pinned_bytes", "gpu_temp_c",
    "nvme_temp_c", "gpu_util_pct", "gpu_power_w", "pcie_rx_gb_per_s", "pcie_tx_gb_per_s", "nvme_read_bytes",
    "nvme_write_bytes", "nvme_queue_depth",
)  # fmt: skip
"""Figures of a step that are drawn."""
RECENT_STEPS = 50
SLOW_STEPS, SLOW_SHARE = 10, 0.2
"""A rank that the others waited for through so many steps, for such a share of each, is told."""
ENDED = ("stopped", "finished")


class Runs:
    """Runs of this folder."""

    def __init__(self, place: Place, training: Training) -> None:
        self.place, self.training = place, training
        self._metrics: dict[str, Metrics] = {}
        self._exports: dict[str, Child] = {}
        self._lock = threading.Lock()

    def all(self) -> list[dict[str, Any]]:
        """The latest first. A folder in which no run has left anything is none; what was started from here and left
        nothing, as it was refused, is among them."""
        found = [self._row(run, self.training.job(run.folder.name)) for run in self._states() if self._is_run(run)]
        there = {row["name"] for row in found}
        jobs = [self.training.job(name) for name in self.training.started() if name not in there]
        found += [self._empty_row(job) for job in jobs if job["state"] != "finished"]
        return sorted(found, key=lambda row: -row["changed_at"])

    def get(self, name: str) -> dict[str, Any]:
        """One run: its state, header, last step, forecast beside what was measured, checkpoints, export."""
        job = self.training.job(name)  # asked before the files are read: of a job that has ended they are whole
        rows = [self._row(run, job) for run in self._states() if run.folder.name == name and self._is_run(run)]
        if not rows and job["state"] in ("none", ""):
            raise ApiError(404, f"There is no run {name!r}.", param="name")
        metrics = self._polled(name)
        last = metrics.steps[-1] if metrics and metrics.steps else {}
        recent = metrics.steps[-RECENT_STEPS:] if metrics else []
        usual = recent[1:] or recent  # a run's first step compiles
        return {
            **(rows[0] if rows else self._empty_row(job)),
            "job": job,
            "header": metrics.header if metrics else {},
            "last": last,
            "evals": metrics.evals if metrics else [],
            "resumed_at": metrics.resumed_at if metrics else [],
            "step_s": _mean(usual, "step_s"),  # as its phases, which would not add up to a median
            "phases": _phases(usual),
            "alerts": _alerts(recent[-SLOW_STEPS:]),
            "forecast": _forecast(metrics, recent) if metrics else [],
            "checkpoints": [self._checkpoint(path) for path in list_checkpoints(self.place.checkpoints / name)],
            "export": self._export_state(name),
        }

    def series(self, name: str, points: int = 400) -> dict[str, Any]:
        """Figures by step for graphs: at most `points` of them, means of neighbours; evaluations beside."""
        metrics = self._polled(name)
        if metrics is None:
            return {"steps": [], "series": {}, "phases": {}, "evals": [], "total_steps": None}
        groups = list(_chunks(metrics.steps, max(2, min(points, 2000))))
        series = {key: [_mean(group, key) for group in groups] for key in SERIES}
        phases = dict.fromkeys(name for step in metrics.steps for name in _phase_s(step))
        return {
            "steps": [group[-1]["step"] for group in groups],
            "phases": {name: [_mean(map(_phase_s, group), name) for group in groups] for name in phases},
            "series": {key: values for key, values in series.items() if any(v is not None for v in values)},
            "evals": [{"step": e.get("step"), "eval_loss": e.get("eval_loss")} for e in metrics.evals],
            "total_steps": metrics.total_steps,
        }

    def log(self, name: str) -> dict[str, Any]:
        """Read the lines that the run printed last, where it was started from here; else those that its plan noted."""
        path = self.training.log_of(name)
        lines = lines_of(path)
        if not lines:
            plan = read_object(self.place.logs / name / "plan.json")
            lines = [str(line) for line in plan.get("said", [])]
        return {"lines": lines[-200:]}

    def compare(self, names: Sequence[str]) -> dict[str, Any]:
        """Runs side by side: settings in which they differ, and what came of them."""
        runs = [self.get(name) for name in names]
        configs = [run["header"].get("config") or {} for run in runs]
        keys = sorted({key for config in configs for key in config})
        differing = {
            key: [config.get(key) for config in configs]
            for key in keys
            if len({json.dumps(config.get(key), sort_keys=True, default=str) for config in configs}) > 1
        }
        results = {
            "state": [run["state"] for run in runs],
            "step": [run["step"] for run in runs],
            "loss": [run["loss"] for run in runs],
            "validation loss": [run["evals"][-1].get("eval_loss") if run["evals"] else None for run in runs],
            "seconds a step": [run["step_s"] for run in runs],
        }
        return {"names": list(names), "settings": differing, "results": results}

    def delete(self, name: str) -> dict[str, Any]:
        """Remove a run's checkpoints, logs and model, and what was noted of its start. 409 while it runs."""
        job = self.training.job(name)["state"]
        state = next((run for run in self._states() if run.folder.name == name), None)
        if state is None and job == "running":
            raise ApiError(409, f"Run {name} is starting: stop it first.", param="name", code="in_use")
        if state is None and job in ("none", ""):
            raise ApiError(404, f"There is no run {name!r}.", param="name")
        if state is None:  # refused, or stopped before it left anything
            self.training.forget(name)
            return {"name": name, "deleted": True, "size_bytes": 0}
        try:
            delete(state)
        except ValueError as error:  # RunInUse
            raise ApiError(409, str(error), param="name", code="in_use") from error
        except OSError as error:
            raise ApiError(500, f"Run {name} cannot be removed whole: {error}.", param="name") from error
        self.training.forget(name)
        with self._lock:
            self._metrics.pop(name, None)
        return {"name": name, "deleted": True, "size_bytes": state.size_bytes}

    def export(self, name: str, *, merge: bool = False) -> dict[str, Any]:
        """Begin to write a run's model as a folder for from_pretrained."""
        if not list_checkpoints(self.place.checkpoints / name):
            raise ApiError(409, f"Run {name} has no checkpoint to export.", param="name")
        argv = ["export", f"--checkpoint_dir={self.place.checkpoints}", *(["--merge"] if merge else []), "--", name]
        with self._lock:
            child = self._exports.get(name)
            if child is not None and child.exit_code is None:
                raise ApiError(409, f"Run {name} is being exported already.", param="name")
            self._exports[name] = Child(argv, self.place.of("console") / f"{name}.export.log")
        return self._export_state(name) or {}

    # --- parts

    def _states(self) -> list[RunState]:
        return list_runs(self.place.checkpoints, self.place.logs, self.place.exports)

    def _is_run(self, run: RunState) -> bool:
        return run.folder.is_in_use or run.state.startswith("running")

    def _row(self, run: RunState, job: Mapping[str, Any]) -> dict[str, Any]:
        loss = run.loss if isinstance(run.loss, (int, float)) else None
        state = run.state.partition(" ")[0]
        if state in ENDED and job["state"] == "running":
            state = "ending"  # its files are whole, its process is not gone: a resume would be refused
        return {
            "name": run.folder.name,
            "state": state,
            "words": run.state,
            "step": run.step,
            "total_steps": run.total_steps,
            "loss": loss,
            "size_bytes": run.size_bytes,
            "changed_at": run.changed_s,
            "model": self._model_of(run),
        }

    def _model_of(self, run: RunState) -> str | None:
        """Choose what answers for this run: its finished model, else its newest checkpoint; None before the first."""
        if run.folder.export.is_dir():
            return str(run.folder.export)
        return str(run.folder.checkpoints) if list_checkpoints(run.folder.checkpoints) else None

    def _empty_row(self, job: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "name": job["run"],
            "state": "starting" if job["state"] == "running" else job["state"],
            "words": job["state"],
            "step": 0,
            "total_steps": None,
            "loss": None,
            "size_bytes": 0,
            "changed_at": job.get("started_at", time.time()),
            "model": None,
        }

    def _polled(self, name: str) -> Metrics | None:
        path = self.place.logs / name / "metrics.jsonl"
        with self._lock:
            metrics = self._metrics.setdefault(name, Metrics(path))
            try:
                metrics.poll()
            except FileNotFoundError:
                return None
            return metrics

    def _checkpoint(self, path: Path) -> dict[str, Any]:
        size_bytes = sum(stat.st_size for stat in stats_below(path))
        return {"path": str(path), "name": path.name, "size_bytes": size_bytes}

    def _export_state(self, name: str) -> dict[str, Any] | None:
        child = self._exports.get(name)
        if child is None:
            return None
        if child.exit_code is None:
            return {"state": "running", "message": ""}
        lines = lines_of(child.log)
        if child.exit_code == 0:
            return {"state": "finished", "message": lines[-1] if lines else ""}
        return {"state": "failed", "message": complaint_of(child.log)}


def _chunks(steps: Sequence[dict[str, Any]], points: int) -> Iterable[Sequence[dict[str, Any]]]:
    count = min(points, len(steps))
    edges = [index * len(steps) // count for index in range(count + 1)] if count else [0]
    return (steps[a:b] for a, b in pairwise(edges))


def _numbers(steps: Iterable[dict[str, Any]], key: str) -> list[float]:
    values = (step.get(key) for step in steps)
    return [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool) and v == v and abs(v) < 1e300]


def _mean(steps: Iterable[dict[str, Any]], key: str) -> float | None:
    found = _numbers(steps, key)
    return sum(found) / len(found) if found else None


def _median(steps: Iterable[dict[str, Any]], key: str) -> float | None:
    found = _numbers(steps, key)
    return statistics.median(found) if found else None


def _phase_s(step: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a step by phase; {} where the engine does not say."""
    return step.get("phase_s") or {}


def _phases(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Seconds of a recent step by what was done or waited for."""
    names = dict.fromkeys(name for step in steps for name in _phase_s(step))
    found = {name: _mean(map(_phase_s, steps), name) for name in names}
    return {name: seconds for name, seconds in found.items() if seconds}


def _alerts(steps: Sequence[dict[str, Any]]) -> list[str]:
    """Words for GPUs that hold up all others."""
    whole_s = _mean(steps, "step_s")
    if len(steps) < SLOW_STEPS or not whole_s:
        return []
    shares = {n.removeprefix("waited_rank_"): s / whole_s for n, s in _phases(steps).items() if n.startswith("waited_")}
    return [
        f"GPU {rank} is slow: GPU 0 waited for it through {share:.0%} of the last {len(steps)} steps. Look at its "
        "clock, temperature and link, and at what else runs there."
        for rank, share in shares.items()
        if share > SLOW_SHARE
    ]


def _forecast(metrics: Metrics, recent: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """(what, forecast, measured) of the figures that both have."""
    plan = (metrics.header.get("plan") or {}).get("forecast") or {}
    steps = metrics.steps
    measured = {
        "step_s": _median(recent[1:] or recent, "step_s"),
        "vram_bytes": max(_numbers(steps, "gpu_mem_peak_bytes"), default=None),
        "rss_bytes": max(_numbers(steps, "ram_rss_bytes"), default=None),
        "drive_read_bytes_per_step": _median(recent, "nvme_read_bytes"),
        "drive_written_bytes_per_step": _median(recent, "nvme_write_bytes"),
    }
    return [{"what": key, "forecast": plan.get(key), "measured": value} for key, value in measured.items()]

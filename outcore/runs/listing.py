"""`outcore runs`: every run with its state, step, loss and size; `outcore runs delete NAME`, after a question."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.common import stats_below
from outcore.common.output import tell_error
from outcore.common.quantities import format_gb
from outcore.config.commands import runs_flags
from outcore.runs.folder import RunFolder
from outcore.runs.lock import RunInUse, RunLock, holder_of, lock_path

TAIL_BYTES = 256 << 10
"""Tail of metrics.jsonl in which its last step is looked for: a line takes about 1 KiB."""


@dataclass(frozen=True)
class RunState:
    """One run as it lies on disk."""

    folder: RunFolder
    state: str
    """running, finished, stopped, or new (no step yet)."""
    step: int
    total_steps: int | None
    loss: float | None
    size_bytes: int
    changed_s: float
    """When something was last written, or a run without files began; seconds since the epoch."""

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of the table."""
        steps = f"{self.step}" + (f"/{self.total_steps}" if self.total_steps else "")
        loss = "-" if self.loss is None else f"{self.loss:.3f}"
        return self.folder.name, self.state, steps, loss, format_gb(self.size_bytes)


def list_runs(checkpoints: Path, logs: Path, exports: Path) -> list[RunState]:
    """All runs that left something in these folders, the latest first. Cost: a stat of every file."""
    names = {
        path.name
        for root in (checkpoints, logs)
        for path in (root.iterdir() if root.is_dir() else ())
        if path.is_dir() and not path.name.startswith(".") and (root == checkpoints or _is_of_a_run(path))
    }
    found = [_state_of(RunFolder(name, checkpoints / name, logs / name, exports / name)) for name in names]
    return sorted(found, key=lambda run: run.changed_s, reverse=True)


def _is_of_a_run(folder: Path) -> bool:
    """False for what else lives among the logs: those of servers, of evaluations."""
    return any((folder / name).is_file() for name in ("metrics.jsonl", "plan.json"))


def _state_of(folder: RunFolder) -> RunState:
    # Asked before the files are read: what a run that has ended wrote last is in them then.
    holder = holder_of(lock_path(folder.checkpoints.parent, folder.name))
    stats = [stat for root in _folders(folder) for stat in stats_below(root)]
    header, last = _ends_of(folder.metrics)
    total = (header.get("plan") or {}).get("total_steps")
    step = int(last.get("step", 0))
    if holder is not None:
        state = f"running (process {holder.get('pid', '?')} on {holder.get('host', '?')})"
    elif not step:
        state = "new"
    else:
        is_finished = folder.export.exists() or (total is not None and step >= total)
        state = "finished" if is_finished else "stopped"
    began_s = (holder or {}).get("since_s")  # a run that starts has no file yet
    times_s = [began_s if isinstance(began_s, float) else 0.0, *(stat.st_mtime for stat in stats)]
    return RunState(folder, state, step, total, last.get("loss"), sum(stat.st_size for stat in stats), max(times_s))


def _folders(folder: RunFolder) -> tuple[Path, ...]:
    return folder.checkpoints, folder.logs, folder.export


def _ends_of(metrics: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(header of the latest process, last step) of metrics.jsonl; {} for what is not there or torn."""
    if not metrics.is_file():
        return {}, {}
    with open(metrics, "rb") as file:
        header = _parsed(file.readline())
        file.seek(max(0, metrics.stat().st_size - TAIL_BYTES))
        lines = [_parsed(line) for line in file.read().splitlines()]
    resumed = next((line["header"] for line in reversed(lines) if line.get("event") == "resume"), header)
    return resumed, next((line for line in reversed(lines) if "loss" in line and "event" not in line), {})


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def delete(run: RunState) -> None:
    """Remove a run's checkpoints, logs and exported model. RunInUse while a process writes it."""
    parents = {path.parent for path in _folders(run.folder) if path.parent.is_dir()}
    lock = RunLock.take(run.folder.name, parents)
    try:
        for path in _folders(run.folder):
            if path.is_dir():
                shutil.rmtree(path)
    finally:
        lock.release()


def main(argv: list[str] | None = None) -> int:
    """The subcommand; returns its exit code."""
    args = runs_flags().parse_args(argv)
    runs = list_runs(args.checkpoint_dir, args.log_dir, args.export_dir)
    if args.what == "list":
        _show(runs, args.checkpoint_dir)
        return 0
    by_name = {run.folder.name: run for run in runs}
    unknown = [name for name in args.names if name not in by_name]
    if unknown or not args.names:
        there = ", ".join(by_name) or "none"
        what = f"no run {unknown[0]!r}" if unknown else "name the runs to delete"
        print(f"outcore runs: {what}. Runs here: {there}.", file=sys.stderr)
        return 2
    return max(_delete(by_name[name], asked=not args.yes) for name in args.names)


def _delete(run: RunState, *, asked: bool) -> int:
    name, size = run.folder.name, format_gb(run.size_bytes)
    if asked:
        if not sys.stdin.isatty():
            print("outcore runs: nobody can be asked here: add --yes to delete.", file=sys.stderr)
            return 2
        there = ", ".join(str(path) for path in _folders(run.folder) if path.is_dir())
        if input(f"Delete run {name} ({run.state}, {size}: {there})? [y/N] ").strip().lower() not in ("y", "yes"):
            print(f"kept {name}")
            return 0
    try:
        delete(run)
    except (RunInUse, OSError) as error:
        return tell_error("runs", error)
    print(f"deleted {name} ({size})")
    return 0


def _show(runs: list[RunState], checkpoints: Path) -> None:
    if not runs:
        print(f"no runs here ({checkpoints.absolute()}): start one with outcore train")
        return
    rows = [("run", "state", "step", "loss", "size"), *(run.row for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

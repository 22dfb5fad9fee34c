"""`outcore watch [RUN]`: a live terminal view of a running or finished run, from its metrics.jsonl only.

It reads what was appended once a second and redraws; the run itself is not touched, so it may be on another machine's
shared folder. `--once` (and any output that is no terminal) prints a single frame."""

from __future__ import annotations

import io
import sys
import time
from pathlib import Path
from typing import IO

from outcore.common.output import tell_error
from outcore.config.commands import watch_flags
from outcore.monitor.metrics import Metrics
from outcore.monitor.screen.frame import RunFrame

METRICS_NAME = "metrics.jsonl"
POLL_S = 1.0


def watch(run_dir: Path | str, *, once: bool = False, width: int | None = None, file: IO[str] | None = None) -> None:
    """Show the run until Ctrl-C, or once.

    Args:
        run_dir: the run's log folder (with metrics.jsonl) or that file.
        once: print one frame and return; so does an output that is no terminal.
        width: columns; default: the terminal's.
        file: where to; default: stdout.

    Raises:
        FileNotFoundError: no metrics.jsonl there."""
    from rich.console import Console
    from rich.live import Live

    path = Path(run_dir)
    path = path if path.name.endswith(".jsonl") else path / METRICS_NAME
    metrics = Metrics(path)
    metrics.poll()
    console = Console(file=file or sys.stdout, width=width, highlight=False)

    def frame() -> RunFrame:
        metrics.poll()
        return RunFrame(metrics, path.absolute().parent.name, max(0.0, time.time() - path.stat().st_mtime))

    if once or not console.is_terminal:
        console.print(frame().render(console.width))
        return
    with Live(frame().render(console.width), console=console, auto_refresh=False, screen=True) as live:
        try:
            while True:
                live.update(frame().render(console.width), refresh=True)
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            return


def find_run(run: str | None, logs: Path | str = "logs") -> Path:
    """The log folder of a run given by name or path; without one, the run that was written to last.

    Raises:
        ValueError: no such run; the message lists those there are."""
    logs = Path(logs)
    runs = sorted(logs.glob(f"*/{METRICS_NAME}"), key=lambda path: path.stat().st_mtime, reverse=True)
    if run is None:
        if not runs:
            raise ValueError(f"There is no run under {logs.absolute()} yet: start one with train_model.py.")
        return runs[0].parent
    for candidate in (Path(run), logs / run, logs / Path(run).name):  # the last: of another folder of the run
        if candidate.is_file() or (candidate / METRICS_NAME).is_file():
            return candidate
    there = ", ".join(path.parent.name for path in runs[:10]) or "none"
    raise ValueError(f"No run {run!r}: neither {run} nor {logs / run} has a {METRICS_NAME}. Runs there: {there}.")


def main(argv: list[str] | None = None) -> int:
    """The subcommand; returns its exit code."""
    args = watch_flags().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a pipe that knows no block characters gets question marks
    try:
        watch(find_run(args.run, args.log_dir), once=args.once)
    except ValueError as error:
        return tell_error("watch", error)
    return 0

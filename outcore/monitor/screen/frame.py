"""RunFrame: one picture of a run for the terminal, made from metrics.jsonl only.

Loss as a sparkline, speed and where the time of a step goes, how full each tier is, the links against their measured
limits, temperatures, time left. Rows without data are left out; everything fits the width it is given.

`outcore watch [RUN]`: a live terminal view of a running or finished run, from its metrics.jsonl only.

It reads what was appended once a second and redraws; the run itself is not touched, so it may be on another machine's
shared folder. `--once` (and any output that is no terminal) prints a single frame."""

from __future__ import annotations

import io
import math
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outcore.common.output import tell_error
from outcore.common.quantities import GB, format_count, format_gb, format_s
from outcore.common.words import own_command
from outcore.config.commands import watch_flags
from outcore.monitor.metrics import Metrics, numbers
from outcore.monitor.metrics.reader import smooth
from outcore.monitor.screen.live import bar
from outcore.monitor.screen.progress import tiers_of

RECENT_STEPS = 50
_SPARKS = "▁▂▃▄▅▆▇█"
_BAR_CELLS = 24


class RunFrame:
    """Draws the present state of `metrics`.

    Args:
        metrics: the run's lines.
        name: the run's name.
        idle_s: seconds since the file was last written."""

    def __init__(self, metrics: Metrics, name: str, idle_s: float) -> None:
        self._metrics = metrics
        self._name = name
        self._idle_s = idle_s
        self._recent = metrics.steps[-RECENT_STEPS:]
        self._last: dict[str, Any] = metrics.steps[-1] if metrics.steps else {}
        self._limits: dict[str, Any] = metrics.machine

    def render(self, width: int) -> RenderableType:
        """The frame for `width` columns."""
        inner = max(20, width - 4)
        if not self._last:
            return Panel(Text("no step is finished yet", style="dim"), title=self._name, width=width)
        parts: list[RenderableType] = [self._progress_line(inner), self._loss(inner), self._rows(inner)]
        return Panel(Group(*parts), title=Text(self._title()), title_align="left", width=width)

    def state(self) -> str:
        """'finished', 'running', or 'no new step for ...' when it should have had one."""
        total = self._metrics.total_steps
        if total is not None and self._last.get("step", 0) >= total:
            return "finished"
        if self._idle_s > max(60.0, 5 * (self.step_s() or 0.0)):
            return f"no new step for {format_s(self._idle_s)}: stopped, or saving"
        return "running"

    def step_s(self) -> float | None:
        """Median seconds per step of late."""
        known = self._of_late("step_s")
        return statistics.median(known) if known else None

    def _of_late(self, field: str) -> list[float]:
        return [value for _, value in numbers(self._recent, field)]

    def time_left_s(self) -> float | None:
        total, step_s = self._metrics.total_steps, self.step_s()
        return None if total is None or step_s is None else max(0, total - self._last["step"]) * step_s

    def _title(self) -> str:
        return " · ".join(part for part in (self._name, self._metrics.model_name, self.state()) if part)

    def _progress_line(self, width: int) -> Text:
        total, left_s = self._metrics.total_steps, self.time_left_s()
        head = f"step {self._last['step']:,}" + ("" if total is None else f" of {total:,}")
        tail = "" if left_s is None or self.state() == "finished" else f"  {format_s(left_s)} left"
        cells = width - len(head) - len(tail) - 1
        if total is None or cells < 8:
            return Text((head + tail)[:width], no_wrap=True)
        return Text.assemble((head + " ", "bold"), bar(self._last["step"] / total, cells), tail, no_wrap=True)

    def _loss(self, width: int) -> RenderableType:
        losses = [loss for _, loss in numbers(self._metrics.steps, "loss")]
        finite = [loss for loss in losses if math.isfinite(loss)]
        if not finite:
            return Text("loss: none that is finite", style="red")
        smoothed = [loss for loss in smooth(losses, max(1, len(losses) // 40)) if math.isfinite(loss)]
        text = f"loss {smoothed[0]:.3f} → {smoothed[-1]:.3f}"
        for step, loss in numbers(self._metrics.evals, "eval_loss")[-1:]:
            text += f"   evaluation {loss:.3f} at step {step:,}"
        if len(finite) < len(losses):
            text += f"   not finite: {len(losses) - len(finite)} steps"
        spark = Text(sparkline(smoothed, width), style="cyan", no_wrap=True)
        return Group(Text(text[:width], style="bold", no_wrap=True), spark)

    def _rows(self, width: int) -> Table:
        table = Table.grid(padding=(0, 1))
        table.add_column(style="dim", no_wrap=True)
        table.add_column(no_wrap=True, overflow="ellipsis", max_width=width - 10)
        for name, value in self._named_rows(width):
            table.add_row(name, value)
        return table

    def _named_rows(self, width: int) -> list[tuple[str, Text]]:
        cells = min(_BAR_CELLS, max(6, width // 4))
        rows = [("speed", Text(self._speed())), *self._phase_rows(cells)]
        for tier in tiers_of(self._last, self._limits):
            rows.append((tier.name, _bar_and_words(tier.fill, tier.words.removeprefix(tier.name + " "), cells)))
        rows += self._link_rows(cells)
        machine = self._machine_words()
        if machine:
            rows.append(("machine", Text(machine)))
        return [(name, text) for name, text in rows if text.plain]

    def _speed(self) -> str:
        words = []
        rates = self._of_late("tokens_per_s")
        if rates:
            words.append(f"{format_count(statistics.median(rates))} tokens/s")
        step_s = self.step_s()
        if step_s is not None:
            words.append(f"{format_s(step_s)} per step")
        if isinstance(self._last.get("tokens"), int):
            words.append(f"{format_count(self._last['tokens'])} tokens seen")
        if isinstance(self._last.get("lr"), float):
            words.append(f"lr {self._last['lr']:.3g}")
        return ", ".join(words)

    def _phase_rows(self, cells: int) -> list[tuple[str, Text]]:
        """Rows that tell where the time of the recent steps went, as shares."""
        total_s = sum(step.get("step_s") or 0.0 for step in self._recent)
        sums: dict[str, float] = {}
        for step in self._recent:
            for phase, spent_s in (step.get("phase_s") or {}).items():
                if isinstance(spent_s, (int, float)) and math.isfinite(spent_s):
                    sums[phase] = sums.get(phase, 0.0) + spent_s
        if not total_s:
            return []
        shares = {phase: spent_s / total_s for phase, spent_s in sums.items() if spent_s / total_s >= 0.005}
        return [(phase, _bar_and_words(share, f"{share * 100:.0f} %", cells)) for phase, share in shares.items()]

    def _link_rows(self, cells: int) -> list[tuple[str, Text]]:
        links = self._metrics.machine.get("links") or {}
        seconds = sum(step.get("step_s") or 0.0 for step in self._recent)
        rows = []
        for name, field, limit in (
            ("PCIe in", "pcie_rx_gb_per_s", "h2d_gb_per_s"),
            ("PCIe out", "pcie_tx_gb_per_s", "d2h_gb_per_s"),
            ("reads", "nvme_read_bytes", "drive_read_gb_per_s"),
            ("writes", "nvme_write_bytes", "drive_write_gb_per_s"),
        ):
            found, is_drive = self._of_late(field), field.endswith("_bytes")
            if found and (seconds or not is_drive):
                rate = sum(found) / seconds / GB if is_drive else sum(found) / len(found)
                rows.append((name, _rate(rate, links.get(limit), cells).append(" (drive)" if is_drive else "")))
        return rows

    def _machine_words(self) -> str:
        last = self._last
        words = []
        for field, form in (
            ("gpu_util_pct", "GPU {:.0f} %"),
            ("gpu_temp_c", "{:.0f} °C"),
            ("gpu_power_w", "{:.0f} W"),
            ("nvme_temp_c", "drive {:.0f} °C"),
        ):
            if isinstance(last.get(field), (int, float)):
                words.append(form.format(last[field]))
        if last.get("throttle"):
            words.append("throttled: " + ", ".join(last["throttle"]))
        written = sum(step.get("nvme_write_bytes") or 0 for step in self._metrics.steps)
        if written:
            words.append(f"{format_gb(written)} written in this run")
        return ", ".join(words)


def sparkline(values: list[float], width: int) -> str:
    """`values` as at most `width` block characters, each the mean of its share of the values."""
    count = min(width, len(values))
    if count == 0:
        return ""
    edges = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return _SPARKS[0] * count
    return "".join(_SPARKS[min(7, int((mean - low) / (high - low) * 8))] for mean in means)


def _rate(gb_per_s: float, limit_gb_per_s: float | None, cells: int) -> Text:
    if not limit_gb_per_s:
        return _bar_and_words(None, f"{gb_per_s:.2f} GB/s", cells)
    return _bar_and_words(gb_per_s / limit_gb_per_s, f"{gb_per_s:.2f} of {limit_gb_per_s:.1f} GB/s", cells)


def _bar_and_words(fill: float | None, words: str, cells: int) -> Text:
    text = Text(" " * cells) if fill is None else bar(fill, cells, "red" if fill > 0.95 else "cyan")
    return Text.assemble(text, " " + words)


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
            raise ValueError(f"There is no run under {logs.absolute()} yet: start one with {own_command('train')}.")
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

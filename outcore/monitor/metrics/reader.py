"""Metrics: reads metrics.jsonl, whole or as it grows, and forgives what a killed run leaves behind.

`poll()` reads only what was appended since the last call; a file that was replaced or cut (a resumed run) is read again
from its start. Torn and damaged lines are skipped and counted. Cost: one pass over the bytes; records stay in memory.

plot_loss: loss.png from metrics.jsonl, readable at first glance.

Training loss raw (faint) and smoothed (bold), evaluation loss as marked points, the learning rate in a small strip
below; resumes are marked. Drawn with matplotlib without pyplot, so it needs no
display, touches no global state and may run on any thread; written aside and renamed, so a viewer never sees half a
picture. Cost: about 0.5 s."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from outcore.common import replacing
from outcore.monitor.metrics.log import parse_line


def numbers(records: Iterable[dict[str, Any]], key: str) -> list[tuple[int, float]]:
    """(step, figure) of the records in which `key` is a figure."""
    return [(record.get("step", 0), record[key]) for record in records if isinstance(record.get(key), (int, float))]


class Metrics:
    """The lines of one metrics.jsonl by kind.

    Raises (by `poll`):
        FileNotFoundError: no such file; the message says where it was sought."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._clear()

    def _clear(self) -> None:
        self.header: dict[str, Any] = {}
        """The newest header: line 0, updated by what resumed processes wrote."""
        self.steps: list[dict[str, Any]] = []
        """Lines by rising step, each step once."""
        self.evals: list[dict[str, Any]] = []
        self.resumed_at: list[int] = []
        """Steps after which a later process went on."""
        self.num_damaged = 0
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    @property
    def total_steps(self) -> int | None:
        """The last step of the run, from the header (top level or its plan)."""
        plan = self.header.get("plan")
        total = self.header.get("total_steps") or (plan.get("total_steps") if isinstance(plan, dict) else None)
        return total if isinstance(total, int) and total > 0 else None

    @property
    def machine(self) -> dict[str, Any]:
        """The header's machine: sizes of the tiers (`Sampler.describe()`), `links` where they were measured."""
        machine = self.header.get("machine")
        return machine if isinstance(machine, dict) else {}

    @property
    def model_name(self) -> str | None:
        """The model in words."""
        model = self.header.get("model")
        if isinstance(model, dict):
            model = model.get("name") or model.get("words")
        return None if model is None else str(model)

    def poll(self) -> bool:
        """Read what is new; True if anything was."""
        try:
            file = open(self.path, "rb")  # noqa: SIM115  (the error text below must not hide others in a with block)
        except FileNotFoundError:
            raise FileNotFoundError(
                f"{self.path} does not exist: the run has not written a step yet, or it is another run's folder."
            ) from None
        with file:
            status = os.fstat(file.fileno())
            identity = (status.st_dev, status.st_ino)
            changed = False
            if self._identity != identity or status.st_size < self._offset:
                changed = self._identity is not None
                self._clear()
                self._identity = identity
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # being written, or torn: looked at again at the next poll
                self._offset += len(line)
                changed = True
                self._add(line)
        return changed

    def _add(self, line: bytes) -> None:
        record = parse_line(line)
        if record is None or not restore_nonfinite(record):
            self.num_damaged += 1
            return
        event = record.get("event")
        if event == "header":
            self.header = record
        elif event == "resume":
            self.header = {**self.header, **(record.get("header") or {})}
            self.resumed_at.append(record.get("step", 0))
        elif event == "eval":
            self.evals = [old for old in self.evals if old.get("step") != record.get("step")] + [record]
        elif event is None:
            # A resumed run writes its steps anew; what was there of them and after is history.
            while self.steps and self.steps[-1]["step"] >= record["step"]:
                self.steps.pop()
            self.steps.append(record)


def read_metrics(path: Path | str) -> Metrics:
    """The whole file as it is now.

    Raises:
        FileNotFoundError: no such file."""
    metrics = Metrics(path)
    metrics.poll()
    return metrics


def restore_nonfinite(record: dict[str, Any]) -> bool:
    """Put NaN and infinities named in "nonfinite" back into the record, in place; False where a name is not there."""
    for name, text in (record.pop("nonfinite", None) or {}).items():
        target: Any = record
        *parents, last = name.split(".")
        try:
            for parent in parents:
                target = target[int(parent)] if isinstance(target, list) else target[parent]
            target[int(last) if isinstance(target, list) else last] = float(text)
        except (KeyError, IndexError, ValueError, TypeError):
            return False
    return True


FONTS = (
    "DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK KR", "Source Han Sans SC",
    "Droid Sans Fallback", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic",
    "PingFang SC",
)  # fmt: skip
"""Fonts of the title, where they are installed: matplotlib's own first, which has no Chinese, Japanese or Korean."""
RAW_COLOUR, SMOOTH_COLOUR, EVAL_COLOUR, RATE_COLOUR = "#9ec5f4", "#1f5fbf", "#d9480f", "#868e96"


def plot_loss(metrics_path: Path | str, png_path: Path | str, *, title: str | None = None) -> bool:
    """Draw the run's loss.

    Args:
        metrics_path: metrics.jsonl.
        png_path: the picture; replaced atomically.
        title: default: the header's run and model.

    Returns:
        False where there is nothing to draw yet (no step has a loss); then no file is written.

    Raises:
        FileNotFoundError: no metrics.jsonl.
        OSError: the picture cannot be written."""
    metrics = read_metrics(metrics_path)
    points = numbers(metrics.steps, "loss")
    if not points:
        return False
    figure = _draw(metrics, points, title or _title(metrics))
    png_path = Path(png_path)
    png_path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(png_path) as file:
        figure.savefig(file, format="png", dpi=110)
    return True


def smooth(losses: list[float], span: int) -> list[float]:
    """Centred mean over `span` points of the running median of 5, so neither lag nor single spikes show. Values that
    are not finite are skipped; beyond its ends the run counts as its first and its last values."""
    import numpy as np

    values = np.array(losses, dtype=float)
    finite = np.isfinite(values)
    if finite.any():
        medians = np.median(np.lib.stride_tricks.sliding_window_view(np.pad(values[finite], 2, "edge"), 5), axis=1)
        half = min(span, len(medians)) // 2
        values[finite] = np.convolve(np.pad(medians, half, "edge"), np.full(2 * half + 1, 1 / (2 * half + 1)), "valid")
    return [value if is_finite else math.nan for value, is_finite in zip(values.tolist(), finite, strict=True)]


def _draw(metrics: Metrics, points: list[tuple[int, float]], title: str) -> Any:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, StrMethodFormatter

    figure = Figure(figsize=(9, 5.4), layout="constrained")
    rates = numbers(metrics.steps, "lr")
    axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=[6, 1]) if rates else (figure.subplots(), None)
    steps, losses = [step for step, _ in points], [loss for _, loss in points]
    smoothed = smooth(losses, max(5, len(losses) // 40))
    dots: dict[str, Any] = {"marker": "o", "markersize": 4} if len(points) < 30 else {}
    axes.plot(steps, losses, color=RAW_COLOUR, linewidth=1.0, label="training loss", **dots)
    if len(points) >= 10:
        axes.plot(steps, smoothed, color=SMOOTH_COLOUR, linewidth=2.2, label="smoothed")
    evals = sorted(dict(numbers([*metrics.evals, *metrics.steps], "eval_loss")).items())
    if evals:
        xs, ys = zip(*evals, strict=True)
        axes.plot(
            xs, ys, color=EVAL_COLOUR, marker="D", markersize=6, linewidth=1.2, markeredgecolor="white",
            label="evaluation loss", zorder=5,
        )  # fmt: skip
    finite = sorted(filter(math.isfinite, losses))
    shown = [*smoothed[1:], *(loss for _, loss in evals), *finite[: int(len(finite) * 0.99) + 1]]
    if shown := list(filter(math.isfinite, shown)):  # the highest 1 % of losses, spikes, may leave the picture
        axes.set_ylim(top=max(shown) + 0.06 * (max(shown) - min(shown)) + 1e-3)
    for number, step in enumerate(sorted(set(metrics.resumed_at))):
        label = "resumed" if number == 0 else None
        axes.axvline(step + 0.5, color="#adb5bd", linestyle=":", linewidth=1.2, label=label, zorder=1)
    words, fonts = _drawable(f"{title}\n{_summary(losses, smoothed, evals)}")
    axes.set_title(words, loc="left", fontsize=11, family=fonts, parse_math=False)
    axes.set_ylabel("loss (nats per token)")
    axes.grid(True, color="#e9ecef")
    axes.legend(loc="upper right", frameon=True, framealpha=0.9, edgecolor="none")
    bottom = axes
    if rate_axes is not None:
        rate_axes.plot(*zip(*rates, strict=True), color=RATE_COLOUR, linewidth=1.5)
        rate_axes.set_ylabel("learning\nrate", fontsize=9, color="#495057")
        rate_axes.set_ylim(bottom=0)
        rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        rate_axes.tick_params(axis="y", labelsize=8)
        rate_axes.grid(True, color="#e9ecef")
        bottom = rate_axes
    bottom.set_xlabel("optimizer step")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    bottom.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for each in figure.axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure


def _drawable(text: str) -> tuple[str, list[str]]:
    """The text with a box for every letter that no installed font has, and the fonts to draw it with."""
    from matplotlib.font_manager import findfont, fontManager, get_font

    installed = fontManager.get_font_names()
    fonts = [name for name in FONTS if name in installed]
    known = {ord("\n")}.union(*(get_font(findfont(name)).get_charmap() for name in fonts))
    return "".join(letter if ord(letter) in known else "□" for letter in text), fonts


def _title(metrics: Metrics) -> str:
    parts = [metrics.header.get("run"), metrics.model_name]
    return " · ".join(str(part) for part in parts if part) or "Training loss"


def _summary(losses: list[float], smoothed: list[float], evals: list[tuple[int, float]]) -> str:
    finite = [loss for loss in losses if math.isfinite(loss)]
    if not finite:
        return "no finite loss yet"
    last = smoothed[-1] if len(losses) >= 10 else finite[-1]
    text = f"training loss {finite[0]:.3f} → {last:.3f}"
    finite_evals = [(step, loss) for step, loss in evals if math.isfinite(loss)]
    if finite_evals:
        step, best = min(finite_evals, key=lambda item: item[1])
        text += f",  best evaluation {best:.3f} at step {step} (perplexity {math.exp(min(best, 700)):.4g})"
    return text

"""Progress: a live two-line display on a terminal, plain lines everywhere else.

On a terminal rich redraws it once a second on its own thread (about 2 ms each) and lets other output scroll above it.
In a file, a pipe or a service log one plain line appears every N steps or seconds, also within a long step, without
colour codes or carriage returns. Fields that do not fit the width are left out, the less important first.

Memory tiers (VRAM, RAM, pinned, drive) in words and as fill fractions, from one metrics line and the run's sizes."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from outcore.common.classes import Closing
from outcore.common.output import printable
from outcore.common.quantities import GIB, format_count, format_gb, format_s


@dataclass(frozen=True)
class Tier:
    """One tier as shown: `fill` is None where its size is not known."""

    name: str
    words: str
    fill: float | None


def tiers_of(record: dict[str, Any], limits: dict[str, Any]) -> list[Tier]:
    """The tiers that the line tells of.

    Args:
        record: a metrics.jsonl line (a Sampler snapshot is one).
        limits: gpu_mem_total_bytes, ram_total_bytes, nvme_total_bytes where known (`Sampler.describe()`)."""
    tiers = []
    vram_bytes = _first(record, "gpu_mem_bytes", "gpu_mem_peak_bytes")
    if vram_bytes is not None:
        tiers.append(_memory("VRAM", vram_bytes, limits.get("gpu_mem_total_bytes")))
    ram_total_bytes = limits.get("ram_total_bytes")
    available_bytes = record.get("ram_available_bytes")
    if ram_total_bytes and available_bytes is not None:
        tiers.append(_memory("RAM", ram_total_bytes - available_bytes, ram_total_bytes))
    elif record.get("ram_rss_bytes") is not None:
        tiers.append(_memory("RAM", record["ram_rss_bytes"], ram_total_bytes))
    if record.get("pinned_bytes"):
        tiers.append(_memory("pinned", record["pinned_bytes"], limits.get("pinned_capacity_bytes")))
    free_bytes = record.get("nvme_free_bytes")
    if free_bytes is not None:
        total_bytes = limits.get("nvme_total_bytes")
        fill = None if not total_bytes else min(1.0, max(0.0, 1 - free_bytes / total_bytes))
        tiers.append(Tier("drive", f"drive {format_gb(free_bytes)} free", fill))
    return tiers


def tier_words(record: dict[str, Any], limits: dict[str, Any]) -> list[str]:
    """`tiers_of` in words, e.g. ["VRAM 6.1/8.0 GiB", "RAM 41.0/62.7 GiB", "drive 312.00 GB free"]."""
    return [tier.words for tier in tiers_of(record, limits)]


def _memory(name: str, used_bytes: int, total_bytes: int | None) -> Tier:
    if not total_bytes:
        return Tier(name, f"{name} {used_bytes / GIB:.1f} GiB", None)
    fill = min(1.0, max(0.0, used_bytes / total_bytes))
    return Tier(name, f"{name} {used_bytes / GIB:.1f}/{total_bytes / GIB:.1f} GiB", fill)


def _first(record: dict[str, Any], *names: str) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)


SPEED_WINDOW_STEPS = 50
"""Steps over which the speed is averaged: their median, so that a single slow step does not count."""


class RunProgress(Closing):
    """Shows how the run goes.

    Args:
        total_steps: last step of the run; None when it is not known.
        first_step: the step after which this process goes on (0, or the resumed step).
        file: where to write, live if it is a terminal; default stderr, so that stdout stays clean for pipes.
        plain_every_steps, plain_every_s: steps and seconds after which a plain line is due, whichever comes first;
            the first and the last step always get one.
        limits: sizes of the tiers by name (gpu_mem_total_bytes, ram_total_bytes, nvme_total_bytes), as
            `Sampler.describe()` gives them.
        enabled: False shows nothing at all (ranks other than 0).
        doing: what a step is at now, asked for while the first one, or a long one, is waited for."""

    def __init__(
        self,
        total_steps: int | None,
        *,
        first_step: int = 0,
        file: IO[str] | None = None,
        plain_every_steps: int | None = None,
        plain_every_s: float = 30.0,
        limits: dict[str, Any] | None = None,
        enabled: bool = True,
        doing: Callable[[], str] = lambda: "",
    ) -> None:
        self.total_steps = total_steps
        self.first_step = first_step
        self.limits = dict(limits or {})
        self._file = sys.stderr if file is None else file
        self._enabled, self._doing = enabled, doing
        self._every_steps = plain_every_steps
        self._every_s = plain_every_s
        self._record: dict[str, Any] = {}
        self._shown_step: int | None = None
        self._shown_at_s = -math.inf
        self._started_at_s = self._updated_at_s = time.monotonic()
        self._step_s: deque[float] = deque(maxlen=SPEED_WINDOW_STEPS)
        self._steps_seen = 0
        self._between_s = 0.0  # evaluations, samples and checkpoints so far
        self._activity = ""
        self._live: Any = None
        self._closed = threading.Event()
        self._printed_at_s = self._started_at_s
        if enabled and self._is_terminal():
            from outcore.monitor.screen.live import LiveDisplay

            self._live = LiveDisplay(self, self._file)
        elif enabled and plain_every_s > 0:
            threading.Thread(target=self._pulse, name="progress", daemon=True).start()

    def update(self, record: dict[str, Any]) -> None:
        """Show a finished step; `record` is its metrics line (needs "step"; the rest as far as known)."""
        now_s = time.monotonic()
        step_s = record.get("step_s") or now_s - self._updated_at_s
        self._step_s.append(step_s)
        if self._steps_seen:
            self._between_s += max(0.0, now_s - self._updated_at_s - step_s)
        self._steps_seen += 1
        self._record = record
        self._updated_at_s = now_s
        self._activity = ""
        if not self._enabled:
            return
        if self._live is None and self._is_due(record["step"], now_s):
            self._show_plain(now_s)

    def activity(self, words: str) -> None:
        """Show what goes on between steps, e.g. "saving step 200"; ends with the next update."""
        self._activity = words
        if not self._enabled or not words:
            return
        if self._live is None:
            self._print(words)

    def message(self, text: str) -> None:
        """A line that stays: above the live display, or on its own."""
        if not self._enabled:
            return
        if self._live is not None:
            self._live.print(printable(text))
        else:
            self._print(printable(text))

    def close(self) -> None:
        """Show the last step if it was not, and give the terminal back."""
        self._closed.set()
        if self._live is not None:
            live, self._live = self._live, None
            live.close()
        elif self._enabled and self._record and self._shown_step != self._record["step"]:
            self._show_plain(time.monotonic())
        self._enabled = False

    def step_s(self) -> float | None:
        """Median seconds per step of late."""
        return sorted(self._step_s)[len(self._step_s) // 2] if self._step_s else None

    def time_left_s(self) -> float | None:
        """Seconds to the last step at the present speed, with as much between steps as so far; None before the first
        step or without a last one."""
        step_s = self.step_s()
        if step_s is None or self.total_steps is None or not self._record:
            return None
        return max(0, self.total_steps - self._record["step"]) * (step_s + self._between_s / self._steps_seen)

    def fraction_done(self) -> float:
        """0 to 1 of the whole run, earlier processes' steps included; 0 without a last step."""
        if not self.total_steps:
            return 0.0
        return min(1.0, self._record.get("step", self.first_step) / self.total_steps)

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_at_s

    def words(self) -> list[str]:
        """The state in short phrases, the most important first."""
        record = self._record
        if not record:
            return [self._activity or self._next_step(self.first_step)]
        total = "" if self.total_steps is None else f"/{self.total_steps}"
        words = [f"step {record['step']}{total}"]
        if record.get("loss") is not None:
            words.append(f"loss {_number(record['loss'], 4)}")
        elif record.get("nonfinite", {}).get("loss"):
            words.append(f"loss {record['nonfinite']['loss']}")
        words += record.get("told", ())
        if record.get("tokens_per_s") is not None:
            words.append(f"{format_count(record['tokens_per_s'])} tok/s{_loss_share(record)}")
        left_s = self.time_left_s()
        if left_s:
            words.append(f"{format_s(left_s)} left")
        if record.get("lr") is not None:
            words.append(f"lr {record['lr']:.3g}")
        if record.get("grad_norm") is not None:
            words.append(f"grad norm {_number(record['grad_norm'], 3)}")
        if self._activity:
            words.insert(1, self._activity)
        return words

    def tier_words(self) -> list[str]:
        """Words for how full each memory tier is, e.g. "VRAM 6.1/8.0 GiB"."""
        return tier_words(self._record, self.limits)

    def _is_due(self, step: int, now_s: float) -> bool:
        if self._shown_step is None or step == self.total_steps:
            return True
        by_steps = self._every_steps is not None and step - self._shown_step >= self._every_steps
        return by_steps or now_s - self._shown_at_s >= self._every_s

    def _show_plain(self, now_s: float) -> None:
        self._shown_step, self._shown_at_s = self._record["step"], now_s
        self._print(" | ".join([*self.words(), *self.tier_words()]))

    def _next_step(self, done: int) -> str:
        return ", ".join(filter(None, (f"step {done + 1}", self._doing())))

    def _pulse(self) -> None:
        """A plain line also within a step, an evaluation or a save that takes longer than `plain_every_s`."""
        while not self._closed.wait(min(1.0, self._every_s)):
            now_s = time.monotonic()
            if now_s - self._printed_at_s >= self._every_s:
                doing = self._activity or self._next_step(self._record.get("step", self.first_step))
                self._print(f"{doing}: {format_s(now_s - self._updated_at_s)} so far")

    def _print(self, text: str) -> None:
        self._printed_at_s = time.monotonic()
        try:
            try:
                self._file.write(text + "\n")
            except UnicodeEncodeError:  # a Windows pipe or LANG=C that lacks some character of a sample text
                encoding = getattr(self._file, "encoding", None) or "ascii"
                self._file.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._file.flush()
        except (OSError, ValueError):
            # The reader of the pipe has gone; a run for days goes on without its spectators (metrics.jsonl has all).
            self._enabled = False

    def _is_terminal(self) -> bool:
        # The bars need block characters, so a terminal with another encoding than UTF gets plain lines.
        encoding = str(getattr(self._file, "encoding", None) or "").lower()
        return bool(getattr(self._file, "isatty", lambda: False)()) and encoding.startswith("utf")


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}g}" if abs(value) < 1e-3 or abs(value) >= 1e4 else f"{value:.{digits}f}"


def _loss_share(record: dict[str, Any]) -> str:
    """Words for a step of which a part of the tokens bears no loss: prompts, padding."""
    tokens, with_loss = record.get("step_tokens"), record.get("loss_tokens")
    if not tokens or with_loss is None or with_loss > 0.95 * tokens:
        return ""
    return f" ({with_loss / tokens:.0%} with loss)"

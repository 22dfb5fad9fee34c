"""MetricsLog: metrics.jsonl, a header and then a line for each step, that survives kill -9, resume and a full disk.

A line is one write() of complete JSON with its newline; the file is synced every 30 s on a helper thread, so that a
busy drive never holds up a step. On resume a torn last line and every line after the resumed step are dropped by
rewriting the file aside and renaming it, so each step is there once. JSON knows no NaN: a value that is not finite is
written as null and named in the line's "nonfinite" object ({"loss": "nan"}); read_metrics puts it back.

Lines: line 0 {"event": "header", ...}; steps have no "event"; {"event": "eval", "step": n, ...};
{"event": "resume", "step": n, ...} marks where a later process went on.

Clock of the start: where the time before training goes: seconds by part, from the process's first line to the end
of the first step.

Parts: `imports`, `settings` (flags, files, tokenizer, engine choice), `data`, `plan` (the forecast's look at model and
machine), `model_load`, `engine_init` (pinned memory, homes, first weights), `logs` (sensors, log files); then
`first_step`, and `compile`, the part of it that torch.compile took. Written to plan.json and, with the first step, to
metrics.jsonl."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from outcore.common import fsync_folder, replacing, write_atomic
from outcore.common.classes import Closing
from outcore.common.os_layer import read_at
from outcore.common.quantities import format_s
from outcore.monitor.sensors import describe

FSYNC_INTERVAL_S = 30.0


class MetricsLogError(OSError):
    """metrics.jsonl could not be written.

    Attributes:
        path: the file.
        disk_full: True where the reason is a full disk or quota, so that the loop can stop cleanly and save elsewhere.
    """

    def __init__(self, path: Path, action: str, error: OSError) -> None:
        self.path = path
        self.disk_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = (
            "The disk is full: free some space (or choose another log folder: --log_dir) and resume; "
            "the lines so far are intact."
            if self.disk_full
            else "Check that the folder is still there and writable, then resume."
        )
        self._message = f"Cannot {action} {path}: {error.strerror or describe(error)}. {advice}"
        super().__init__(error.errno, self._message)

    def __str__(self) -> str:
        return self._message


class MetricsLog(Closing):
    """Writer of one run's metrics.jsonl.

    Args:
        path: the file; its folder is made.
        resume_step: None for a new run (an older file of that name is kept beside as metrics.1.jsonl, .2, ...);
            a step number to go on after it: lines of later steps are dropped.
        fsync_interval_s: seconds between two fsyncs: the lines that a power cut can lose (kill -9 loses none).
        say: hears that the file was removed under the run, and put back.

    Raises:
        MetricsLogError: the file cannot be opened or rewritten."""

    def __init__(
        self,
        path: Path | str,
        *,
        resume_step: int | None = None,
        fsync_interval_s: float = FSYNC_INTERVAL_S,
        say: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.path = Path(path)
        self._say = say
        self.kept_path: Path | None = None
        """Path where an older run's file went, if there was one."""
        self.dropped_lines = 0
        """Lines removed on open: torn, damaged, or of steps after resume_step."""
        self.damaged_lines = 0
        """Lines among them that are no whole record: torn by a crash, or damaged on the drive."""
        self._fsync_interval_s = fsync_interval_s
        self._synced_at_s = time.monotonic()
        self._sync_thread: threading.Thread | None = None
        self._sync_error: OSError | None = None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step is None:
                self._keep_older()
            elif self.path.exists():
                self.dropped_lines, self.damaged_lines = truncate_after(self.path, resume_step)
            self._open()
        except OSError as error:
            raise MetricsLogError(self.path, "open", error) from error
        self._has_header = self._size_bytes > 0
        self._header: dict[str, Any] = {}
        self._resume_step = resume_step

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
        try:
            self._size_bytes = os.fstat(self._fd).st_size
            fsync_folder(self.path.parent)
        except BaseException:
            os.close(self._fd)
            self._fd = -1
            raise

    def go_back_to(self, step: int) -> None:
        """Drop the lines of later steps: the run goes on from an older checkpoint than the log was opened for.

        Raises:
            MetricsLogError: the file cannot be rewritten."""
        self.close()
        try:
            truncate_after(self.path, step)
            self._open()
        except OSError as error:
            raise MetricsLogError(self.path, "open", error) from error
        self._resume_step = step
        self.write_header(self._header)

    def write_header(self, header: dict[str, Any]) -> None:
        """Line 0 of a new file; in a resumed file a "resume" line that carries the new process's header."""
        self._header = header
        if self._has_header:
            self._write({"event": "resume", "step": self._resume_step or 0, "time_s": time.time(), "header": header})
        else:
            self._has_header = True
            self._write({"event": "header", "time_s": time.time(), **header})

    def write_step(self, record: dict[str, Any]) -> None:
        """One step's line; `record` must have "step".

        Raises:
            MetricsLogError: the line could not be written; the file is as it was before.
            ValueError: no step, or a value that JSON cannot hold."""
        if not isinstance(record.get("step"), int):
            raise ValueError(f"A metrics line needs an integer 'step', got {record.get('step')!r}")
        self._write(record)

    def write_eval(self, record: dict[str, Any]) -> None:
        """An evaluation's line, e.g. {"step": 200, "eval_loss": 2.31, "eval_perplexity": 10.1}."""
        self.write_step({"event": "eval", **record})

    def sync(self) -> None:
        """Bring every line so far to the drive, before a checkpoint of their step is announced. MetricsLogError."""
        try:
            self._put_back()
            os.fsync(self._fd)
        except OSError as error:
            raise MetricsLogError(self.path, "sync", error) from error

    def _put_back(self) -> None:
        """Write the file anew where it was removed, or moved away, since: the open file has every line so far."""
        mine = os.fstat(self._fd)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self.path), mine):
                return
        lines = read_at(self._fd, mine.st_size, 0)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._keep_older()  # somebody else's, if there is one
        write_atomic(self.path, lines)
        os.close(self._fd)
        self._open()
        self._say(
            f"WARNING: {self.path} was removed or replaced while the run writes it: every line of it is there again. "
            "What else its folder held (plan.json, TensorBoard's files) is not"
        )

    def close(self) -> None:
        """Sync and close; later calls do nothing."""
        if self._fd < 0:
            return
        self._join_sync()
        fd, self._fd = self._fd, -1
        try:
            os.fsync(fd)
        except OSError as error:
            raise MetricsLogError(self.path, "sync", error) from error
        finally:
            os.close(fd)

    def _write(self, record: dict[str, Any]) -> None:
        line = encode_line(record)
        self._raise_sync_error()
        try:
            if self._fd < 0:
                raise OSError(errno.EBADF, "the log is closed")
            self._put_back()
            written = os.write(self._fd, line)
            while written < len(line):  # near a full disk the kernel takes a part; the next write tells why
                written += os.write(self._fd, line[written:])
        except OSError as error:
            self._cut_back()
            raise MetricsLogError(self.path, "write", error) from error
        self._size_bytes += len(line)
        self._sync_if_due()

    def _cut_back(self) -> None:
        """Remove what a failed write has left, so that the file ends with a whole line."""
        try:
            if self._fd >= 0:
                os.ftruncate(self._fd, self._size_bytes)
        except OSError:
            pass  # The write's own error is raised; a torn line is repaired at the next open.

    def _sync_if_due(self) -> None:
        now_s = time.monotonic()
        if now_s - self._synced_at_s < self._fsync_interval_s:
            return
        if self._sync_thread is not None and self._sync_thread.is_alive():
            return
        self._synced_at_s = now_s
        self._sync_thread = threading.Thread(target=self._sync, name="outcore-metrics-fsync", daemon=True)
        self._sync_thread.start()

    def _sync(self) -> None:
        try:
            os.fsync(self._fd)
        except OSError as error:
            self._sync_error = error

    def _join_sync(self) -> None:
        if self._sync_thread is not None:
            self._sync_thread.join()
            self._sync_thread = None

    def _raise_sync_error(self) -> None:
        error, self._sync_error = self._sync_error, None
        if error is not None:
            raise MetricsLogError(self.path, "sync", error) from error

    def _keep_older(self) -> None:
        if not self.path.exists() or self.path.stat().st_size == 0:
            return
        number = 1
        while (kept := self.path.with_name(f"{self.path.stem}.{number}{self.path.suffix}")).exists():
            number += 1
        os.rename(self.path, kept)
        self.kept_path = kept


def encode_line(record: dict[str, Any]) -> bytes:
    """One line of metrics.jsonl: strict JSON; numbers that are not finite become null and are named in "nonfinite".

    Raises:
        ValueError: a value that JSON cannot hold, with its name."""
    nonfinite: dict[str, str] = {}
    clean = {name: _clean(value, name, nonfinite) for name, value in record.items()}
    if nonfinite:
        clean["nonfinite"] = nonfinite
    line = json.dumps(clean, allow_nan=False, separators=(", ", ": "), ensure_ascii=False)
    return line.encode(errors="backslashreplace") + b"\n"  # a file's name may be no UTF-8; JSON spells it so, too


def _clean(value: Any, name: str, nonfinite: dict[str, str]) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        nonfinite[name] = "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
        return None
    if isinstance(value, dict):
        return {str(key): _clean(item, f"{name}.{key}", nonfinite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item, f"{name}.{index}", nonfinite) for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # a 0-d tensor or NumPy scalar
        return _clean(value.item(), name, nonfinite)
    raise ValueError(f"{name} is a {type(value).__name__}, which a metrics line cannot hold: pass numbers, text, lists")


def truncate_after(path: Path, step: int) -> tuple[int, int]:
    """Drop lines of steps after `step`, repeated steps but the last, and damaged lines; atomic.

    Returns:
        Number of lines dropped (0: the file was not touched), and of those that were damaged."""
    keep: set[int] = set()
    last_of_step: dict[int, int] = {}
    num_lines = num_damaged = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file):
            num_lines += 1
            record = parse_line(line)
            num_damaged += record is None
            if record is None or record.get("step", 0) > step:
                continue
            if "event" not in record:
                keep.discard(last_of_step.get(record["step"], -1))
                last_of_step[record["step"]] = number
            keep.add(number)
    if len(keep) == num_lines:
        return 0, 0
    with open(path, "rb") as file, replacing(path) as out:
        for number, line in enumerate(file):
            if number in keep:
                out.write(line)
    return num_lines - len(keep), num_damaged


def parse_line(line: bytes) -> dict[str, Any] | None:
    """The record of a whole line; None for a torn or damaged one."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(record.get("step", 0), int):
        return None
    return record if "event" in record or "step" in record else None


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
        """Seconds of all parts, with the first step's."""
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

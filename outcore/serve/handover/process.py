"""A server in a process of its own: brought up, looked after, started again, ended with all that it started."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

from outcore.common.files import opener_for_us

STOP_S = 20.0
"""From asking a process to end until it is killed."""
LAST_LINES = 12
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Care:
    """Limits by which a process is watched and restarted."""

    start_timeout_s: float = 1800.0
    look_every_s: float = 2.0
    answer_within_s: float = 10.0
    """A look at its health counts as failed after this long."""
    max_failed_looks: int = 3
    max_restarts: int = 3
    """New starts within `window_s`; one more is a failure for good."""
    window_s: float = 900.0


def ends_with_us() -> Callable[[], object]:
    """A call for a child, before it becomes its program: it is told to end (SIGTERM) where this process is killed."""
    libc = ctypes.CDLL(None)  # not in the child, which may hold another thread's lock for ever
    return lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


class ServerProcess:
    """`bring_up` once, then `watch`; `stop` in the end."""

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], url: str, log: Path, care: Care,
        note: Callable[..., None],
    ) -> None:  # fmt: skip
        self.url, self.log, self.restarts = url, log, 0
        self.state: Literal["starting", "up", "failed", "stopped"] = "starting"
        self.why = ""
        """Text for people: what went wrong last."""
        self._command, self._environ, self._care, self._note = list(command), {**os.environ, **variables}, care, note
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = threading.Event()
        self._restarted_s: deque[float] = deque()
        self._thread: threading.Thread | None = None

    def bring_up(self) -> None:
        """Start, and wait until it answers. RuntimeError with its last words where it does not."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._note("engine starting", command=self._command, log=str(self.log))
        began_s = time.monotonic()
        with open(self.log, "ab", opener=opener_for_us) as output:
            self._process = subprocess.Popen(
                self._command,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=ends_with_us(),
            )
        process = self._process
        while not self._is_healthy():
            if (code := process.poll()) is not None:
                raise RuntimeError(f"it ended with exit code {code} while it started:\n{self.last_words()}")
            if time.monotonic() - began_s > self._care.start_timeout_s:
                self._end_process()
                limit = f"{self._care.start_timeout_s:.0f} s (--start_timeout)"
                raise RuntimeError(f"it did not answer within {limit}:\n{self.last_words()}")
            if self._ending.wait(min(0.5, self._care.look_every_s)):
                raise RuntimeError("it was stopped while it started")
        self.state = "up"
        self._note("engine up", seconds=time.monotonic() - began_s)

    def watch(self, on_failure: Callable[[], None]) -> None:
        """Look after it from now on. `on_failure`: it failed for good; called on another thread."""

        def run() -> None:
            try:
                while not self._ending.is_set():
                    self.why = self._until_trouble()
                    if self._ending.is_set():
                        return
                    self._restart()
            except (RuntimeError, OSError) as error:
                if not self._ending.is_set():
                    self.state, self.why = "failed", str(error)
                    self._note("engine failed", why=self.why)
                    on_failure()

        self._thread = threading.Thread(target=run, name="engine-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it and all that it started. Safe to call twice."""
        self._ending.set()
        self._end_process()
        if self._thread is not None:
            self._thread.join(STOP_S)
            self._end_process()  # which it may have started again meanwhile
        self.state = "failed" if self.state == "failed" else "stopped"

    def last_words(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        return "\n".join(f"  {line}" for line in [*lines, f"(all of it: {self.log})"])

    def _until_trouble(self) -> str:
        """Wait until the process ends, answers no more or is to stop; returns which, in words."""
        process, failed = self._process, 0
        assert process is not None
        while failed < self._care.max_failed_looks:
            if self._ending.wait(self._care.look_every_s):
                return "stopped"
            if (code := process.poll()) is not None:
                return f"it ended with exit code {code}"
            failed = 0 if self._is_healthy() else failed + 1
        return f"it did not answer {failed} looks at its health"

    def _restart(self) -> None:
        self.state = "starting"  # before the new start is counted: who sees that one waits for this one
        now_s = time.monotonic()
        self._restarted_s.append(now_s)
        while now_s - self._restarted_s[0] > self._care.window_s:
            self._restarted_s.popleft()
        self._end_process()
        if len(self._restarted_s) > self._care.max_restarts:
            raise RuntimeError(f"{self.why}, after {self._care.max_restarts} new starts:\n{self.last_words()}")
        self.restarts += 1
        self._note("engine restarted", why=self.why)
        self.bring_up()

    def _is_healthy(self) -> bool:
        try:
            answer = httpx.get(f"{self.url}/health", timeout=self._care.answer_within_s, trust_env=False)
            return answer.status_code == 200
        except httpx.HTTPError:
            return False

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for kind, wait_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
            with suppress(ProcessLookupError):  # the group outlives its leader where workers are left
                os.killpg(process.pid, kind)
            with suppress(subprocess.TimeoutExpired):
                process.wait(wait_s)
                if kind == signal.SIGTERM:
                    continue  # workers that did not hear are killed
                return

"""hold_off_sleep: keep the system from falling asleep while a run works, where the system lets it.

A helper program holds the inhibition (`systemd-inhibit` on Linux, PowerShell's SetThreadExecutionState on WSL2's
Windows host) and ends by itself when our end of its pipe closes, also after kill -9. On Windows the process holds it
itself. Elsewhere, or when refused, a hold that does nothing is returned with the reason. Closing a laptop's lid still
puts it to sleep unless the system's own setting says otherwise."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outcore.common.classes import Closing
from outcore.common.os_layer import apart_options
from outcore.machine import detect_os
from outcore.monitor.sensors import describe

WAIT_S = 8.0
"""PowerShell takes seconds to start."""
_LID = "Closing the lid may still put a laptop to sleep."
_ES_CONTINUOUS, _ES_SYSTEM_REQUIRED = 0x80000000, 0x00000001  # winbase.h
_POWERSHELL = (
    "$t = Add-Type -PassThru -Namespace Outcore -Name Power -MemberDefinition "
    "'[DllImport(\"kernel32.dll\")] public static extern uint SetThreadExecutionState(uint flags);'; "
    f"$t::SetThreadExecutionState([uint32]{_ES_CONTINUOUS | _ES_SYSTEM_REQUIRED}) | Out-Null; "
    "[Console]::Out.WriteLine([Console]::In.ReadLine()); [Console]::In.ReadLine() | Out-Null"
)


class SleepHold(Closing):
    """Sleep is held off until `close()`, if `held`.

    Attributes:
        held: whether the system agreed.
        words: what holds, or why nothing does; for people."""

    def __init__(self, words: str, release: Callable[[], object] | None = None) -> None:
        self.held = release is not None
        self.words = words
        self._release = release

    def close(self) -> None:
        """Let the system sleep again; may be called twice."""
        release, self._release, self.held = self._release, None, False
        if release is not None:
            release()


def hold_off_sleep(
    why: str = "training run", *, root: Path | str = "/", commands: Sequence[Sequence[str]] | None = None
) -> SleepHold:
    """Hold off sleep for the time of the returned context manager. Never raises; may take 8 s.

    Args:
        why: shown by the system's tools (`systemd-inhibit --list`).
        root: where `proc` is looked for; tests replace it.
        commands: programs to try instead of the system's own; each must echo a line once it holds, and end when its
            stdin does."""
    if sys.platform == "win32":
        return _hold_windows()
    reasons = []
    for command in _commands(why, detect_os(Path(root)).is_wsl2) if commands is None else commands:
        process, reason = _start(command)
        if process is not None:
            words = f"Sleep is held off by {Path(command[0]).name} until the run ends. {_LID}"
            return SleepHold(words, lambda held=process: _end(held))
        reasons.append(f"{command[0]} {reason}")
    return SleepHold(
        f"Sleep is not held off ({'; '.join(reasons)}): set the system's power plan to never sleep during long runs."
    )


def _commands(why: str, is_wsl2: bool) -> list[list[str]]:
    if is_wsl2:
        # The guest cannot keep Windows awake; a Windows program started from it can.
        # (the second path is for guests that keep Windows' folders out of PATH).
        programs = ("powershell.exe", "/mnt/c/Windows/System32/WindowsPowerShell/v1.0/powershell.exe")
        return [[program, "-NoProfile", "-NonInteractive", "-Command", _POWERSHELL] for program in programs]
    return [["systemd-inhibit", "--what=sleep:idle", "--who=outcore", f"--why={why}", "--mode=block", "cat"]]


def _start(command: Sequence[str]) -> tuple[subprocess.Popen[bytes] | None, str]:
    """(the running process, '') once it echoes a line; else (None, why not)."""
    if shutil.which(command[0]) is None:
        return None, "is not installed"
    try:
        # Its own session, so that Ctrl-C, which lets the run finish its step and save, does not end the hold first.
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=False,
            **apart_options(),
        )
    except OSError as error:
        return None, f"does not start: {describe(error)}"
    assert process.stdin is not None and process.stdout is not None
    late = threading.Timer(WAIT_S, process.kill)
    late.start()
    try:
        process.stdin.write(b"held\n")
        process.stdin.flush()
        if process.stdout.readline().strip() == b"held":
            return process, ""
    except OSError:
        pass  # it ended before it read: its stderr says why
    finally:
        late.cancel()
    said = _end(process).decode(errors="replace").strip().splitlines()
    return None, f"gave no answer: {said[-1] if said else f'exit code {process.returncode}'}"


def _end(process: subprocess.Popen[bytes]) -> bytes:
    """Close our end of the pipes; the helper ends by itself, or is killed after 2 s. Returns what it said on stderr."""
    try:
        return process.communicate(timeout=2.0)[1]
    except (subprocess.TimeoutExpired, ValueError):
        process.kill()
        return process.communicate()[1]


def _hold_windows() -> SleepHold:
    import ctypes

    kernel: Any = getattr(ctypes, "windll").kernel32  # noqa: B009  (exists on Windows only)
    if not kernel.SetThreadExecutionState(_ES_CONTINUOUS | _ES_SYSTEM_REQUIRED):
        return SleepHold("Windows refused to hold off sleep: set its power plan to never sleep.")
    return SleepHold(
        f"Sleep is held off until the run ends. {_LID}", lambda: kernel.SetThreadExecutionState(_ES_CONTINUOUS)
    )

"""hold_off_sleep: keep the system from falling asleep while a run works, where the system lets it.

A helper program holds the inhibition (`systemd-inhibit` on Linux, PowerShell's SetThreadExecutionState on WSL2's
Windows host) and ends by itself when our end of its pipe closes, also after kill -9. On Windows the process holds it
itself. Elsewhere, or when refused, a hold that does nothing is returned with the reason. Closing a laptop's lid still
puts it to sleep unless the system's own setting says otherwise."""

from __future__ import annotations

import select
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outcore.common.classes import Closing
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

    def __init__(
        self, held: bool, words: str, process: subprocess.Popen[bytes] | None = None, kernel: Any = None
    ) -> None:
        self.held = held
        self.words = words
        self._process = process
        self._kernel = kernel

    def close(self) -> None:
        """Let the system sleep again; may be called twice."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)
        kernel, self._kernel = self._kernel, None
        if kernel is not None:
            kernel.SetThreadExecutionState(_ES_CONTINUOUS)
        self.held = False


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
    if commands is None:
        commands = _commands(why, detect_os(Path(root)).is_wsl2)
    reasons = []
    for command in commands:
        program = shutil.which(command[0])
        if program is None:
            reasons.append(f"{command[0]} is not installed")
            continue
        reason, process = _start([program, *command[1:]])
        if process is not None:
            return SleepHold(True, f"Sleep is held off by {Path(program).name} until the run ends. {_LID}", process)
        reasons.append(f"{command[0]}: {reason}")
    return SleepHold(
        False,
        f"Sleep is not held off ({'; '.join(reasons)}): set the system's power plan to never sleep during long runs.",
    )


def _commands(why: str, is_wsl2: bool) -> list[list[str]]:
    if is_wsl2:
        # The guest cannot keep Windows awake; a Windows program started from it can.
        # (the second path is for guests that keep Windows' folders out of PATH).
        programs = ("powershell.exe", "/mnt/c/Windows/System32/WindowsPowerShell/v1.0/powershell.exe")
        return [[program, "-NoProfile", "-NonInteractive", "-Command", _POWERSHELL] for program in programs]
    return [["systemd-inhibit", "--what=sleep:idle", "--who=outcore", f"--why={why}", "--mode=block", "cat"]]


def _start(command: list[str]) -> tuple[str, subprocess.Popen[bytes] | None]:
    """(reason, None) where the command does not echo a line in time; else ("", the running process)."""
    try:
        # Its own session, so that Ctrl-C, which lets the run finish its step and save, does not end the hold first.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        return describe(error), None
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    try:
        process.stdin.write(b"held\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], WAIT_S)
        if ready and process.stdout.readline().strip() == b"held":
            return "", process
    except OSError:
        ready = [process.stdout]  # it ended before it read: its stderr says why
    if not ready:
        process.kill()
        _end(process)
        return f"no answer in {WAIT_S:.0f} s", None
    text = process.stderr.read().decode(errors="replace").strip().splitlines()
    _end(process)
    return (text[-1] if text else f"ended with exit code {process.returncode}"), None


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close our end of the pipes; the helper ends by itself, or is killed after 2 s."""
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                pass  # a pipe whose reader has gone: closed all the same
    try:
        process.wait(timeout=2.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _hold_windows() -> SleepHold:
    import ctypes

    kernel: Any = getattr(ctypes, "windll").kernel32  # noqa: B009  (exists on Windows only)
    if not kernel.SetThreadExecutionState(_ES_CONTINUOUS | _ES_SYSTEM_REQUIRED):
        return SleepHold(False, "Windows refused to hold off sleep: set its power plan to never sleep.")
    return SleepHold(True, f"Sleep is held off until the run ends. {_LID}", None, kernel)

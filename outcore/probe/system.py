"""Questions that the ladder may ask of the computer, behind one small interface, so that tests can put another computer
there.

`RealSystem` reads files, looks for programs and modules, and runs children with a time limit. A child gets its own
process group: when it hangs, or when the user interrupts us, the whole group is killed and nothing is left behind."""

from __future__ import annotations

import glob
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from outcore.common.os_layer import apart_options, kill_with_children


@dataclass(frozen=True)
class ChildResult:
    """End of a child process. `returncode` is negative for a signal, as in subprocess; None: killed for time."""

    returncode: int | None
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False

    @property
    def signal_name(self) -> str | None:
        """'SIGABRT' when the child died by that signal, else None."""
        if self.returncode is None or self.returncode >= 0:
            return None
        try:
            return signal.Signals(-self.returncode).name
        except ValueError:
            return f"signal {-self.returncode}"


class System(Protocol):
    """The questions the ladder asks. Paths are absolute, in the style of the machine itself."""

    platform: str
    """Name as in `sys.platform`: 'linux', 'win32', 'darwin'."""
    kernel_release: str
    """Release as in `uname -r`."""

    def read_text(self, path: str) -> str | None:
        """The file's text, or None when it is missing or may not be read."""
        ...

    def which(self, name: str) -> str | None:
        """The full path of a program, or None."""
        ...

    def glob(self, pattern: str) -> list[str]:
        """Paths that match a shell pattern, sorted."""
        ...

    def module_version(self, module: str, packages: Sequence[str]) -> str | None:
        """The version of an installed Python module; 'unknown' when it has none, None when it is not installed."""
        ...

    def run(self, command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> ChildResult:
        """Runs a command to its end or to the time limit. `env` is added to the environment; '' removes a variable."""
        ...

    def run_child(
        self, arguments: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None
    ) -> ChildResult:
        """Runs `outcore.probe.gds.child` in a fresh interpreter."""
        ...


class RealSystem:
    """The computer we run on."""

    def __init__(self) -> None:
        self.platform = sys.platform
        self.kernel_release = platform.release()

    def read_text(self, path: str) -> str | None:
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def which(self, name: str) -> str | None:
        return shutil.which(name)

    def glob(self, pattern: str) -> list[str]:
        return sorted(glob.glob(pattern))

    def module_version(self, module: str, packages: Sequence[str]) -> str | None:
        if importlib.util.find_spec(module) is None:
            return None
        for package in packages:
            try:
                return importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "unknown"

    def run(
        self, command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None, cwd: str | None = None
    ) -> ChildResult:
        full_env = dict(os.environ)
        for key, value in (env or {}).items():
            if value == "":
                full_env.pop(key, None)
            else:
                full_env[key] = value
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=full_env,
                cwd=cwd,
                **apart_options(),
            )
        except OSError as error:
            return ChildResult(returncode=127, stderr=f"{command[0]} could not be started: {error}")
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            kill_with_children(process)
            stdout, stderr = process.communicate()
            return ChildResult(returncode=None, stdout=stdout, stderr=stderr, timed_out=True)
        except BaseException:
            kill_with_children(process)
            process.communicate()
            raise
        return ChildResult(returncode=process.returncode, stdout=stdout, stderr=stderr)

    def run_child(
        self, arguments: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None
    ) -> ChildResult:
        import tempfile

        package_root = str(Path(__file__).resolve().parents[2])
        python_path = os.pathsep.join(p for p in (package_root, os.environ.get("PYTHONPATH", "")) if p)
        with tempfile.TemporaryDirectory(
            prefix="outcore-probe-"
        ) as scratch:  # libcufile drops its cufile.log where it runs
            command = [sys.executable, "-m", "outcore.probe.gds.child", *arguments]
            return self.run(command, timeout_s, {**(env or {}), "PYTHONPATH": python_path}, cwd=scratch)

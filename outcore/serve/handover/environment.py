"""vLLM in a virtual environment of its own: made once, and again when its requirement changes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("vllm.txt")
STAMP = "outcore-vllm.txt"
LAST_LINES = 8


def ensure_environment(
    folder: Path, progress: Callable[[str], None], *, python: str = sys.executable, requirements: Path = REQUIREMENTS
) -> Path:
    """The `vllm` executable in `folder`, which is made where it lacks or is of other requirements. RuntimeError with
    pip's last words; what was half made is made anew the next time."""
    wanted, stamp, executable = requirements.read_text(encoding="utf-8"), folder / STAMP, folder / "bin" / "vllm"
    if executable.is_file() and stamp.is_file() and stamp.read_text(encoding="utf-8") == wanted:
        return executable
    progress(f"making an environment for vLLM in {folder} (several GB, once)")
    stamp.unlink(missing_ok=True)
    _run([python, "-m", "venv", "--clear", str(folder)], "make the environment")
    _run([str(folder / "bin" / "python"), "-m", "pip", "install", "-r", str(requirements)], "install vLLM")
    if not executable.is_file():
        raise RuntimeError(f"{folder} has no bin/vllm although pip installed {requirements.name}.")
    stamp.write_text(wanted, encoding="utf-8")
    return executable


def _run(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        last = "\n  ".join(done.stdout.strip().splitlines()[-LAST_LINES:])
        raise RuntimeError(f"could not {what} (exit code {done.returncode}):\n  {last}")

"""`~/.local/bin/deepspeed`: starts the environment's own launcher from every shell, without activating anything."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from outcore.install.environment import Environment
from outcore.install.errors import InstallError

MARK = "# written by outcore's setup.py --shim"


def write_shim(environment: Environment, home: Path | None = None, path: str | None = None) -> str:
    """Write it and return what to tell people. InstallError when another program's `deepspeed` is there."""
    folder = (home or Path.home()) / ".local" / "bin"
    target = folder / "deepspeed"
    if os.name == "nt":
        raise InstallError("no shim on Windows", "it is a shell script", "activate the environment instead")
    if target.exists() and MARK not in target.read_text(encoding="utf-8", errors="replace"):
        raise InstallError(f"{target} exists", "it is not outcore's", "move it away, then `python setup.py --shim`")
    folder.mkdir(parents=True, exist_ok=True)
    bin_dir = shlex.quote(str(environment.bin_dir))
    target.write_text(f'#!/bin/sh\n{MARK}\nPATH={bin_dir}:"$PATH" exec {bin_dir}/deepspeed "$@"\n', encoding="utf-8")
    target.chmod(0o755)
    on_path = str(folder) in (path if path is not None else os.environ.get("PATH", "")).split(os.pathsep)
    hint = "" if on_path else f'; {folder} is not on PATH yet: add `export PATH="$HOME/.local/bin:$PATH"` to ~/.profile'
    return f"wrote {target}{hint}"

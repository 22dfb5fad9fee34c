"""The virtual environment that the packages go into: found, made, repaired, and stamped when it is complete.

The stamp is removed before pip touches anything and written only after all of it succeeded, so that an interrupted
installation is never taken for a finished one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from pathlib import Path

from outcore.common.files import read_object, write_json
from outcore.install.bootstrap import environment_python
from outcore.install.errors import InstallError
from outcore.install.requirement_set import RequirementSet, normalise

STAMP_NAME = "outcore-setup.json"
SUPPORTED_PYTHON = ((3, 11), (3, 14))
Execute = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


@dataclass(frozen=True)
class Environment:
    """A virtual environment that exists or will be made."""

    prefix: Path
    how: str
    """Why this one: 'active', 'made by setup.py', ..."""

    @property
    def python(self) -> Path:
        return Path(environment_python(str(self.prefix)))

    @property
    def bin_dir(self) -> Path:
        return self.python.parent

    @property
    def exists(self) -> bool:
        return self.python.exists()

    @property
    def stamp_path(self) -> Path:
        return self.prefix / STAMP_NAME

    @property
    def site_packages(self) -> list[Path]:
        if os.name == "nt":
            return [self.prefix / "Lib" / "site-packages"]
        return sorted((self.prefix / "lib").glob("python3.*/site-packages"))

    @property
    def python_version(self) -> str:
        """'3.11.7' as pyvenv.cfg records it; '' when it does not (a conda environment, or none)."""
        try:
            text = (self.prefix / "pyvenv.cfg").read_text(encoding="utf-8")
        except OSError:
            return ""
        match = re.search(r"^version(?:_info)?\s*=\s*(\d+\.\d+(?:\.\d+)?)", text, re.M)
        return match.group(1) if match else ""

    def installed(self) -> dict[str, Distribution]:
        """Packages in it by normalised name, without starting its interpreter."""
        found = {}
        for dist in distributions(path=[str(path) for path in self.site_packages]):
            name = dist.metadata["Name"]
            if name:
                found.setdefault(normalise(name), dist)
        return found

    def unmet_pins(self, pins: Mapping[str, str]) -> dict[str, str]:
        """Pinned packages that are not there in that version -> what is there ('' = nothing)."""
        installed = self.installed()
        unmet = {}
        for name, version in pins.items():
            found = installed[name].version if name in installed else ""
            if found.split("+")[0] != version.split("+")[0]:
                unmet[name] = found
        return unmet

    def read_stamp(self) -> dict[str, object]:
        """Read what the last complete set-up wrote; empty when there was none."""
        return read_object(self.stamp_path)

    def write_stamp(self, content: Mapping[str, object]) -> None:
        """Atomically, last of all."""
        write_json(self.stamp_path, content)

    def remove_stamp(self) -> None:
        self.stamp_path.unlink(missing_ok=True)

    def needs_install(self, chosen: RequirementSet, repository: Path) -> str | None:
        """Why pip has to run, or None when everything is in place already."""
        if not self.exists:
            return f"{self.prefix} does not exist yet"
        stamp = self.read_stamp()
        if not stamp:
            return "no complete set-up was recorded in this environment"
        if stamp.get("set") != chosen.name:
            return f"the environment holds the {stamp.get('set')} set, this machine needs {chosen.name}"
        unmet = self.unmet_pins(chosen.pins)
        if unmet:
            name, found = next(iter(unmet.items()))
            return f"{name} {chosen.pins[name]} is pinned, {found or 'nothing'} is installed"
        if not self.has_editable(repository):
            return "outcore itself is not installed from this folder"
        return None

    def has_editable(self, repository: Path) -> bool:
        """Whether `pip install -e` of this very folder was done here."""
        dist = self.installed().get("outcore")
        if dist is None:
            return False
        try:
            url = json.loads(dist.read_text("direct_url.json") or "{}").get("url", "")
        except json.JSONDecodeError:
            return False
        return url == repository.resolve().as_uri()


def find_environment(
    repository: Path,
    requested: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    prefix: str = sys.prefix,
    base_prefix: str = sys.base_prefix,
) -> Environment:
    """The active environment, the one asked for, or `.venv` in the repository."""
    if requested is not None:
        return Environment(requested.expanduser().absolute(), "asked for with --venv")
    if prefix != base_prefix:
        return Environment(Path(prefix), "the active environment")
    active = environ.get("VIRTUAL_ENV")
    if active and Path(environment_python(active)).exists():
        return Environment(Path(active), "the active environment (VIRTUAL_ENV)")
    conda = environ.get("CONDA_PREFIX")
    if conda and os.path.realpath(conda) == os.path.realpath(prefix) and environ.get("CONDA_DEFAULT_ENV") != "base":
        return Environment(Path(conda), "the active conda environment")
    return Environment(repository / ".venv", "no environment is active")


def make_environment(environment: Environment, execute: Execute) -> None:
    """Create it when it is not there, and give it a pip that answers. InstallError when either fails."""
    if not environment.exists:
        holds_files = environment.prefix.is_dir() and any(environment.prefix.iterdir())
        if holds_files and not (environment.prefix / "pyvenv.cfg").exists():
            raise InstallError(
                f"{environment.prefix} is not a virtual environment",
                "it holds other files and no pyvenv.cfg",
                "give another folder with --venv, or empty this one",
            )
        if os.environ.get("SUDO_UID", "0") != "0":
            raise InstallError(
                "the set-up was started by sudo",
                f"{environment.prefix} and all output would belong to root",
                "start it without: `python setup.py`; it says where sudo is needed",
            )
        check_python(f"{sys.version_info[0]}.{sys.version_info[1]}", sys.executable)
        done = execute([sys.executable, "-m", "venv", str(environment.prefix)])
        if done.returncode != 0:
            raise _venv_failure(environment, (done.stdout or "") + (done.stderr or ""))
    done = execute([str(environment.python), "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
    if done.returncode != 0:
        raise InstallError(
            f"the interpreter of {environment.prefix} does not start",
            ((done.stderr or "").strip().splitlines() or [f"exit code {done.returncode}"])[-1],
            f"remove that folder and run `python setup.py` again: `rm -rf {environment.prefix}`",
        )
    check_python((done.stdout or "").strip(), str(environment.prefix))
    if execute([str(environment.python), "-m", "pip", "--version"]).returncode != 0:
        repaired = execute([str(environment.python), "-m", "ensurepip", "--upgrade"])
        if repaired.returncode or execute([str(environment.python), "-m", "pip", "--version"]).returncode:
            raise InstallError(
                f"pip in {environment.prefix} is broken",
                ((repaired.stderr or "").strip().splitlines() or ["`python -m pip --version` fails"])[-1],
                f"make the environment anew: `rm -rf {environment.prefix} && python setup.py`",
            )


def check_python(version: str, where: str) -> None:
    """InstallError unless '3.x' is one that the pinned wheels exist for."""
    low, high = SUPPORTED_PYTHON
    parts = tuple(int(part) for part in version.split(".")[:2]) if version[:1].isdigit() else (0, 0)
    if not low <= parts < high:
        raise InstallError(
            f"Python {version or 'unknown'} in {where} does not fit",
            "the pinned packages exist for Python 3.11, 3.12 and 3.13",
            "start the set-up with one of those: `python3.12 setup.py --venv .venv312`",
        )


def _venv_failure(environment: Environment, output: str) -> InstallError:
    last = (output.strip().splitlines() or ["no message"])[-1]
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if "ensurepip" in output:
        why, fix = "this Python has no ensurepip", f"`sudo apt-get install -y python{version}-venv`, then run again"
    elif "No space left" in output or "Errno 28" in output:
        why, fix = "the drive is full", f"free some space on the drive of {environment.prefix.parent}, then run again"
    elif "Permission denied" in output or "Errno 13" in output or "Read-only" in output:
        why, fix = f"{environment.prefix.parent} is not writable", "give a folder of your own with --venv DIR"
    else:
        why, fix = last, f"try `{sys.executable} -m venv {environment.prefix}` and see what it says"
    return InstallError(f"cannot make the environment {environment.prefix}", why, fix)

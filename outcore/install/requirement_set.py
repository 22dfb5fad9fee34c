"""Choice of the pinned packages for this machine, and why: a pure function of the machine (requirements/*.txt hold the
pins).

CUDA 13 needs driver 580 and a GPU of compute capability 7.5 (CUDA 13 dropped older ones); CUDA 12 needs driver 525.
DeepSpeed is a file of its own: a first run does not wait for it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outcore.common.quantities import GB
from outcore.install.errors import InstallError
from outcore.machine import Machine

# Free space each set needs while pip unpacks (D, from the sizes of the wheels: torch's ordinary wheel brings the CUDA
# libraries along even where there is no GPU, 5-6 GB unpacked; kvikio brings cupy[ctk], about 2.5 GB more).
NEEDED_BYTES = {"cpu": 9 * GB, "cuda12": 16 * GB, "cuda13": 16 * GB, "windows": 3 * GB}
CUDA13_MIN_CAPABILITY = (7, 5)
DEEPSPEED = "deepspeed"
"""Name of the package, and of the file with its pin."""
WSL2_HOWTO = "in PowerShell as administrator: `wsl --install -d Ubuntu-24.04`, restart, then clone and set up inside it"


@dataclass(frozen=True)
class RequirementSet:
    """The chosen set."""

    name: str
    reason: str
    file: Path
    pins: dict[str, str]
    """package -> exact version, the file and what it includes."""
    warnings: tuple[str, ...] = ()
    further: tuple[Path, ...] = ()
    """Files of what is installed beside it: tests, panels, the server."""

    @property
    def accelerator(self) -> str:
        """DeepSpeed's name of what it will train on."""
        return "cuda" if self.name.startswith("cuda") else "cpu"

    def without_deepspeed(self) -> RequirementSet:
        """Packages without DeepSpeed, which our own engine does not need."""
        pins = {name: pin for name, pin in self.pins.items() if name != DEEPSPEED}
        return replace(self, pins=pins, further=tuple(file for file in self.further if file.stem != DEEPSPEED))

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.file, *self.further)


def choose_set(machine: Machine, requested: str, repository: Path, further: Sequence[str] = ()) -> RequirementSet:
    """Raises InstallError when the machine cannot use its GPU, or a wanted set cannot work here."""
    name, reason, warnings = _choose(machine, requested)
    folder = repository / "requirements"
    files = [folder / f"{one}.txt" for one in (name, *[DEEPSPEED] * (name != "windows"), *further)]
    pins = {package: pin for file in files for package, pin in read_pins(file).items()}
    return RequirementSet(name, reason, files[0], pins, tuple(warnings), tuple(files[1:]))


def read_pins(file: Path) -> dict[str, str]:
    """Pins of a requirements file and of those it includes. InstallError when a line is not an exact pin."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InstallError(
            f"cannot read {file}", str(error), "clone the repository again: requirements/ belongs to it"
        ) from error
    pins: dict[str, str] = {}
    for line in text.splitlines():
        entry = line.split("#")[0].strip()
        if not entry:
            continue
        if entry.startswith("-r "):
            pins |= read_pins(file.parent / entry[3:].strip())
            continue
        match = re.fullmatch(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;]+)", entry)
        if match is None:
            raise InstallError(
                f"{file.name}: {entry!r} is not a pin", "every package has one exact version", "write name==version"
            )
        pins[normalise(match.group(1))] = match.group(2)
    return pins


def normalise(name: str) -> str:
    """Package names compare without regard to case, '-', '_' and '.' (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _choose(machine: Machine, requested: str) -> tuple[str, str, list[str]]:
    warnings: list[str] = []
    if machine.os_family == "windows":
        if requested.startswith("cuda"):
            raise InstallError(
                f"the {requested} set does not exist on native Windows",
                "its registry wheels of torch are CPU only, and kvikio is not built for Windows",
                WSL2_HOWTO,
            )
        return "windows", "native Windows: planning and reports only, training needs WSL2", warnings
    if any("WSL 1" in note for note in machine.notes):
        raise InstallError(
            "this is WSL 1", "it has no GPU and no real kernel", "in PowerShell: `wsl --set-version Ubuntu 2`"
        )
    if machine.os_family != "linux":
        warnings.append(f"{machine.os_name}: not tested; GPUDirect Storage and CUDA do not exist here")
    if requested == "windows":
        raise InstallError("the windows set is for native Windows", f"this is {machine.os_name}", "leave --set out")
    if requested != "auto":
        _check_wanted(machine, requested)
        return requested, "it was asked for or is what the environment holds", warnings
    if not machine.gpus:
        why = "; ".join(machine.notes) if machine.driver_version else "no NVIDIA GPU with a driver found"
        return "cpu", f"{why}: trains on DeepSpeed's CPU accelerator", warnings
    driver, major = machine.driver_version or "of unknown version", machine.cuda_driver_major
    gpu = machine.gpus[0]
    if major is None or major < 12:
        raise InstallError(
            f"the driver of {gpu.name} is too old",
            f"driver {driver} runs CUDA {machine.cuda_driver_version or 'unknown'}; 12.0 (driver 525) is the least",
            f"{_driver_howto(machine)}; or install without the GPU: `python setup.py --set cpu`",
        )
    oldest = min((g.compute_capability for g in machine.gpus if g.compute_capability), default=None)
    if major >= 13 and (oldest is None or oldest >= CUDA13_MIN_CAPABILITY):
        return "cuda13", f"{gpu.name}, driver {driver} runs CUDA {machine.cuda_driver_version}", warnings
    if major >= 13 and oldest is not None:
        warnings.append(f"CUDA 13 no longer covers compute capability {oldest[0]}.{oldest[1]}: CUDA 12 instead")
    reason = f"{gpu.name}, driver {driver} runs CUDA {machine.cuda_driver_version}"
    return "cuda12", reason + ("" if major >= 13 else "; CUDA 13 would need driver 580"), warnings


def _check_wanted(machine: Machine, requested: str) -> None:
    wanted_major = {"cuda12": 12, "cuda13": 13}.get(requested)
    major = machine.cuda_driver_major
    if wanted_major and major is not None and major < wanted_major:
        raise InstallError(
            f"--set {requested} cannot work here",
            f"driver {machine.driver_version} runs CUDA {machine.cuda_driver_version} at most",
            f"{_driver_howto(machine)}; or leave --set out",
        )


def _driver_howto(machine: Machine) -> str:
    if machine.is_wsl2:
        return "update the NVIDIA driver in Windows (not inside WSL2), then `wsl --shutdown`"
    return "update the NVIDIA driver, on Ubuntu: `sudo ubuntu-drivers install`, then restart"

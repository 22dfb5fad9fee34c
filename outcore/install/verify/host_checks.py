"""Rows about the computer itself, made without any package: Python, system, memory, drives, GPU, compiler."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path

from outcore.common.files import nearest_existing, read_object
from outcore.common.quantities import GB, GIB, format_gb, format_gib
from outcore.install.environment import SUPPORTED_PYTHON, Environment
from outcore.install.requirement_set import WSL2_HOWTO, RequirementSet
from outcore.install.verify.rows import DEGRADED, MISSING, OK, ReportRow
from outcore.install.verify.wsl import wsl_memory_row
from outcore.machine import Drive, Machine, Runner, drive_of
from outcore.machine.offload import write_and_read_back

# Below this torch, DeepSpeed and one of its compilers (2 GiB each) leave no room for a model.
MIN_RAM_BYTES = 4 * GIB
COMFORTABLE_RAM_BYTES = 16 * GIB
MIN_FREE_BYTES = 2 * GB
COMFORTABLE_FREE_BYTES = 20 * GB
NVIDIA_PCI_VENDOR = "0x10de"
# torch's wheels are manylinux_2_28.
MIN_GLIBC = (2, 28)


def host_rows(
    machine: Machine, environment: Environment, chosen: RequirementSet, repository: Path, runner: Runner
) -> list[ReportRow]:
    """Everything that can be told before a package is imported."""
    rows = [
        python_row(environment.python_version or machine.python_version, environment),
        system_row(machine),
        disk_row(repository),
        ram_row(machine),
    ]
    if machine.is_wsl2:
        rows.append(wsl_memory_row(machine, runner))
    return [*rows, gpu_row(machine, chosen), compiler_row(machine)]


def python_row(version: str, environment: Environment) -> ReportRow:
    parts = tuple(int(part) for part in version.split(".")[:2])
    needed = "3.11, 3.12 or 3.13"
    if SUPPORTED_PYTHON[0] <= parts < SUPPORTED_PYTHON[1]:
        return ReportRow("Python", f"{version}; environment {environment.prefix} ({environment.how})", needed, OK, True)
    return ReportRow("Python", version, needed, MISSING, True, "start the set-up with python3.11, 3.12 or 3.13")


def system_row(machine: Machine) -> ReportRow:
    needed = "Linux or WSL2, x86_64"
    found = f"{machine.os_name}, kernel {machine.kernel}, {machine.architecture}" + (
        ", WSL2" if machine.is_wsl2 else ""
    )
    if machine.os_family == "windows":
        return ReportRow("system", found, needed, DEGRADED, True, f"training needs WSL2; {WSL2_HOWTO}")
    if machine.os_family != "linux":
        return ReportRow("system", found, needed, DEGRADED, True, "not tested here: use Linux")
    name, version = platform.libc_ver()
    glibc = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if name == "glibc" and glibc and glibc < MIN_GLIBC:
        fix = "use a newer distribution: Ubuntu 20.04, Debian 11 or later"
        return ReportRow("system", f"{found}, glibc {version}", "glibc 2.28 for torch's wheels", MISSING, True, fix)
    if machine.architecture not in ("x86_64", "AMD64"):
        return ReportRow(
            "system", found, needed, DEGRADED, True, f"nothing to do: {machine.architecture} is not tested"
        )
    return ReportRow("system", found, needed, OK, True)


def disk_row(repository: Path) -> ReportRow:
    drive = drive_of(repository)
    free = drive.free_bytes or 0
    found = f"{format_gb(free)} free of {format_gb(drive.total_bytes or 0)} on {drive.mount_point}"
    needed = f"{format_gb(COMFORTABLE_FREE_BYTES)} for checkpoints and models"
    fix = f"free space on {drive.mount_point}, or keep checkpoints/ on another drive"
    if free < MIN_FREE_BYTES:
        return ReportRow("disk space", found, needed, MISSING, True, fix)
    if free < COMFORTABLE_FREE_BYTES:
        return ReportRow("disk space", found, needed, DEGRADED, True, fix)
    return ReportRow("disk space", found, needed, OK, True)


def ram_row(machine: Machine) -> ReportRow:
    total, available = machine.ram_total_bytes, machine.ram_available_bytes
    found = f"{format_gib(total)}, {format_gib(available)} of it available"
    needed = f"{format_gib(COMFORTABLE_RAM_BYTES)}; 64 GiB for models beyond 3 B"
    if total < MIN_RAM_BYTES:
        return ReportRow("RAM", found, needed, MISSING, True, "close programs or use a machine with more memory")
    if total < COMFORTABLE_RAM_BYTES:
        return ReportRow("RAM", found, needed, DEGRADED, True, "offload to NVMe: --zero_stage infinity")
    return ReportRow("RAM", found, needed, OK, True)


def gpu_row(machine: Machine, chosen: RequirementSet, pci_root: Path = Path("/sys/bus/pci/devices")) -> ReportRow:
    needed = "a CUDA GPU with driver 525 or later (580 for CUDA 13)"
    if machine.gpus:
        parts = []
        for gpu in machine.gpus:
            capability = ".".join(str(n) for n in gpu.compute_capability) if gpu.compute_capability else "unknown"
            parts.append(f"{gpu.name} {format_gib(gpu.vram_bytes)}, capability {capability}")
        found = f"{'; '.join(parts)}; driver {machine.driver_version}, CUDA {machine.cuda_driver_version}"
        if chosen.accelerator != "cuda":
            return ReportRow(
                "GPU", found, needed, DEGRADED, False, "installed for the CPU: `python setup.py --set auto`"
            )
        return ReportRow("GPU", found, needed, OK, True)
    if machine.driver_version:
        return ReportRow(
            "GPU", "; ".join(machine.notes), needed, DEGRADED, False, "reinstall the NVIDIA driver, then restart"
        )
    unreachable = [note for note in machine.notes if "nvidia-smi" in note]
    if machine.is_wsl2:
        fix = "install the NVIDIA driver in Windows (none inside WSL2), then `wsl --shutdown`"
        found = "; ".join(unreachable) or "none visible in WSL2: trains on the CPU"
        return ReportRow("GPU", found, needed, DEGRADED, False, fix)
    if unreachable:
        fix = "restart; if it stays, reinstall the driver: `sudo ubuntu-drivers install`"
        return ReportRow("GPU", "; ".join(unreachable), needed, DEGRADED, False, fix)
    if _has_nvidia_card(pci_root):
        fix = "`sudo ubuntu-drivers install`, restart, then `python setup.py` again"
        return ReportRow("GPU", "an NVIDIA card without a driver: trains on the CPU", needed, DEGRADED, False, fix)
    return ReportRow("GPU", "none: trains on the CPU accelerator", needed, DEGRADED, False)


def compiler_row(machine: Machine) -> ReportRow:
    needed = "a C++ compiler and Python's headers, for DeepSpeed's extensions"
    if machine.os_family == "windows":
        return ReportRow("compiler", "not looked for", needed, DEGRADED, False, "nothing is compiled on native Windows")
    compiler = shutil.which("c++") or shutil.which("g++")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if compiler is None:
        return ReportRow(
            "compiler", "no c++ or g++", needed, MISSING, True, "`sudo apt-get install -y build-essential`"
        )
    if not header.exists():
        version = sysconfig.get_python_version()
        fix = f"`sudo apt-get install -y python{version}-dev`"
        return ReportRow("compiler", f"{compiler}, but no {header}", needed, MISSING, True, fix)
    return ReportRow("compiler", compiler, needed, OK, True)


def extension_fix(reason: str) -> str:
    """Words for what to do about an extension that was not built, for this `reason`."""
    if "compiler" in reason:
        return "`sudo apt-get install -y build-essential`, then `python setup.py`"
    if "Python's headers" in reason:
        return f"`sudo apt-get install -y python{sysconfig.get_python_version()}-dev`, then `python setup.py`"
    return "`python setup.py --deepspeed` builds it; logs/setup_build.log has the compiler's words"


def offload_row(path: Path, drive_at: Callable[[Path], Drive] = drive_of) -> ReportRow:
    """Whether the folder that training offloads to takes a file, and what kind of drive it lies on."""
    needed = "a writable folder, best on an NVMe drive"
    try:
        folder = nearest_existing(path.expanduser())
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{folder} is not a folder")
        write_and_read_back(folder)
    except OSError as error:
        why = f"{path}: {error.strerror or error}"
        fix = "give another folder: --nvme_offload_path DIR (RAM offload works without)"
        return ReportRow("offload path", why, needed, MISSING, False, fix)
    drive = drive_at(path)
    found = f"{path}: writable, {drive.kind}, {format_gb(drive.free_bytes or 0)} free; {drive.reason}"
    if drive.is_nvme:
        return ReportRow("offload path", found, needed, OK, False)
    advice = {
        "virtual": "measure it: `python gds_optimizer.py`",
        "unknown": "measure it: `python gds_optimizer.py`",
        "tmpfs": "a RAM disk saves no RAM: give a folder on a drive, --nvme_offload_path DIR",
        "network": "give a folder on a local drive: --nvme_offload_path DIR",
    }.get(drive.kind, "works, slower than NVMe: prefer RAM offload")
    return ReportRow("offload path", found, needed, DEGRADED, False, advice)


def configured_offload_path(repository: Path) -> Path:
    """Folder where deepspeed_config.json says to offload; the repository itself when it does not say."""
    config = read_object(repository / "deepspeed_config.json")
    zero = config.get("zero_optimization", {})
    candidates = (
        config.get("outcore", {}).get("nvme_path"),
        zero.get("offload_optimizer", {}).get("nvme_path"),
        zero.get("offload_param", {}).get("nvme_path"),
    )
    path = next((candidate for candidate in candidates if isinstance(candidate, str) and candidate), None)
    return repository / Path(path).expanduser() if path else repository


def launcher_row(environment: Environment) -> ReportRow:
    """The product's own command `deepspeed` must be there, start this environment's Python, and be executable."""
    needed = "the command `deepspeed`"
    script = environment.bin_dir / ("deepspeed.bat" if os.name == "nt" else "deepspeed")
    fix = "`python setup.py` installs it"
    if not script.exists():
        return ReportRow("launcher", f"no {script}", needed, MISSING, True, fix)
    first = script.read_text(encoding="utf-8", errors="replace").split("\n", 1)[0]
    if os.name != "nt" and first.startswith("#!/") and not os.path.exists(first[2:].strip().split(" ")[0]):
        why = f"{script} starts {first[2:].strip()}, which is not there (was the folder moved?)"
        return ReportRow("launcher", why, needed, MISSING, True, f"`rm -rf {environment.prefix} && python setup.py`")
    if not os.access(script, os.X_OK):
        return ReportRow("launcher", f"{script} is not executable", needed, MISSING, True, f"`chmod +x {script}`")
    return ReportRow("launcher", str(script), needed, OK, True)


def _has_nvidia_card(pci_root: Path) -> bool:
    for vendor in pci_root.glob("*/vendor"):
        try:
            is_display = (vendor.parent / "class").read_text(encoding="utf-8").strip().startswith("0x03")
            if vendor.read_text(encoding="utf-8").strip() == NVIDIA_PCI_VENDOR and is_display:
                return True
        except OSError:
            continue  # the device went away while we looked
    return False

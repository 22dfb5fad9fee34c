"""GPUs and the CUDA that their driver can run, from `nvidia-smi` (nothing needs to be installed for that).

NVML would tell the same but is not there before the installer has run. A driver without its tool, a tool that cannot
reach its driver and fields the driver does not know ([N/A]) each end in a note, not in an exception."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outcore.common.quantities import MIB
from outcore.machine.records import Gpu
from outcore.machine.topology import detect_topology

Runner = Callable[[Sequence[str]], tuple[int, str]]
"""command -> (exit code, stdout and stderr as text). OSError when the command does not exist."""

QUERY_FIELDS = (
    "index", "name", "memory.total", "compute_cap", "driver_version", "pcie.link.gen.current", "pcie.link.gen.max",
    "pcie.link.width.current", "pcie.link.width.max", "pci.bus_id", "uuid",
)  # fmt: skip
OTHER_MAKERS = {"0x8086": "Intel", "0x1002": "AMD"}
"""PCI vendor -> maker of display adapters."""
# Drivers before 510 do not know compute_cap and refuse the whole query.
OLD_QUERY_FIELDS = tuple(name for name in QUERY_FIELDS if name != "compute_cap")
# WSL2 mounts the Windows driver's tool outside of PATH of some shells.
TOOL_PATHS = ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi", "/usr/bin/nvidia-smi")
# First Linux driver branch of each CUDA release, newest first (CUDA toolkit release notes, table of drivers).
CUDA_BY_DRIVER = (
    (580, "13.0"), (575, "12.9"), (570, "12.8"), (560, "12.6"), (555, "12.5"), (550, "12.4"), (545, "12.3"),
    (535, "12.2"), (530, "12.1"), (525, "12.0"), (520, "11.8"), (510, "11.6"), (470, "11.4"), (450, "11.0"),
)  # fmt: skip


@dataclass(frozen=True)
class GpuReport:
    """Report of the driver."""

    gpus: tuple[Gpu, ...] = ()
    driver_version: str | None = None
    cuda_driver_version: str | None = None
    notes: tuple[str, ...] = ()
    nvlink_domains: tuple[tuple[int, ...], ...] = ()
    other_gpus: tuple[str, ...] = ()
    """Domains and other adapters, as `Machine` has them."""


def run_command(command: Sequence[str], timeout_s: float = 30.0) -> tuple[int, str]:
    """Run, wait, return (exit code, output). A command that hangs counts as failed with exit code 124."""
    try:
        done = subprocess.run(
            list(command), capture_output=True, text=True, errors="replace", timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return 124, f"{command[0]} did not answer within {timeout_s:.0f} s"
    return done.returncode, done.stdout + done.stderr


def detect_gpus(runner: Runner = run_command, sys_root: str | Path = "/") -> GpuReport:
    """Ask nvidia-smi, NVML and the PCI bus; no `gpus` when there is no NVIDIA driver."""
    report = _nvidia_gpus(runner, sys_root)
    domains = detect_topology(report.gpus, sys_root=sys_root).nvlink_domains if len(report.gpus) > 1 else ()
    return replace(report, nvlink_domains=domains, other_gpus=other_display_adapters(sys_root))


def _nvidia_gpus(runner: Runner, sys_root: str | Path) -> GpuReport:
    tool, listing = _query(runner)
    if tool is None:
        return _without_tool(Path(sys_root))
    code, text = listing
    if code != 0:
        first = text.strip().splitlines()[0] if text.strip() else f"exit code {code}"
        if "No devices were found" in text:
            return GpuReport(notes=("nvidia-smi found no GPU",))
        return GpuReport(notes=(f"nvidia-smi cannot reach the GPU: {first}",))
    gpus, notes = parse_listing(text)
    driver = gpus[0].driver_version if gpus else None
    cuda = _cuda_version(runner, tool, driver) if gpus else None
    return GpuReport(gpus=gpus, driver_version=driver, cuda_driver_version=cuda, notes=notes)


def parse_listing(text: str) -> tuple[tuple[Gpu, ...], tuple[str, ...]]:
    """CSV lines of nvidia-smi -> (GPUs, notes about lines that make no sense)."""
    gpus, notes = [], []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        names = QUERY_FIELDS if len(cells) == len(QUERY_FIELDS) else OLD_QUERY_FIELDS
        if len(cells) != len(names):
            if line.strip():
                notes.append(f"nvidia-smi said {line.strip()!r}, which is not the table asked for")
            continue
        row = dict(zip(names, cells))
        vram_mib = _integer(row["memory.total"])
        if vram_mib is None:
            notes.append(
                f"{row['name']}: the driver does not tell its memory; the GPU shares the RAM or is in use by MIG"
            )
        gpus.append(
            Gpu(
                index=_integer(row["index"]) or 0,
                name=row["name"],
                vram_bytes=(vram_mib or 0) * MIB,
                compute_capability=_capability(row.get("compute_cap", "")),
                driver_version=_known(row["driver_version"]),
                pcie_gen_current=_integer(row["pcie.link.gen.current"]),
                pcie_gen_max=_integer(row["pcie.link.gen.max"]),
                pcie_width_current=_integer(row["pcie.link.width.current"]),
                pcie_width_max=_integer(row["pcie.link.width.max"]),
                pci_bus_id=_known(row["pci.bus_id"]),
                uuid=_known(row["uuid"]),
                is_integrated=vram_mib is None and _integer(row["pcie.link.width.max"]) is None,
            )
        )
    return tuple(gpus), tuple(notes)


def other_display_adapters(sys_root: str | Path = "/") -> tuple[str, ...]:
    """Display adapters of other makers on the PCI bus; one on the CPU's own bus (00) is integrated."""
    found = []
    for device in sorted((Path(sys_root) / "sys/bus/pci/devices").glob("*")):
        try:
            kind, vendor = (device / "class").read_text().strip(), (device / "vendor").read_text().strip()
        except OSError:
            continue
        if kind.startswith("0x03") and vendor in OTHER_MAKERS:
            on_cpu = device.name.split(":")[1] == "00"
            found.append(f"{OTHER_MAKERS[vendor]} at {device.name}" + ", integrated" * on_cpu)
    return tuple(found)


def cuda_of_driver(driver_version: str | None) -> str | None:
    """The newest CUDA that a driver can run, by its branch: '570.86.15' -> '12.8'."""
    branch = _integer((driver_version or "").split(".")[0])
    return next((cuda for first, cuda in CUDA_BY_DRIVER if branch is not None and branch >= first), None)


def _query(runner: Runner) -> tuple[str | None, tuple[int, str]]:
    for tool in TOOL_PATHS:
        try:
            code, text = runner([tool, f"--query-gpu={','.join(QUERY_FIELDS)}", "--format=csv,noheader,nounits"])
            if code != 0 and "not a valid field" in text:
                old = f"--query-gpu={','.join(OLD_QUERY_FIELDS)}"
                code, text = runner([tool, old, "--format=csv,noheader,nounits"])
            return tool, (code, text)
        except OSError:
            continue
    return None, (127, "")


def _cuda_version(runner: Runner, tool: str, driver: str | None) -> str | None:
    """The banner says it exactly ('CUDA Version: 12.8', lately 'CUDA UMD Version: 13.0'); else by the branch."""
    code, banner = runner([tool])
    match = re.search(r"CUDA (?:UMD |Driver )?Version\s*:\s*(\d+\.\d+)", banner) if code == 0 else None
    return match.group(1) if match else cuda_of_driver(driver)


def _without_tool(root: Path) -> GpuReport:
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return GpuReport()
    match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    driver = match.group(1) if match else None
    named = f"NVIDIA driver {driver or 'of unknown version'}"
    note = f"{named} is loaded but nvidia-smi is not there: install the driver's tools"
    return GpuReport(driver_version=driver, cuda_driver_version=cuda_of_driver(driver), notes=(note,))


def _known(cell: str) -> str | None:
    return None if not cell or cell.startswith("[") or cell.upper() in ("N/A", "UNKNOWN ERROR") else cell


def _integer(cell: str) -> int | None:
    known = _known(cell)
    return int(known) if known is not None and re.fullmatch(r"\d+", known) else None


def _capability(cell: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"(\d+)\.(\d+)", cell)
    return (int(match.group(1)), int(match.group(2))) if match else None

"""Operating system, CPU and RAM of this computer, from /proc and /sys; the standard library's answers elsewhere.

Where a control group limits memory or cores (containers, SLURM jobs, systemd slices, WSL2 distributions) that limit
counts, not what the host has."""

from __future__ import annotations

import math
import os
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outcore.common.os_layer import most_locked_bytes
from outcore.common.quantities import KIB

# Instruction sets that the CPU optimizer and DeepSpeed's CPU Adam can use, as /proc/cpuinfo spells them.
SIMD_FLAGS = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")
# A control group v1 without a limit reports the largest multiple of the page size below 2**63.
_NO_LIMIT_BYTES = 1 << 60
_CGROUPS = "sys/fs/cgroup"
CAP_IPC_LOCK = 1 << 14
"""A process with this capability may lock all of the RAM, whatever RLIMIT_MEMLOCK says."""


@dataclass(frozen=True)
class OsInfo:
    family: str
    name: str
    kernel: str
    is_wsl2: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CpuInfo:
    name: str
    cores: int
    threads: int
    simd: tuple[str, ...]
    numa_nodes: int


@dataclass(frozen=True)
class RamInfo:
    total_bytes: int
    available_bytes: int
    swap_total_bytes: int
    notes: tuple[str, ...] = ()


def detect_os(root: Path, system: str | None = None) -> OsInfo:
    """`system` is platform.system() unless a test says otherwise."""
    system = system or platform.system()
    if system != "Linux":
        family = {"Windows": "windows", "Darwin": "macos"}.get(system, system.lower())
        return OsInfo(family, f"{system} {platform.release()}".strip(), platform.version(), False)
    version = _text(root / "proc/version").lower()
    kernel = _text(root / "proc/sys/kernel/osrelease").strip() or platform.release()
    is_microsoft = "microsoft" in version or "microsoft" in kernel.lower()
    is_wsl2 = is_microsoft and ("wsl2" in version + kernel.lower() or "microsoft-standard" in version + kernel.lower())
    notes = ("this is WSL 1, which has no GPU: `wsl --set-version DISTRIBUTION 2` turns it into WSL 2",)
    return OsInfo("linux", _distribution(root), kernel, is_wsl2, notes if is_microsoft and not is_wsl2 else ())


def detect_cpu(root: Path) -> CpuInfo:
    text = _text(root / "proc/cpuinfo")
    name = _field(text, "model name") or _field(text, "Model") or platform.processor() or platform.machine()
    processors = [block for block in text.split("\n\n") if re.search(r"^processor\s*:", block, re.M)]
    pairs = {(_field(b, "physical id"), _field(b, "core id")) for b in processors if _field(b, "core id")}
    threads = len(processors) or os.cpu_count() or 1
    flags = set((_field(text, "flags") or _field(text, "Features") or "").split())
    nodes = len(list((root / "sys/devices/system/node").glob("node[0-9]*")))
    return CpuInfo(name, len(pairs) or threads, threads, tuple(f for f in SIMD_FLAGS if f in flags), max(nodes, 1))


def detect_ram(root: Path) -> RamInfo:
    """`total_bytes`: of the host or, where that is less, the smallest limit of this process's control groups.
    `available_bytes`: what can be taken now without swapping, as the kernel's MemAvailable, and no more than any of
    these groups has left. Page cache counts as available in both: the kernel drops it before it refuses memory."""
    text = _text(root / "proc/meminfo")
    if not text:
        return _ram_without_proc()
    sizes = {k: int(v) * KIB for k, v in re.findall(r"^(\w+):\s+(\d+) kB", text, re.M)}
    total = sizes.get("MemTotal", 0)
    available = sizes.get("MemAvailable", sizes.get("MemFree", 0))
    notes: tuple[str, ...] = ()
    groups = _control_group_limits(root)
    limit = min((limit for limit, _ in groups), default=total)
    if limit < total:
        notes = (f"this container may use {limit // (KIB * KIB)} MiB of the host's {total // (KIB * KIB)} MiB",)
    available = min([available, *(left for _, left in groups)])
    return RamInfo(min(limit, total), available, sizes.get("SwapTotal", 0), notes)


def available_ram_bytes(root: str | Path = "/") -> int:
    """`detect_ram`'s, for those who ask for nothing else."""
    return detect_ram(Path(root)).available_bytes


def usable_cores(root: str | Path = "/") -> int:
    """Cores that this process may keep busy: those that it may run on, or what the smallest quota of its control groups
    allows (`docker run --cpus`) where that is less. At least one."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *(math.floor(quota) for quota in _cpu_quotas(Path(root)))]))


def memlock_limit_bytes() -> int | None:
    """Bytes this process may lock in RAM; None when there is no limit (or on systems without one)."""
    soft = most_locked_bytes()
    if soft is None:
        return None
    capabilities = re.search(r"^CapEff:\s*([0-9a-fA-F]+)$", _text(Path("/proc/self/status")), re.M)
    return None if capabilities and int(capabilities[1], 16) & CAP_IPC_LOCK else soft


def _control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control group and of those around it, of versions 2 and 1."""
    groups = dict(re.findall(r"^\d+:([^:]*):(.*)$", _text(root / "proc/self/cgroup"), re.M))
    v1_path = next((path for names, path in groups.items() if controller in names.split(",")), "/")
    for base, path in ((root / _CGROUPS, groups.get("", "/")), (root / _CGROUPS / controller, v1_path)):
        own = base / path.lstrip("/")
        yield from (group for group in (own, *own.parents) if group.is_relative_to(base))


def _control_group_limits(root: Path) -> list[tuple[int, int]]:
    """(limit, what is left of it) of each control group's memory."""
    found: list[tuple[int, int]] = []
    for group in _control_groups(root, "memory"):
        limit = (_text(group / "memory.max") or _text(group / "memory.limit_in_bytes")).strip()
        usage = (_text(group / "memory.current") or _text(group / "memory.usage_in_bytes")).strip()
        if limit.isdigit() and int(limit) < _NO_LIMIT_BYTES:
            used_bytes = int(usage or 0) - _page_cache_bytes(_text(group / "memory.stat"))
            found.append((int(limit), max(0, int(limit) - max(0, used_bytes))))
    return found


def _cpu_quotas(root: Path) -> list[float]:
    """Cores that each control group may keep busy."""
    found: list[float] = []
    for group in _control_groups(root, "cpu"):
        quota, _, period = _text(group / "cpu.max").strip().partition(" ")
        quota = quota or _text(group / "cpu.cfs_quota_us").strip()  # "max", or -1: no limit
        period = period or _text(group / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period):
            found.append(int(quota) / int(period))
    return found


def _page_cache_bytes(stat: str) -> int:
    """Page cache of a control group: counted as used, but dropped before memory is refused. Both lists, as in
    MemAvailable; of version 1 those that include the groups within (`total_`), as its usage does."""
    sizes = dict(re.findall(r"^(\w+) (\d+)$", stat, re.M))
    return sum(int(sizes.get(f"total_{name}", sizes.get(name, 0))) for name in ("active_file", "inactive_file"))


def _ram_without_proc() -> RamInfo:
    if sys.platform == "win32":
        import ctypes

        class MemoryStatus(ctypes.Structure):
            _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong)] + [
                (name, ctypes.c_ulonglong)
                for name in ("total", "available", "page_total", "page_free", "virtual", "virtual_free", "extended")
            ]

        status = MemoryStatus(length=ctypes.sizeof(MemoryStatus))
        if ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
            return RamInfo(status.total, status.available, 0)
        return RamInfo(0, 0, 0, ("Windows did not tell how much RAM there is",))
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return RamInfo(0, 0, 0, ("the amount of RAM cannot be read on this system",))
    return RamInfo(total, total, 0, ("available RAM cannot be read on this system: the total is shown",))


def _distribution(root: Path) -> str:
    text = _text(root / "etc/os-release") or _text(root / "usr/lib/os-release")
    match = re.search(r'^PRETTY_NAME="?([^"\n]+)"?', text, re.M)
    return match.group(1) if match else "Linux"


def _field(text: str, name: str) -> str | None:
    match = re.search(rf"^{re.escape(name)}\s*:\s*(.+)$", text, re.M)
    return match.group(1).strip() if match else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""

"""HostSensor: RAM, swap and the resident bytes of this process and its children.

Resident bytes are summed from /proc/<pid>/statm (psutil elsewhere); pages that parent and children share count once
for each, so with forked loader workers the sum is an upper bound. The exact figure (smaps_rollup) walks page tables
under the process's memory lock and would stall a run with tens of GB resident, so it is not used.
Cost: three small reads of /proc a sample; the list of children is renewed every 10 s.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.monitor.sensor import SensorBoard

CHILDREN_REFRESH_S = 10.0


@dataclass
class HostSample:
    """None where the system does not tell."""

    ram_rss_bytes: int | None = None
    ram_available_bytes: int | None = None
    swap_used_bytes: int | None = None
    """Used by the whole machine."""
    own_swap_bytes: int | None = None
    """Of this process alone (VmSwap): what hurts the run."""


class HostSensor:
    """RAM and swap of the machine, resident bytes of process `pid` and its children.

    Args:
        board: where missing sensors are noted.
        proc_root: /proc, or a fake one.
        pid: the process to watch; default: this one.
        psutil_module: psutil, or a fake one; only children (and non-Linux systems) need it.
    """

    def __init__(
        self, board: SensorBoard, proc_root: Path | str = "/proc", pid: int | None = None, psutil_module: Any = None
    ) -> None:
        self._board = board
        self._proc_root = Path(proc_root)
        self._pid = os.getpid() if pid is None else pid
        self._psutil = psutil_module
        self._page_bytes = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
        self._has_proc = (self._proc_root / "meminfo").is_file()
        self._children: list[int] = []
        self._children_at_s = float("-inf")
        self.ram_total_bytes: int | None = board.read("ram_total_bytes", self._read_total, what="RAM size")

    def sample(self) -> HostSample:
        sample = HostSample()
        sample.ram_rss_bytes = self._board.read("ram_rss_bytes", self._read_rss, what="Resident memory")
        memory = self._board.read("ram_available_bytes", self._read_memory, what="Available RAM")
        if memory is not None:
            sample.ram_available_bytes, sample.swap_used_bytes = memory
        if self._has_proc:
            sample.own_swap_bytes = self._board.read("own_swap_bytes", self._read_own_swap, what="Swap of the process")
        return sample

    def _import_psutil(self) -> Any:
        if self._psutil is None:
            import psutil

            self._psutil = psutil
        return self._psutil

    def _read_total(self) -> int:
        if self._has_proc:
            return read_meminfo(self._proc_root)["MemTotal"]
        return int(self._import_psutil().virtual_memory().total)

    def _read_memory(self) -> tuple[int, int]:
        if self._has_proc:
            info = read_meminfo(self._proc_root)
            return info["MemAvailable"], info.get("SwapTotal", 0) - info.get("SwapFree", 0)
        psutil = self._import_psutil()
        return int(psutil.virtual_memory().available), int(psutil.swap_memory().used)

    def _read_rss(self) -> int:
        total_bytes = self._rss_of(self._pid)
        for pid in self._list_children():
            try:
                total_bytes += self._rss_of(pid)
            except Exception:  # the child has ended since the list was made: it holds nothing
                self._children_at_s = float("-inf")
        return total_bytes

    def _rss_of(self, pid: int) -> int:
        if self._has_proc:
            return int((self._proc_root / str(pid) / "statm").read_text().split()[1]) * self._page_bytes
        return int(self._import_psutil().Process(pid).memory_info().rss)

    def _list_children(self) -> list[int]:
        now_s = time.monotonic()
        if now_s - self._children_at_s >= CHILDREN_REFRESH_S:
            self._children_at_s = now_s
            found = self._board.read("children", self._find_children, what="The list of child processes")
            self._children = found or []
        return self._children

    def _find_children(self) -> list[int]:
        return [child.pid for child in self._import_psutil().Process(self._pid).children(recursive=True)]

    def _read_own_swap(self) -> int:
        for line in (self._proc_root / str(self._pid) / "status").read_text().splitlines():
            if line.startswith("VmSwap:"):
                return int(line.split()[1]) * 1024
        return 0


def read_meminfo(proc_root: Path | str = "/proc") -> dict[str, int]:
    """/proc/meminfo as bytes by name.

    Raises:
        OSError: the file cannot be read.
    """
    info = {}
    for line in (Path(proc_root) / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words:
            info[name] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return info

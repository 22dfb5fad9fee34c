"""HostSensor: RAM, swap and the resident bytes of this process and its children.

Resident bytes are summed from /proc/<pid>/statm (psutil elsewhere); pages that parent and children share count once
for each, so with forked loader workers the sum is an upper bound. The exact figure (smaps_rollup) walks page tables
under the process's memory lock and would stall a run with tens of GB resident, so it is not used.
Cost: some ten small reads of /proc and /sys a sample; the list of children is renewed every 10 s.

SensorBoard: reads sensors that may be missing, fail or vanish, and says so once for each.

A sensor that fails is switched off for the rest of the run (its value is None from then on) and leaves one sentence
for people. Nothing a sensor does can raise into the run. Cost: one dict look-up per read beside the sensor itself."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from outcore.common.quantities import KIB
from outcore.machine import detect_ram

T = TypeVar("T")


class SensorBoard:
    """Sensors that work, and one sentence for each that does not. Safe to use from several threads."""

    def __init__(self) -> None:
        self._off: set[str] = set()
        self._sentences: dict[str, str] = {}
        self._num_taken = 0
        self._lock = threading.Lock()

    def read(self, name: str, read: Callable[[], T | None], *, what: str) -> T | None:
        """The value of `read()`, or None where the sensor is off or fails now (then it is off from now on).

        Args:
            name: key of the sensor, e.g. "gpu_temp_c".
            what: the sensor in words for the sentence, e.g. "GPU temperature"."""
        if name in self._off:
            return None
        try:
            return read()
        except Exception as error:  # a sensor must never stop a training run, whatever its driver raises
            self.switch_off(name, f"{what}: not available ({describe(error)}); {name} is null from now on.")
            return None

    def switch_off(self, name: str, sentence: str) -> None:
        """Turn the sensor off for good; `sentence` is kept unless one was given for it before."""
        self._off.add(name)
        self.note(name, sentence)

    def note(self, name: str, sentence: str) -> None:
        """Keep a sentence under `name` once, without turning anything off."""
        with self._lock:
            self._sentences.setdefault(name, sentence)

    def is_off(self, name: str) -> bool:
        return name in self._off

    def explanations(self) -> list[str]:
        """Every sentence so far, in the order in which the sensors fell away."""
        with self._lock:
            return list(self._sentences.values())

    def take_new(self) -> list[str]:
        """The sentences that an earlier call has not returned."""
        with self._lock:
            sentences = list(self._sentences.values())[self._num_taken :]
            self._num_taken += len(sentences)
            return sentences


def describe(error: BaseException) -> str:
    """An exception in words: its message, or its type where it has none."""
    return str(error).strip().rstrip(".") or type(error).__name__


CHILDREN_REFRESH_S = 10.0


@dataclass
class HostSample:
    """Readings of the host; None where the system does not tell."""

    ram_rss_bytes: int | None = None
    ram_available_bytes: int | None = None
    swap_used_bytes: int | None = None
    """Used by the whole machine."""
    own_swap_bytes: int | None = None
    """Swap of this process alone (VmSwap): what hurts the run."""


class HostSensor:
    """RAM and swap of the machine (or of the container, where it has a limit), resident bytes of process `pid`.

    Args:
        board: where missing sensors are noted.
        root: where `proc` and `sys` are looked for; tests replace it.
        pid: the process to watch, with its children; default: this one.
        psutil_module: psutil, or a fake one; only children (and systems without /proc) need it."""

    def __init__(
        self, board: SensorBoard, root: Path | str = "/", pid: int | None = None, psutil_module: Any = None
    ) -> None:
        self._board = board
        self._root = Path(root)
        self._pid = os.getpid() if pid is None else pid
        self._psutil = psutil_module
        self._page_bytes = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
        self._has_proc = (self._root / "proc" / "meminfo").is_file()
        self._children: list[int] = []
        self._children_at_s = float("-inf")
        ram = board.read("ram_total_bytes", lambda: detect_ram(self._root), what="RAM size")
        self.ram_total_bytes: int | None = None if ram is None else ram.total_bytes

    def sample(self) -> HostSample:
        sample = HostSample()
        sample.ram_rss_bytes = self._board.read("ram_rss_bytes", self._read_rss, what="Resident memory")
        ram = self._board.read("ram_available_bytes", lambda: detect_ram(self._root), what="Available RAM")
        sample.ram_available_bytes = None if ram is None else ram.available_bytes
        if self._has_proc:
            swap_used_bytes = lambda: read_swap_used_bytes(self._root)  # noqa: E731
            sample.swap_used_bytes = self._board.read("swap_used_bytes", swap_used_bytes, what="Swap in use")
            sample.own_swap_bytes = self.read_own_swap_bytes()
        return sample

    def read_own_swap_bytes(self) -> int | None:
        """Pages of the watched process (without its children) that lie in swap."""
        if not self._has_proc:
            return None
        return self._board.read("own_swap_bytes", self._read_own_swap, what="Swap of the process")

    def _import_psutil(self) -> Any:
        if self._psutil is None:
            import psutil

            self._psutil = psutil
        return self._psutil

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
            return int((self._root / "proc" / str(pid) / "statm").read_text().split()[1]) * self._page_bytes
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
        status = (self._root / "proc" / str(self._pid) / "status").read_text()
        found = re.search(r"^VmSwap:\s+(\d+) kB", status, re.M)
        return int(found.group(1)) * KIB if found else 0


def read_swap_used_bytes(root: Path | str = "/") -> int:
    """Swap in use by the whole machine.

    Raises:
        OSError: there is no /proc/meminfo."""
    text = (Path(root) / "proc" / "meminfo").read_text()
    sizes = {name: int(size) for name, size in re.findall(r"^(Swap\w+):\s+(\d+) kB", text, re.M)}
    return (sizes.get("SwapTotal", 0) - sizes.get("SwapFree", 0)) * KIB

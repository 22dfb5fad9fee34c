"""The topology of this machine: NVLink from NVML, bridges and NUMA nodes from /sys."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from outcore.machine.records import Gpu
from outcore.machine.topology.islands import PlacedGpu, Topology, islands_of

PCI_ADDRESS = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")


def detect_topology(
    gpus: Sequence[Gpu], *, sys_root: str | Path = "/", host: str | None = None, nvml: Any = None
) -> Topology:
    """How these GPUs of this machine are joined. `nvml`: a module with pynvml's functions; None imports pynvml."""
    host = host or platform.node() or "localhost"
    placed, notes = [], []
    for gpu in gpus:
        folder = _pci_folder(Path(sys_root), gpu.pci_bus_id)
        bridges = () if folder is None else tuple(p for p in folder.parts if PCI_ADDRESS.match(p))[:-1]
        placed.append(PlacedGpu(host, gpu.index, gpu.name, bridges, _numa_node(folder)))
        if folder is None:
            notes.append(f"/sys does not show GPU {gpu.index} (WSL2 hides it): its PCIe bridges are not known")
    nvlinks, note = _nvlinks(placed, nvml) if len(placed) > 1 else (frozenset(), "")
    notes += [note] * bool(note)
    return Topology(islands_of(tuple(placed), nvlinks), "NVML and /sys", nvlinks, tuple(notes))


def _pci_folder(root: Path, bus_id: str | None) -> Path | None:
    """The device's real folder in /sys, whose parents are its bridges. nvidia-smi writes the domain with eight digits,
    the kernel with four."""
    if bus_id is None:
        return None
    domain, _, rest = bus_id.lower().partition(":")
    link = root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}"
    return Path(os.path.realpath(link)) if link.exists() else None


def _numa_node(folder: Path | None) -> int | None:
    try:
        node = -1 if folder is None else int((folder / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None  # -1: the firmware does not say


def _nvlinks(gpus: Sequence[PlacedGpu], nvml: Any) -> tuple[frozenset[tuple[str, int, int]], str]:
    """(pairs that NVLink joins, directly or through NVSwitch; why they are not known)."""
    try:
        nvml = nvml or import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # the package, the library or the driver is missing
        return frozenset(), f"NVML does not tell of NVLink ({type(error).__name__}: {error}): taken as absent"
    try:
        handles = {gpu.index: nvml.nvmlDeviceGetHandleByIndex(gpu.index) for gpu in gpus}
        found = {
            (a.host, a.index, b.index)
            for a in gpus
            for b in gpus
            if a.index < b.index
            and nvml.nvmlDeviceGetP2PStatus(handles[a.index], handles[b.index], nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            == nvml.NVML_P2P_STATUS_OK
        }
        return frozenset(found), ""
    except Exception as error:  # NVMLError; an old library lacks the function
        return frozenset(), f"NVML does not tell of NVLink ({type(error).__name__}: {error}): taken as absent"
    finally:
        nvml.nvmlShutdown()

"""Homes of a model's parts: which of them stay on the device, where the others live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outcore.sizing.inference.needs import Home, PartSize


@dataclass(frozen=True)
class PartHome:
    """Home where one part lives: decided once, printed, never changed."""

    part: str
    home: Home
    size_bytes: int
    ram_bytes: int
    """Bytes of a part that travels: so much of it is in RAM, the rest on NVMe."""
    is_experts: bool = False
    """Whether it comes to the device expert by expert."""
    is_rows: bool = False
    """Whether the device reads rows of it in RAM, so that it does not travel."""

    @property
    def travels(self) -> bool:
        """Whether all of it comes to the device in every pass."""
        return self.home != "vram" and not self.is_experts and not self.is_rows


def spread(
    parts: Sequence[PartSize], left: int, buffers: int, end_buffer: int, *, reads_ram: bool = False
) -> tuple[dict[str, PartHome], int]:
    """(homes of the parts that need not travel, bytes of buffers for the others). `reads_ram`: the device can read rows
    of an embedding in RAM, so that other weights stay in its place."""
    weights = sum(part.size_bytes for part in parts)
    if weights <= left:
        return _in_vram(parts), 0
    if reads_ram and any(part.is_rows for part in parts):
        rows = {p.name: PartHome(p.name, "ram", p.size_bytes, p.size_bytes, is_rows=True) for p in parts if p.is_rows}
        homes, streams = spread([part for part in parts if not part.is_rows], left, buffers, end_buffer)
        return homes | rows, streams
    ends = sorted((part for part in parts if not part.is_layer), key=lambda part: part.size_bytes)
    stay: list[PartSize] = []
    room = left - buffers
    if sum(part.size_bytes for part in ends) <= room:
        stay, room, end_buffer = ends, room - sum(part.size_bytes for part in ends), 0
    else:
        room -= end_buffer
    layers = [part for part in parts if part.is_layer]
    share = min(1.0, max(0.0, room / max(1, sum(part.size_bytes for part in layers))))
    passed = taken = 0.0
    for part in layers:
        passed += part.size_bytes
        if taken + part.size_bytes <= min(room, share * passed + 1e-6):
            stay.append(part)
            taken += part.size_bytes
    return _in_vram(stay), buffers + end_buffer


def _in_vram(parts: Sequence[PartSize]) -> dict[str, PartHome]:
    return {part.name: PartHome(part.name, "vram", part.size_bytes, 0) for part in parts}


def in_ram(parts: Sequence[PartSize], ram_bytes: int) -> tuple[PartHome, ...]:
    """Parts that travel: all of each in RAM, or of every layer the same share and the rest on NVMe. Experts that come
    one by one have what the others leave, which are read in every pass."""
    experts = [part for part in parts if part.is_experts]
    if experts and len(experts) < len(parts):
        others = in_ram([part for part in parts if not part.is_experts], ram_bytes)
        return others + in_ram(experts, ram_bytes - sum(home.ram_bytes for home in others))
    total = sum(part.size_bytes for part in parts)
    ends = sum(part.size_bytes for part in parts if not part.is_layer)
    spare = max(0, ram_bytes)
    share = 1.0 if total <= spare else max(0.0, (spare - ends) / max(1, total - ends))

    def home_of(part: PartSize) -> PartHome:
        size = part.size_bytes if not part.is_layer else int(part.size_bytes * share)
        home: Home = "ram" if size == part.size_bytes else "nvme"
        return PartHome(part.name, home, part.size_bytes, size, part.is_experts)

    return tuple(map(home_of, parts))

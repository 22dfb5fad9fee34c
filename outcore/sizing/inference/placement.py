"""Placement: where everything lives while a model answers, and why.

Homes of a model's parts: which of them stay on the device, where the others live."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from outcore.common.quantities import format_gib
from outcore.sizing.inference.experts import ExpertSize
from outcore.sizing.inference.needs import Home, PartSize, PresetRule
from outcore.sizing.inference.pass_bytes import PassSize
from outcore.sizing.inference.rates import InPlaceRates


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


@dataclass(frozen=True)
class Placement:
    """The whole answer."""

    PACKED_ROWS: ClassVar = (1, 2, 4, 8, 16)
    """Tokens of a pass that a GPU may multiply by packed weights as they are: some of `GRAPH_ROWS`, so that a padded
    pass is not taken for a larger one."""

    preset: PresetRule
    parts: tuple[PartHome, ...]
    kv_home: Home
    kv_bytes: int
    context_tokens: int
    max_sequences: int
    pass_tokens: int
    chunk_tokens: int
    num_buffers: int
    vram_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes on the device by item; empty without a device."""
    reasons: tuple[str, ...] = ()
    cpu_parts: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Parts that travel, but are computed by the CPU where they are, by the most tokens of such a pass."""
    cpu_tokens: int = 0
    """Tokens of a pass up to which the CPU computes with weights as they are."""
    cpu_rates: InPlaceRates | None = None
    packed_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds in which a GPU multiplies by a packed byte as it is, by tokens of the pass; weights of larger passes are
    expanded."""
    experts: ExpertSize | None = None
    expert_slots: int = 0
    """Experts that the device holds at a time; 0: experts travel with their layers."""
    runs_few: bool = True
    """Whether passes of few tokens may compute experts where they lie."""

    @classmethod
    def of_one_answer(
        cls, preset: PresetRule, parts: Sequence[PartSize], ram_bytes: int, kv_home: Home, context_tokens: int
    ) -> Placement:
        """Place a model that passes through the device layer by layer and gives one answer at a time."""
        why = "pictures: answers are transformers' own, one after another; keys and values grow with them"
        sizes = context_tokens, 1, context_tokens, context_tokens, 1
        return cls(preset, in_ram(parts, ram_bytes), kv_home, 0, *sizes, reasons=(why,))

    def pass_size(self, guessed_tokens: int = 0) -> PassSize:
        """Size of the largest pass."""
        return PassSize(self.pass_tokens, self.chunk_tokens, self.context_tokens, self.max_sequences, guessed_tokens)

    @property
    def packed_tokens(self) -> int:
        """Tokens of a pass up to which a GPU multiplies packed weights as they are."""
        return max(self.packed_s, default=0)

    def because(self, reason: str, **changed: Any) -> Placement:
        """Add a reason, and what it changes."""
        return replace(self, reasons=(*self.reasons, reason), **changed)

    def on_cpu(self, tokens: float) -> tuple[str, ...]:
        """Parts that do not travel in a pass of so many tokens, because the CPU computes them."""
        sizes = [most for most in self.cpu_parts if most >= tokens]
        return self.cpu_parts[min(sizes)] if sizes and tokens <= self.cpu_tokens else ()

    def size_of(self, names: Sequence[str]) -> int:
        """Bytes of these parts."""
        return sum(p.size_bytes for p in self.parts if p.part in names)

    def bytes_at(self, home: Home) -> int:
        """Bytes of weights that live there."""
        if home == "vram":
            return sum(p.size_bytes for p in self.parts if p.home == "vram")
        if home == "ram":
            return sum(p.ram_bytes for p in self.parts if p.home != "vram")
        return sum(p.size_bytes - p.ram_bytes for p in self.parts if p.home != "vram")

    @property
    def travelling_bytes(self) -> int:
        """Bytes of weights that cross the link in each pass, without experts that come as they are chosen."""
        return sum(p.size_bytes for p in self.parts if p.travels)

    @property
    def num_arriving(self) -> int:
        """Layers that cross the link in a pass of many tokens."""
        return sum(p.travels for p in self.parts if p.part.startswith("layer"))

    @property
    def travels(self) -> bool:
        """Whether weights come to the device, or from a drive where RAM is the device, in each pass."""
        return bool((self.travelling_bytes or self.expert_slots) if self.vram_bytes else self.bytes_at("nvme"))

    def expert_share(self, tokens: float) -> float:
        """Share of its experts that a pass of so many tokens chooses at most."""
        if self.experts is None:
            return 0.0
        return min(1.0, tokens * self.experts.of_token / self.experts.num_experts)

    @property
    def few_tokens(self) -> int:
        """Tokens of a pass up to which experts are computed where they lie; 0: they are not, because they come with
        their layers, are not packed, or the host brings them (`runs_few`)."""
        can = self.runs_few and self.experts is not None and self.experts.expanded_bytes
        return self.experts.few_tokens if can and self.experts is not None else 0

    def expert_bytes_at(self, home: Home) -> int:
        """Bytes of experts that come as they are chosen, in RAM or on NVMe."""
        experts = [part for part in self.parts if part.is_experts]
        in_ram = sum(part.ram_bytes for part in experts)
        return in_ram if home == "ram" else sum(part.size_bytes for part in experts) - in_ram

    def lines(self) -> list[str]:
        """The placement, for people."""
        counts = {home: sum(p.home == home for p in self.parts) for home in ("vram", "ram", "nvme")}
        words: dict[Home, str] = {"vram": "in VRAM", "ram": "in RAM", "nvme": "on NVMe"}
        where = [f"{format_gib(self.bytes_at(home))} {word}" for home, word in words.items() if self.bytes_at(home)]
        shared = f" ({counts['nvme']} parts lie in RAM and on NVMe)" if counts["nvme"] else ""
        found = [
            f"aim {self.preset.name}: {self.preset.objective}",
            f"weights: {', '.join(where)}{shared}",
            f"keys and values: {format_gib(self.kv_bytes)} {words[self.kv_home]}; context "
            f"{self.context_tokens:,} tokens, up to {self.max_sequences} answers at once",
        ]
        buffers = f"; {self.num_buffers} layers on the GPU at a time" if self.vram_bytes.get("buffers") else ""
        found.append(f"passes: up to {self.pass_tokens:,} tokens in chunks of {self.chunk_tokens:,}{buffers}")
        if self.experts is not None:
            at_once, total = self.expert_slots, self.experts.total
            found.append(
                f"experts: {at_once:,} of {total:,} in {'VRAM' if self.vram_bytes else 'slots in RAM'} at a time "
                f"({format_gib(at_once * self.experts.slot_bytes)}), the others are read as they are chosen"
            )
        if self.vram_bytes:
            found.append(
                f"VRAM: {format_gib(sum(self.vram_bytes.values()))} "
                f"({', '.join(f'{name} {format_gib(size)}' for name, size in self.vram_bytes.items())})"
            )
        return found + list(self.reasons)

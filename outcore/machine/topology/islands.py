"""GPUs and what lies between them. An *island* is a set of GPUs whose every pair is close: tensor parallelism, which
sums activations over its GPUs twice a layer, stays inside one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class PlacedGpu:
    """A GPU and where it sits."""

    host: str
    index: int
    """Number on that host, in the order of nvidia-smi."""
    name: str = ""
    bridges: tuple[str, ...] = ()
    """PCI addresses from the root port down to the last bridge above it; () where the system does not tell."""
    numa_node: int | None = None

    @property
    def words(self) -> str:
        return f"GPU {self.index} of {self.host}"


@dataclass(frozen=True)
class Topology:
    """All GPUs of one or several hosts, each in exactly one island."""

    islands: tuple[tuple[PlacedGpu, ...], ...]
    source: str
    """What told it: 'NVML and /sys', or a file."""
    nvlinks: frozenset[tuple[str, int, int]] = frozenset()
    """(host, lower index, higher index) of pairs that NVLink joins, as far as that was read."""
    notes: tuple[str, ...] = ()
    """What could not be read, and what was taken instead."""

    @property
    def gpus(self) -> tuple[PlacedGpu, ...]:
        return tuple(gpu for island in self.islands for gpu in island)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(gpu.host for gpu in self.gpus))

    @property
    def nvlink_domains(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the GPUs of each island whose every pair NVLink joins."""
        return tuple(
            tuple(gpu.index for gpu in island)
            for island in self.islands
            if len(island) > 1
            and all(self.between(a, b) == "NVLink" for a in island for b in island if a.index < b.index)
        )

    def between(self, one: PlacedGpu, other: PlacedGpu) -> str:
        """The nearest thing that joins two GPUs, in words."""
        if one.host != other.host:
            return "network"
        if (one.host, *sorted((one.index, other.index))) in self.nvlinks:
            return "NVLink"
        shared = [a for a, b in zip(one.bridges, other.bridges, strict=False) if a == b]
        if shared:
            return f"PCIe switch below {shared[-1]}"
        if None not in (one.numa_node, other.numa_node) and one.numa_node != other.numa_node:
            return "link between sockets"
        return "CPU's PCIe"

    def lines(self) -> Iterator[str]:
        """Tell it to people: each island, then what joins its GPUs."""
        total, word = len(self.gpus), "island" if len(self.islands) == 1 else "islands"
        if not total:
            yield f"no GPUs (by {self.source})"
        else:
            yield f"{total} GPU{'s' * (total > 1)} in {len(self.islands)} {word} (by {self.source})"
        for number, island in enumerate(self.islands):
            numbers = ", ".join(str(gpu.index) for gpu in island)
            nodes = sorted({str(gpu.numa_node) for gpu in island if gpu.numa_node is not None})
            joined = sorted({self.between(a, b) for a in island for b in island if a.index < b.index})
            more = [f"NUMA node {', '.join(nodes)}"] * bool(nodes) + [f"over {', '.join(joined)}"] * bool(joined)
            yield f"  island {number}: {island[0].host}, GPU {numbers}" + "".join(f"; {words}" for words in more)
        for uplink, gpus in self._shared_uplinks().items():
            yield f"  {' and '.join(gpus)} share one link to the CPU ({uplink}): streaming halves on each"
        yield from (f"  note: {note}" for note in self.notes)

    def _shared_uplinks(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for gpu in self.gpus:
            if gpu.bridges:
                found.setdefault(f"{gpu.host}, root port {gpu.bridges[0]}", []).append(f"GPU {gpu.index}")
        return {uplink: gpus for uplink, gpus in found.items() if len(gpus) > 1}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "source": self.source,
            "islands": [[asdict(gpu) for gpu in island] for island in self.islands],
            "nvlinks": sorted([host, a, b] for host, a, b in self.nvlinks),
            "notes": list(self.notes),
        }


def islands_of(
    gpus: tuple[PlacedGpu, ...], nvlinks: frozenset[tuple[str, int, int]]
) -> tuple[tuple[PlacedGpu, ...], ...]:
    """Islands of one host. GPUs that NVLink joins, also through a switch, are one; the others are one for each NUMA
    node, because what passes between two of them stays within a socket."""
    island_of = {gpu.index: gpu.index for gpu in gpus}
    for _, one, other in sorted(nvlinks):
        if one in island_of and other in island_of:
            lower, higher = sorted((island_of[one], island_of[other]))
            island_of = {index: lower if island == higher else island for index, island in island_of.items()}
    linked = {index for _, *pair in nvlinks for index in pair}
    groups: dict[Any, list[PlacedGpu]] = {}
    for gpu in gpus:
        key = ("nvlink", island_of[gpu.index]) if gpu.index in linked else ("node", gpu.numa_node)
        groups.setdefault(key, []).append(gpu)
    return tuple(tuple(group) for group in groups.values())

"""Tensor parallel groups laid inside islands, pipeline stages across them, and layers shared out among stages.

GPUs and what lies between them. An *island* is a set of GPUs whose every pair is close: tensor parallelism, which
sums activations over its GPUs twice a layer, stays inside one.

The topology of this machine: NVLink from NVML, bridges and NUMA nodes from /sys.

A cluster's topology from a file that its owner writes, in YAML or JSON:

hosts:
  - name: node1
    islands: [[0, 1, 2, 3], [4, 5, 6, 7]]
    numa_nodes: [0, 1]                  # one for each island; may be left out
  - name: node2
    gpus: 4                             # all in one island"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

from outcore.common.words import nearest
from outcore.machine.records import Gpu


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
    """GPUs of one or several hosts, each in exactly one island."""

    islands: tuple[tuple[PlacedGpu, ...], ...]
    source: str
    """Source of the topology: 'NVML and /sys', or a file."""
    nvlinks: frozenset[tuple[str, int, int]] = frozenset()
    """(host, lower index, higher index) of pairs that NVLink joins, as far as that was read."""
    notes: tuple[str, ...] = ()
    """Facts that could not be read, and what was taken instead."""

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


PCI_ADDRESS = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")


def detect_topology(
    gpus: Sequence[Gpu], *, sys_root: str | Path = "/", host: str | None = None, nvml: Any = None
) -> Topology:
    """Detect how these GPUs of this machine are joined. `nvml`: a module with pynvml's functions; None imports
    pynvml."""
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


KEYS = ("name", "islands", "gpus", "numa_nodes")


def read_cluster(path: str | Path) -> Topology:
    """ValueError naming the file and the entry that is wrong; OSError where it cannot be read."""
    file = Path(path)
    text = file.read_text(encoding="utf-8")
    try:
        if file.suffix == ".json":
            record = json.loads(text)
        else:
            import yaml

            record = yaml.safe_load(text)
    except Exception as error:  # yaml and json have their own exception trees
        raise ValueError(f"{file} is neither JSON nor YAML: {error}") from error
    try:
        return Topology(_islands(record), f"the file {file}")
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _islands(record: Any) -> tuple[tuple[PlacedGpu, ...], ...]:
    if not isinstance(record, dict) or set(record) != {"hosts"} or not isinstance(record["hosts"], list):
        raise ValueError("a cluster is written as `hosts:` with a list below it, and nothing else.")
    found: list[tuple[PlacedGpu, ...]] = []
    names: set[str] = set()
    for number, host in enumerate(record["hosts"]):
        where = f"hosts[{number}]"
        if not isinstance(host, dict) or not isinstance(host.get("name"), str) or not host["name"]:
            raise ValueError(f"{where} needs a name.")
        if host["name"] in names:
            raise ValueError(f"{where}: the host {host['name']} is there twice.")
        names.add(host["name"])
        found += _islands_of_host(host, f"{where} ({host['name']})")
    if not found:
        raise ValueError("there are no hosts.")
    return tuple(found)


def _islands_of_host(host: dict[str, Any], where: str) -> list[tuple[PlacedGpu, ...]]:
    for key in host:
        if key not in KEYS:
            near = nearest(str(key), KEYS, cutoff=0.4)
            raise ValueError(f"{where} has an unknown key {key!r}." + (f" Did you mean {near[0]}?" if near else ""))
    if ("gpus" in host) == ("islands" in host):
        raise ValueError(f"{where} needs either gpus (how many) or islands (lists of their numbers).")
    count = host.get("gpus")
    if count is not None and (type(count) is not int or count < 1):
        raise ValueError(f"{where}: gpus is {count!r}, but must be a whole number of at least 1.")
    islands = [list(range(count))] if count is not None else host["islands"]
    if (
        not isinstance(islands, list)
        or not islands
        or not all(isinstance(island, list) and island for island in islands)
    ):
        raise ValueError(f"{where}: islands must be lists of GPU numbers, as in [[0, 1], [2, 3]].")
    numbers = [index for island in islands for index in island]
    wrong = next((n for n in numbers if type(n) is not int or n < 0 or numbers.count(n) > 1), None)
    if wrong is not None:
        raise ValueError(f"{where}: {wrong!r} is no GPU number, or stands there twice.")
    nodes = host.get("numa_nodes", [None] * len(islands))
    if not isinstance(nodes, list) or len(nodes) != len(islands):
        raise ValueError(f"{where}: numa_nodes needs one entry for each island ({len(islands)}).")
    return [
        tuple(PlacedGpu(host["name"], index, numa_node=node) for index in island)
        for island, node in zip(islands, nodes, strict=True)
    ]


@dataclass(frozen=True)
class ParallelLayout:
    """Layout of the work: one group of tensor parallel GPUs for each pipeline stage."""

    stages: tuple[tuple[PlacedGpu, ...], ...]

    @property
    def tensor_parallel(self) -> int:
        return len(self.stages[0])

    @property
    def pipeline_parallel(self) -> int:
        return len(self.stages)

    @property
    def gpus(self) -> tuple[PlacedGpu, ...]:
        """GPUs in the order of ranks, stage by stage."""
        return tuple(gpu for stage in self.stages for gpu in stage)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(gpu.host for gpu in self.gpus))


def lay_out(topology: Topology, tensor_parallel: int, pipeline_parallel: int) -> ParallelLayout:
    """Stages on the fewest islands, in order. ValueError with the reason and the way out where a tensor parallel group
    would cross islands or GPUs are too few."""
    for name, count in (("tensor_parallel", tensor_parallel), ("pipeline_parallel", pipeline_parallel)):
        if count < 1:
            raise ValueError(f"{name} is {count}, but must be at least 1.")
    total, wanted = len(topology.gpus), tensor_parallel * pipeline_parallel
    if wanted > total:
        raise ValueError(
            f"tensor_parallel {tensor_parallel} x pipeline_parallel {pipeline_parallel} needs {wanted} GPUs, and there "
            f"are {total} (by {topology.source})."
        )
    groups = [
        island[start : start + tensor_parallel]
        for island in sorted(topology.islands, key=len, reverse=True)
        for start in range(0, len(island) - tensor_parallel + 1, tensor_parallel)
    ]
    if len(groups) < pipeline_parallel:
        raise ValueError(_why_not(topology, tensor_parallel, pipeline_parallel, len(groups)))
    order = {gpu: number for number, gpu in enumerate(topology.gpus)}
    return ParallelLayout(tuple(sorted(groups[:pipeline_parallel], key=lambda group: order[group[0]])))


def _why_not(topology: Topology, tensor_parallel: int, pipeline_parallel: int, num_groups: int) -> str:
    sizes = ", ".join(str(len(island)) for island in topology.islands)
    largest = max(topology.islands, key=len)
    if tensor_parallel > len(largest):
        other = next(gpu for gpu in topology.gpus if gpu not in largest)
        link = topology.between(largest[0], other)
        crossing = (
            f"a group of {tensor_parallel} would cross from the island of {largest[0].words} into that of "
            f"{other.words} ({link}), where each layer's two sums would wait for the slower link"
        )
    else:
        crossing = f"only {num_groups} of {pipeline_parallel} groups of {tensor_parallel} fit inside islands"
    wanted = tensor_parallel * pipeline_parallel
    fit = [
        (t, wanted // t)
        for t in range(min(len(largest), wanted), 0, -1)
        if wanted % t == 0 and sum(len(island) // t for island in topology.islands) >= wanted // t
    ]
    tensor, pipeline = fit[0]  # 1 x wanted always fits: there are enough GPUs
    return (
        f"tensor_parallel {tensor_parallel} x pipeline_parallel {pipeline_parallel}: islands have {sizes} GPUs, and "
        f"{crossing}. Take tensor_parallel {tensor} and pipeline_parallel {pipeline}; where the islands are really "
        "one, say so in a cluster file."
    )


def balanced_stages(costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage so that the dearest stage is as cheap as can be. `costs`: bytes or measured seconds of each
    layer; `first`, `last`: what the embedding and the head add to their stages. ValueError for too few layers."""
    num = len(costs)
    if not 1 <= num_stages <= num:
        raise ValueError(f"{num} layers cannot be shared out among {num_stages} stages: each needs one at least.")
    sums = [0.0, *accumulate(costs)]

    def cost(start: int, stop: int) -> float:
        return sums[stop] - sums[start] + first * (start == 0) + last * (stop == num)

    # best[stop]: (dearest stage, where the last one begins) of the first `stop` layers, for each number of stages.
    best = [[(cost(0, stop), 0) for stop in range(num + 1)]]
    for stage in range(1, num_stages):
        before = best[-1]
        best.append(
            [
                min(((max(before[s][0], cost(s, stop)), s) for s in range(stage, stop)), default=(float("inf"), 0))
                for stop in range(num + 1)
            ]
        )
    cuts, stop = [], num
    for stage in reversed(best):
        start = stage[stop][1]
        cuts.append(stop - start)
        stop = start
    return tuple(reversed(cuts))

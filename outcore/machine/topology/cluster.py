"""A cluster's topology from a file that its owner writes, in YAML or JSON:

hosts:
  - name: node1
    islands: [[0, 1, 2, 3], [4, 5, 6, 7]]
    numa_nodes: [0, 1]                  # one for each island; may be left out
  - name: node2
    gpus: 4                             # all in one island
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from outcore.common.words import nearest
from outcore.machine.topology.islands import PlacedGpu, Topology

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

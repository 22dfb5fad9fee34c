"""Islands from faked /sys trees, NVML and cluster files; groups laid on them; layers shared out among stages."""

import itertools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from outcore.cli import main
from outcore.machine import Machine, detect_machine
from outcore.machine.records import Gpu
from outcore.machine.topology import balanced_stages, detect_topology, lay_out, read_cluster
from tests.machine.fakes import RTX4070_CSV, link, linux_root, smi, write
from tests.refused import refused


def gpus(count: int) -> list[Gpu]:
    return [Gpu(i, "RTX", 8 << 30, pci_bus_id=f"00000000:{i + 1:02X}:00.0") for i in range(count)]


def tree(root: Path, *folders: str, nodes: tuple[int, ...]) -> Path:
    """GPUs 1, 2, ... below these bridges of /sys/devices."""
    for number, (folder, node) in enumerate(zip(folders, nodes, strict=True), start=1):
        device = root / "sys/devices" / folder / f"0000:{number:02x}:00.0"
        write(device / "numa_node", f"{node}\n")
        link(root / f"sys/bus/pci/devices/0000:{number:02x}:00.0", device)
    return root


def nvml(*pairs: tuple[int, int]):
    def status(one: int, other: int, what: int) -> int:
        assert what == 2
        return 0 if (one, other) in pairs else 1

    return SimpleNamespace(
        nvmlInit=lambda: None, nvmlShutdown=lambda: None, nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetP2PStatus=status, NVML_P2P_CAPS_INDEX_NVLINK=2, NVML_P2P_STATUS_OK=0,
    )  # fmt: skip


def numbers(topology) -> list[list[int]]:
    return [[gpu.index for gpu in island] for island in topology.islands]


def test_two_cards_without_nvlink_are_one_island_over_the_cpu(tmp_path):
    root = tree(tmp_path, "pci0000:00/0000:00:01.0", "pci0000:00/0000:00:01.1", nodes=(-1, -1))
    topology = detect_topology(gpus(2), sys_root=root, host="desk", nvml=nvml())
    assert numbers(topology) == [[0, 1]]
    assert topology.between(*topology.gpus) == "CPU's PCIe" and topology.nvlink_domains == ()
    assert list(topology.lines())[1] == "  island 0: desk, GPU 0, 1; over CPU's PCIe"


def test_cards_below_one_switch_share_a_link_to_the_cpu(tmp_path):
    port = "pci0000:00/0000:00:01.0/0000:0a:00.0"
    root = tree(tmp_path, f"{port}/0000:0b:00.0", f"{port}/0000:0b:01.0", nodes=(0, 0))
    topology = detect_topology(gpus(2), sys_root=root, host="desk", nvml=nvml())
    assert topology.between(*topology.gpus) == "PCIe switch below 0000:0a:00.0"
    assert "GPU 0 and GPU 1 share one link to the CPU (desk, root port 0000:00:01.0)" in "\n".join(topology.lines())


def test_sockets_part_cards_that_nvlink_does_not_join(tmp_path):
    root = tree(tmp_path, *(f"pci0000:{n}0/0000:{n}0:01.0" for n in range(4)), nodes=(0, 0, 1, 1))
    alone = detect_topology(gpus(4), sys_root=root, nvml=nvml())
    assert numbers(alone) == [[0, 1], [2, 3]]
    assert alone.between(alone.gpus[1], alone.gpus[2]) == "link between sockets"
    bridged = detect_topology(gpus(4), sys_root=root, host="box", nvml=nvml((0, 2), (1, 3)))
    assert numbers(bridged) == [[0, 2], [1, 3]]
    assert bridged.between(bridged.gpus[0], bridged.gpus[1]) == "NVLink"
    switched = detect_topology(gpus(4), sys_root=root, nvml=nvml(*itertools.combinations(range(4), 2)))
    assert numbers(switched) == [[0, 1, 2, 3]]


def test_what_cannot_be_read_is_noted_not_guessed(tmp_path):
    def broken():
        raise RuntimeError("no driver")

    topology = detect_topology(gpus(2), sys_root=tmp_path, nvml=SimpleNamespace(nvmlInit=broken))
    assert numbers(topology) == [[0, 1]]
    assert [gpu.bridges for gpu in topology.gpus] == [(), ()]
    assert len(topology.notes) == 3 and "no driver" in topology.notes[2]


CLUSTER = """
hosts:
  - {name: node1, islands: [[0, 1], [2, 3]], numa_nodes: [0, 1]}
  - {name: node2, gpus: 4}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    return file


def test_cluster_file_in_yaml_and_json(cluster):
    topology = read_cluster(cluster)
    assert [(i[0].host, [g.index for g in i]) for i in topology.islands] == [
        ("node1", [0, 1]), ("node1", [2, 3]), ("node2", [0, 1, 2, 3])
    ]  # fmt: skip
    as_json = cluster.with_suffix(".json")
    as_json.write_text(json.dumps({"hosts": [{"name": "node1", "islands": [[0, 1], [2, 3]], "numa_nodes": [0, 1]},
                                             {"name": "node2", "gpus": 4}]}))  # fmt: skip
    assert read_cluster(as_json).islands == topology.islands


@pytest.mark.parametrize(("text", "words"), [
    ("hosts: {}", "with a list below it"), ("hosts: []", "no hosts"), ("hosts: [{gpus: 2}]", "needs a name"),
    ("hosts: [{name: a, gpus: 1}, {name: a, gpus: 1}]", "twice"),
    ("hosts: [{name: a, island: [[0]]}]", "Did you mean islands"), ("hosts: [{name: a}]", "either gpus"),
    ("hosts: [{name: a, gpus: 0}]", "gpus is 0"), ("hosts: [{name: a, islands: [[0], [0]]}]", "0 is no GPU number"),
    ("hosts: [{name: a, islands: [0, 1]}]", "lists of GPU numbers"),
    ("hosts: [{name: a, gpus: 1, numa_nodes: [0, 1]}]", "one entry for each island"),
    ("hosts: [", "neither JSON nor YAML"),
])  # fmt: skip
def test_wrong_cluster_files_are_refused_in_words(tmp_path, text, words):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"c\.yaml") as refused:
        read_cluster(file)
    assert words in str(refused.value)


def test_tensor_parallel_stays_inside_islands_and_pipeline_goes_across(cluster):
    topology = read_cluster(cluster)
    whole = lay_out(topology, 2, 4)
    assert [(stage[0].host, [g.index for g in stage]) for stage in whole.stages] == [
        ("node1", [0, 1]), ("node1", [2, 3]), ("node2", [0, 1]), ("node2", [2, 3])
    ]  # fmt: skip
    assert lay_out(topology, 4, 1).hosts == ("node2",)
    assert lay_out(topology, 2, 2).hosts == ("node2",), "the fewest islands"


@pytest.mark.parametrize(("tensor", "pipeline", "words"), [
    (8, 1, "would cross from the island of GPU 0 of node2 into that of GPU 0 of node1 (network)"),
    (8, 1, "Take tensor_parallel 2 and pipeline_parallel 4"), (4, 2, "only 1 of 2 groups of 4 fit"),
    (4, 2, "Take tensor_parallel 2 and pipeline_parallel 4"), (3, 3, "needs 9 GPUs, and there are 8"),
    (0, 1, "tensor_parallel is 0"),
])  # fmt: skip
def test_groups_that_cannot_be_are_refused_with_the_reason(cluster, tensor, pipeline, words):
    refused(ValueError, re.escape(words), lambda: lay_out(read_cluster(cluster), tensor, pipeline))


def slowest(costs, cuts, first, last):
    ends = list(itertools.accumulate(cuts))
    sums = [sum(costs[end - n : end]) for n, end in zip(cuts, ends, strict=True)]
    sums[0] += first
    sums[-1] += last
    return max(sums)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 5])
@pytest.mark.parametrize(("first", "last"), [(0, 0), (7, 3), (0, 20)])
def test_balanced_stages_are_as_good_as_the_best_of_all_cuts(num_stages, first, last):
    costs = [3, 1, 4, 1, 5, 9, 2, 6]
    found = balanced_stages(costs, num_stages, first, last)
    assert sum(found) == len(costs) and min(found) >= 1
    every = [
        tuple(b - a for a, b in itertools.pairwise((0, *cut, len(costs))))
        for cut in itertools.combinations(range(1, len(costs)), num_stages - 1)
    ]
    assert slowest(costs, found, first, last) == min(slowest(costs, cuts, first, last) for cuts in every)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match="each needs one at least"):
        balanced_stages([1.0, 1.0], 3)


def test_machine_command_shows_islands_and_groups(cluster, capsys):
    assert main(["machine", "--cluster", str(cluster), "--tensor_parallel", "4"]) == 0
    out = capsys.readouterr().out
    assert "8 GPUs in 3 islands" in out and "stage 0: node2, GPU 0, 1, 2, 3" in out
    assert main(["machine", "--cluster", str(cluster), "--tensor_parallel", "8"]) == 2
    assert "would cross" in capsys.readouterr().err
    assert main(["machine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"]["cpu_cores"] >= 1


def test_the_profile_names_nvlink_domains(tmp_path, monkeypatch):
    root = linux_root(tmp_path)
    rows = "\n".join(RTX4070_CSV.strip().replace("0, ", f"{n}, ", 1) for n in range(4))
    monkeypatch.setitem(sys.modules, "pynvml", nvml((0, 1), (2, 3)))
    machine = detect_machine(sys_root=root, runner=smi(rows), system="Linux")
    assert machine.nvlink_domains == ((0, 1), (2, 3))
    assert Machine.from_json(machine.to_json()) == machine

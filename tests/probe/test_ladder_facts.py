"""Facts behind the ladder, from files and names."""

from types import SimpleNamespace

import pytest

from outcore.probe.gds.facts import collect_facts
from outcore.probe.gds.ladder import ladder_rows
from outcore.probe.gds.nvidia_fs import carried_the_read, parse_stats
from outcore.probe.gds.verdict import gpu_class, on_p2pdma_list
from outcore.probe.system import ChildResult
from tests.probe.ladder_fakes import (
    KVIKIO,
    NATIVE,
    NVME,
    FakeSystem,
    bad_read,
    cufile,
    device,
    good_read,
    lines,
    probe,
    stats,
)


def test_gdscheck_is_quoted() -> None:
    text = " NVMe P2PDMA        : Supported\n NVMe               : Unsupported\n Platform: x86_64\n"
    error = {"step": "device", "devices": [], "error": "none"}
    _, table = probe(FakeSystem(gdscheck=ChildResult(0, text), auto=ChildResult(1, lines(error))))
    assert "NVMe P2PDMA : Supported; NVMe : Unsupported" in table
    _, table = probe(FakeSystem(gdscheck=ChildResult(None, timed_out=True), auto=ChildResult(1, lines(error))))
    assert "gave no answer" in table


@pytest.mark.parametrize(("files", "expected"), [
    ({"/boot/config-6.8.0-45-generic": "CONFIG_PCI_P2PDMA=y\n"}, True),
    ({"/boot/config-6.8.0-45-generic": "# CONFIG_PCI_P2PDMA is not set\n"}, False),
    ({"/proc/kallsyms": "0000 t something\n" * 1000}, False),
    ({}, None),
])  # fmt: skip
def test_kernel_p2pdma(files: dict[str, str], expected: bool | None) -> None:
    assert collect_facts(FakeSystem(files=files), None).kernel_has_p2pdma is expected


def test_more_facts_from_files() -> None:
    files = {
        "/proc/driver/nvidia/params": 'RegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1;"',
        "/sys/module/nvme_core/parameters/multipath": "Y\n",
        "/etc/cufile.json": "{ broken",
    }
    facts = collect_facts(FakeSystem(files=files, kernel="odd"), None, NVME)
    assert facts.static_bar1 is True
    assert facts.nvme_multipath is True
    assert facts.cufile_json == {} and facts.cufile_json_path == "/etc/cufile.json"
    assert facts.kernel_version == (0, 0)
    assert any("multipath on" in row.found for row in ladder_rows(facts))


def test_gpu_names() -> None:
    assert gpu_class("NVIDIA GeForce RTX 4070 Laptop GPU") == "consumer"
    assert gpu_class("NVIDIA TITAN V") == "consumer"
    assert gpu_class("NVIDIA RTX 6000 Ada Generation") == "workstation"
    assert gpu_class("NVIDIA H200") == "data-centre"
    assert on_p2pdma_list("NVIDIA A100-SXM4-80GB")
    assert not on_p2pdma_list("NVIDIA A4000")
    assert not on_p2pdma_list("NVIDIA RTX A6000")


def test_workstation_gpu_is_told_about_nvidia_fs() -> None:
    gpu = device("NVIDIA RTX 6000 Ada Generation", True, cuda="12.4")
    verdict, _ = probe(
        FakeSystem(
            kernel="5.15.0-100-generic",
            files={"/proc/version": NATIVE},
            auto=ChildResult(0, lines(gpu, KVIKIO, cufile(False), good_read("GDS"))),
            direct=ChildResult(1, lines(gpu, KVIKIO, bad_read("no"))),
        ),
        SimpleNamespace(device="/dev/sda1", kind="ssd", filesystem="btrfs"),
    )
    p2pdma = " ".join(verdict.why_not["gds-p2pdma"])
    assert "older than 6.2" in p2pdma and "needs 12.8" in p2pdma and "needs NVMe" in p2pdma and "btrfs" in p2pdma
    assert any("nvidia-gds" in change for change in verdict.would_change)
    assert not any("P2PDMA" in change for change in verdict.would_change)


def test_stats_text() -> None:
    before, after = parse_stats(stats(5)), parse_stats(stats(6))
    assert (before.driver_version, before.io_stats_enabled, before.reads, before.bar1_maps) == ("2.17.3", True, 5, 3)
    assert carried_the_read(before, after)
    assert not carried_the_read(before, before)
    assert not carried_the_read(None, after)
    assert not carried_the_read(before, parse_stats(stats(5, maps=9)))  # counting is on: mappings alone prove nothing
    assert parse_stats("").reads is None

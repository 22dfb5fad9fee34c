"""The ladder on faked machines: every verdict, the reasons that people read, and the facts behind them."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from outcore.probe.gds.facts import collect_facts
from outcore.probe.gds.ladder import ladder_rows
from outcore.probe.gds.verdict import judge
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
)  # fmt: skip

WSL2 = "Linux version 5.15.167.4-microsoft-standard-WSL2 (root@f9c826d3017f)"
OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"
CLOSED_MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06"
VIRTUAL = SimpleNamespace(device="/dev/vda", kind="virtual", filesystem="ext4")
GEFORCE = device("NVIDIA GeForce RTX 4070 Laptop GPU", False)
H100, H200 = device("NVIDIA H100 80GB HBM3", True), device("NVIDIA H200", True)
GDS = good_read("GDS")
NO_DRIVER = "no NVIDIA driver: libcuda.so.1 cannot be loaded"
HUNG = ChildResult(None, lines(H100, KVIKIO), timed_out=True)


def machine(gpu: Any, read: Any, direct: Any, *, available: bool = False, **more: Any) -> FakeSystem:
    """Whose automatic read ends so, and whose decisive one so."""
    auto = ChildResult(0, lines(gpu, KVIKIO, cufile(available), read))
    return FakeSystem(auto=auto, direct=ChildResult(int(not direct["ok"]), lines(gpu, KVIKIO, direct)), **more)


def direct_machine(gpu: Any, before: str | None, after: str | None) -> FakeSystem:
    """Whose decisive read succeeds, with these counters of nvidia-fs around it."""
    read = good_read("GDS", before, after)
    files = {"/proc/version": NATIVE, **({"/proc/driver/nvidia-fs/stats": before} if before else {})}
    return machine(gpu, read, read, available=True, files=files)


def first_child(code: int | None, *findings: dict[str, Any], err: str = "", **more: Any) -> FakeSystem:
    """Whose first child ends so; no other is started."""
    return FakeSystem(auto=ChildResult(code, lines(*findings) if findings else "", err), **more)


@dataclass
class Case:
    system: FakeSystem
    path: str
    why_not: dict[str, list[str]] = field(default_factory=dict)
    """Words of the reasons against a path."""
    change: list[str] = field(default_factory=list)
    """Words of what would change the verdict."""
    table: list[str] = field(default_factory=list)
    drive: Any = field(default_factory=lambda: NVME)


CASES = {
    "WSL2 with a GeForce": Case(
        machine(GEFORCE, good_read("POSIX"), bad_read("RuntimeError: cuFile error: driver not loaded"),
                kernel="5.15.167.4-microsoft-standard-WSL2", files={"/proc/version": WSL2}),
        "kvikio-posix", {"gds-nvfs": ["WSL2", "consumer GPU"], "cufile-compat": ["microsoft"]},
        ["native Linux boot would not either"], ["WSL2", "attribute 116"], VIRTUAL),
    "GeForce on native Linux": Case(
        machine(GEFORCE, GDS, bad_read("RuntimeError: compat mode off", ["GPU not supported"]),
                files={"/proc/version": NATIVE, "/proc/driver/nvidia/version": CLOSED_MODULE}),
        "cufile-compat", {"gds-p2pdma": ["attribute 116 is 0", "not on NVIDIA's list", "closed kernel module"],
                          "gds-nvfs": ["refused: RuntimeError: compat mode off"]},
        table=["libcufile: GPU not supported"]),
    "data-centre GPU with nvidia-fs": Case(
        direct_machine(H100, stats(10), stats(11)), "gds-nvfs",
        table=["nvidia-fs counters moved", "version 2.17.3"]),
    "nvidia-fs with counting off, known by its mappings": Case(
        direct_machine(H100, stats(0, 3, enabled=False), stats(0, 4, enabled=False)), "gds-nvfs"),
    "P2PDMA without the module": Case(direct_machine(device("NVIDIA L40S", True), None, None), "gds-p2pdma"),
    "P2PDMA when the counters stand still": Case(
        direct_machine(device("NVIDIA L40S", True), stats(10), stats(10)), "gds-p2pdma"),
    "attribute 116 alone": Case(
        machine(H200, GDS, bad_read("RuntimeError: nvidia-fs driver is not loaded"),
                files={"/proc/version": NATIVE, "/proc/driver/nvidia/version": CLOSED_MODULE}),
        "cufile-compat", {"gds-nvfs": ["necessary but proves nothing"], "gds-p2pdma": ["virtual disk"]},
        ["modprobe nvidia-fs"], ["1 (necessary, not sufficient)"], VIRTUAL),
    "native Windows": Case(
        FakeSystem(platform="win32", kernel="10", kvikio=None), "staged",
        change=["wsl --install"], table=["native Windows"]),
    "macOS": Case(
        FakeSystem(platform="darwin", kernel="24.0", kvikio=None), "staged", {"gds-nvfs": ["Linux only"]}),
    "no GPU": Case(
        first_child(1, {"step": "device", "devices": [], "error": NO_DRIVER}), "staged", table=[NO_DRIVER]),
    "no kvikio": Case(
        first_child(1, H200, {"step": "kvikio", "error": "ModuleNotFoundError: No module named 'kvikio'"}, kvikio=None),
        "staged", {"kvikio-posix": ["kvikio is not installed"]}, ["python setup.py"], ["not tried: no kvikio"]),
    "kvikio that does not load": Case(
        first_child(1, H200, {"step": "kvikio", "error": "OSError: libkvikio.so: cannot open shared object file"}),
        "staged", {"kvikio-posix": ["libkvikio.so"]}),
    "libcufile that aborts": Case(
        FakeSystem(auto=ChildResult(0, lines(device("NVIDIA RTX A6000", True), KVIKIO, cufile(False), GDS)),
                   direct=ChildResult(-6, lines(H100, KVIKIO), "terminate called\ncuFileDriverOpen: abort\n")),
        "cufile-compat", {"gds-nvfs": ["SIGABRT: cuFileDriverOpen: abort"]}, table=["SIGABRT"]),
    "a crash after the finding": Case(
        FakeSystem(auto=ChildResult(-11, lines(H100, KVIKIO, cufile(True), good_read("GDS", stats(1), stats(2)))),
                   direct=ChildResult(-11, lines(H100, KVIKIO, good_read("GDS", stats(1), stats(2))))), "gds-nvfs"),
    "a test that hangs": Case(
        FakeSystem(auto=HUNG, direct=HUNG), "staged",
        {"gds-nvfs": ["hung"], "kvikio-posix": ["timeout"]}, table=["killed"]),
    "wrong bytes": Case(
        machine(H100, GDS, {**good_read("GDS", stats(1), stats(2)), "ok": False, "bytes_right": False}, available=True),
        "cufile-compat", {"gds-nvfs": ["wrong bytes"]}),
    "a driver that kills the first child": Case(first_child(-11), "staged", table=["SIGSEGV"]),
    "a slow import is not called missing": Case(
        first_child(1, H100, err="Traceback\nMemoryError\n"), "staged", {"kvikio-posix": ["MemoryError"]}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_verdict_and_reasons(name: str) -> None:
    case = CASES[name]
    verdict, table = probe(case.system, case.drive)
    assert verdict.path == case.path and verdict.is_direct == case.path.startswith("gds")
    for path, words in case.why_not.items():
        for word in words:
            assert any(word in reason for reason in verdict.why_not[path]), (path, word)
    for word in case.change:
        assert any(word in change for change in verdict.would_change), word
    assert [word for word in case.table if word not in table] == []
    assert not verdict.would_change or case.path != "gds-nvfs"
    headline = {"native Windows": "Windows", "no GPU": "No GPU"}.get(name, "")
    assert headline in verdict.headline
    if name == "GeForce on native Linux":
        assert any("still calls it GDS" in reason for reason in verdict.reasons)


def test_p2pdma_that_is_only_not_asked_for_is_tried_and_reported() -> None:
    files = {
        "/proc/version": NATIVE, "/proc/driver/nvidia/version": OPEN_MODULE,
        "/proc/kallsyms": "0000000000000000 d p2pdma_pgmap_ops",
        "/etc/cufile.json": '{\n  // NOTE : comment\n  "properties": {"use_pci_p2pdma": false} // more\n}',
    }  # fmt: skip
    asked = ChildResult(0, lines(H200, KVIKIO, GDS))
    system = machine(H200, GDS, bad_read("RuntimeError: not loaded"), files=files, p2pdma=asked)
    verdict, table = probe(system)
    assert verdict.path == "cufile-compat"  # what data takes today, not what it could take
    assert any("use_pci_p2pdma" in change and "it works" in change for change in verdict.would_change)
    assert "P2PDMA asked for | yes" in table
    assert [mode for mode, _ in system.calls] == ["auto", "direct", "p2pdma"]


def test_the_decisive_test_forbids_every_fallback() -> None:
    system = machine(H200, GDS, bad_read("no"))
    probe(system)
    env = dict(system.calls)["direct"]
    assert env["CUFILE_ALLOW_COMPAT_MODE"] == "false"
    assert env["KVIKIO_COMPAT_MODE"] == "OFF"
    assert env["CUFILE_FORCE_COMPAT_MODE"] == ""  # removed, whatever the user's shell says


def test_without_a_test_file_nothing_is_claimed() -> None:
    facts = collect_facts(FakeSystem(), None, NVME)
    assert facts.direct.status == "not-run"
    assert judge(facts).path == "staged"


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

"""The ladder on faked machines: every verdict, and the reasons that people read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from outcore.probe.facts import READ_BYTES, collect_facts
from outcore.probe.gds_child import LINE_PREFIX
from outcore.probe.ladder import ladder_rows
from outcore.probe.nvidia_fs import carried_the_read, parse_stats
from outcore.probe.system import ChildResult
from outcore.probe.verdict import PATHS, Verdict, gpu_class, judge, on_p2pdma_list

STATS = """GDS Version: 1.7.0.149
NVFS statistics(ver: 4.0)
NVFS Driver(version: 2:17:3)
Mellanox PeerDirect Supported: False
IO stats: {stats}, peer IO stats: Disabled
Logging level: info

Active Shadow-Buffer (MiB): 0
Active Process: 0
Reads                           : n={reads} ok={reads} err=0 readMiB=0 io_state_err=0
Writes                          : n=0 ok=0 err=0 writeMiB=0 io_state_err=0 pg-cache=0 pg-cache-fail=0 pg-cache-eio=0
Mmap                            : n=3 ok=3 err=0 munmap=3
Bar1-map                        : n={maps} ok={maps} err=0 free=3 callbacks=0 active=0
"""
NATIVE = "Linux version 6.8.0-45-generic (buildd@lcy02) #45-Ubuntu SMP"
WSL2 = "Linux version 5.15.167.4-microsoft-standard-WSL2 (root@f9c826d3017f)"
OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"
CLOSED_MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06"
NVME = SimpleNamespace(device="/dev/nvme0n1p2", kind="nvme", filesystem="ext4")
VIRTUAL = SimpleNamespace(device="/dev/vda", kind="virtual", filesystem="ext4")


def stats(reads: int, maps: int = 3, enabled: bool = True) -> str:
    return STATS.format(reads=reads, maps=maps, stats="Enabled" if enabled else "Disabled")


def lines(*findings: dict[str, Any]) -> str:
    return "\n".join(["chatter of a library", *(LINE_PREFIX + json.dumps(finding) for finding in findings)])


def device(name: str, attribute_116: bool | None, cuda: str = "13.0") -> dict[str, Any]:
    gpu = {"name": name, "compute_capability": "8.9", "gpu_direct_rdma_supported": attribute_116, "integrated": False}
    return {"step": "device", "devices": [gpu], "cuda_version": cuda}


KVIKIO = {"step": "kvikio", "version": "26.10.00"}


def cufile(available: bool) -> dict[str, Any]:
    return {"step": "cufile", "is_gds_available": available, "libcufile_version": "1.15", "kvikio_prefers_posix": False}


def good_read(backend: str, before: str | None = None, after: str | None = None) -> dict[str, Any]:
    return {
        "step": "read",
        "ok": True,
        "got_bytes": READ_BYTES,
        "bytes_right": True,
        "elapsed_s": 0.01,
        "backends": {"POSIX": int(backend == "POSIX"), "GDS": int(backend == "GDS"), "MMAP": 0},
        "nvidia_fs_before": asdict(parse_stats(before)) if before else None,
        "nvidia_fs_after": asdict(parse_stats(after)) if after else None,
        "log": [],
    }


def bad_read(error: str, log: Sequence[str] = ()) -> dict[str, Any]:
    return {"step": "read", "ok": False, "error": error, "log": list(log)}


class FakeSystem:
    """A computer made of a few files and the answers of its child processes."""

    def __init__(
        self,
        *,
        platform: str = "linux",
        kernel: str = "6.8.0-45-generic",
        files: dict[str, str] | None = None,
        kvikio: str | None = "26.10.0",
        auto: ChildResult | None = None,
        direct: ChildResult | None = None,
        p2pdma: ChildResult | None = None,
        gdscheck: ChildResult | None = None,
    ) -> None:
        self.platform = platform
        self.kernel_release = kernel
        self.files = files or {}
        self.kvikio = kvikio
        self.children = {"auto": auto, "direct": direct, "p2pdma": p2pdma}
        self.gdscheck = gdscheck
        self.calls: list[tuple[str, Mapping[str, str]]] = []

    def read_text(self, path: str) -> str | None:
        return self.files.get(path)

    def which(self, name: str) -> str | None:
        return f"/usr/bin/{name}" if name == "gdscheck" and self.gdscheck else None

    def glob(self, pattern: str) -> list[str]:
        return []

    def module_version(self, module: str, packages: Sequence[str]) -> str | None:
        return self.kvikio

    def run(self, command: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None) -> ChildResult:
        assert self.gdscheck is not None
        return self.gdscheck

    def run_child(
        self, arguments: Sequence[str], timeout_s: float, env: Mapping[str, str] | None = None
    ) -> ChildResult:
        mode = "p2pdma" if "CUFILE_USE_PCIP2PDMA" in (env or {}) else arguments[0]
        self.calls.append((mode, env or {}))
        result = self.children[mode]
        assert result is not None, f"this machine does not expect the {mode} test"
        return result


def probe(system: FakeSystem, drive: Any = NVME) -> tuple[Verdict, str]:
    """The verdict and the whole table as text."""
    facts = collect_facts(system, "/data/test.bin", drive)
    verdict = judge(facts)
    assert verdict.path in PATHS
    assert set(verdict.why_not) == set(PATHS[: PATHS.index(verdict.path)])
    assert all(reasons for reasons in verdict.why_not.values()), verdict.why_not
    table = "\n".join(f"{row.step} | {row.state} | {row.found}" for row in ladder_rows(facts))
    return verdict, table


def test_wsl2_with_a_geforce_takes_kvikios_posix_path() -> None:
    gpu = device("NVIDIA GeForce RTX 4070 Laptop GPU", False)
    verdict, table = probe(
        FakeSystem(
            kernel="5.15.167.4-microsoft-standard-WSL2",
            files={"/proc/version": WSL2},
            auto=ChildResult(0, lines(gpu, KVIKIO, cufile(False), good_read("POSIX"))),
            direct=ChildResult(1, lines(gpu, KVIKIO, bad_read("RuntimeError: cuFile error: driver not loaded"))),
        ),
        VIRTUAL,
    )
    assert verdict.path == "kvikio-posix"
    assert any("WSL2" in reason for reason in verdict.why_not["gds-nvfs"])
    assert any("consumer GPU" in reason for reason in verdict.why_not["gds-nvfs"])
    assert any("microsoft" in reason for reason in verdict.why_not["cufile-compat"])
    assert any("native Linux boot would not either" in change for change in verdict.would_change)
    assert "WSL2" in table and "attribute 116" in table


def test_geforce_on_native_linux_is_libcufiles_own_fallback() -> None:
    gpu = device("NVIDIA GeForce RTX 4070 Laptop GPU", False)
    verdict, table = probe(
        FakeSystem(
            files={"/proc/version": NATIVE, "/proc/driver/nvidia/version": CLOSED_MODULE},
            auto=ChildResult(0, lines(gpu, KVIKIO, cufile(False), good_read("GDS"))),
            direct=ChildResult(1, lines(gpu, KVIKIO, bad_read("RuntimeError: compat mode off", ["GPU not supported"]))),
        )
    )
    assert verdict.path == "cufile-compat"
    assert any("still calls it GDS" in reason for reason in verdict.reasons)
    assert any("attribute 116 is 0" in reason for reason in verdict.why_not["gds-p2pdma"])
    assert any("not on NVIDIA's list" in reason for reason in verdict.why_not["gds-p2pdma"])
    assert any("closed kernel module" in reason for reason in verdict.why_not["gds-p2pdma"])
    assert any("refused: RuntimeError: compat mode off" in reason for reason in verdict.why_not["gds-nvfs"])
    assert "libcufile: GPU not supported" in table


def test_data_centre_gpu_with_nvidia_fs() -> None:
    gpu = device("NVIDIA H100 80GB HBM3", True)
    read = good_read("GDS", stats(10), stats(11))
    verdict, table = probe(
        FakeSystem(
            files={"/proc/version": NATIVE, "/proc/driver/nvidia-fs/stats": stats(10)},
            auto=ChildResult(0, lines(gpu, KVIKIO, cufile(True), read)),
            direct=ChildResult(0, lines(gpu, KVIKIO, read)),
        )
    )
    assert verdict.path == "gds-nvfs"
    assert verdict.is_direct
    assert not verdict.would_change
    assert "nvidia-fs counters moved" in table
    assert "version 2.17.3" in table


def test_nvidia_fs_with_counting_switched_off_is_recognised_by_its_mappings() -> None:
    gpu = device("NVIDIA H100 80GB HBM3", True)
    read = good_read("GDS", stats(0, 3, enabled=False), stats(0, 4, enabled=False))
    system = FakeSystem(
        files={"/proc/driver/nvidia-fs/stats": stats(0, 3, enabled=False)},
        auto=ChildResult(0, lines(gpu, KVIKIO, cufile(True), read)),
        direct=ChildResult(0, lines(gpu, KVIKIO, read)),
    )
    assert probe(system)[0].path == "gds-nvfs"


@pytest.mark.parametrize("module_loaded", [False, True])
def test_p2pdma_when_the_counters_stand_still(module_loaded: bool) -> None:
    gpu = device("NVIDIA L40S", True)
    before = stats(10) if module_loaded else None
    read = good_read("GDS", before, before)
    verdict, _ = probe(
        FakeSystem(
            files={"/proc/driver/nvidia-fs/stats": before} if before else {},
            auto=ChildResult(0, lines(gpu, KVIKIO, cufile(True), read)),
            direct=ChildResult(0, lines(gpu, KVIKIO, read)),
        )
    )
    assert verdict.path == "gds-p2pdma"
    assert verdict.why_not["gds-nvfs"]


def test_data_centre_gpu_without_nvidia_fs_is_not_direct_although_attribute_116_is_1() -> None:
    gpu = device("NVIDIA H200", True)
    verdict, table = probe(
        FakeSystem(
            files={"/proc/version": NATIVE, "/proc/driver/nvidia/version": CLOSED_MODULE},
            auto=ChildResult(0, lines(gpu, KVIKIO, cufile(False), good_read("GDS"))),
            direct=ChildResult(1, lines(gpu, KVIKIO, bad_read("RuntimeError: nvidia-fs driver is not loaded"))),
        ),
        VIRTUAL,
    )
    assert verdict.path == "cufile-compat"
    assert any("necessary but proves nothing" in reason for reason in verdict.why_not["gds-nvfs"])
    assert any("virtual disk" in reason for reason in verdict.why_not["gds-p2pdma"])
    assert any("modprobe nvidia-fs" in change for change in verdict.would_change)
    assert "1 (necessary, not sufficient)" in table


def test_p2pdma_that_is_only_not_asked_for_is_tried_and_reported() -> None:
    gpu = device("NVIDIA H200", True)
    system = FakeSystem(
        files={
            "/proc/version": NATIVE,
            "/proc/driver/nvidia/version": OPEN_MODULE,
            "/proc/kallsyms": "0000000000000000 d p2pdma_pgmap_ops",
            "/etc/cufile.json": '{\n  // NOTE : comment\n  "properties": {"use_pci_p2pdma": false} // more\n}',
        },
        auto=ChildResult(0, lines(gpu, KVIKIO, cufile(False), good_read("GDS"))),
        direct=ChildResult(1, lines(gpu, KVIKIO, bad_read("RuntimeError: not loaded"))),
        p2pdma=ChildResult(0, lines(gpu, KVIKIO, good_read("GDS"))),
    )
    verdict, table = probe(system)
    assert verdict.path == "cufile-compat"  # what data takes today, not what it could take
    assert any("use_pci_p2pdma" in change and "it works" in change for change in verdict.would_change)
    assert "P2PDMA asked for | yes" in table
    assert [mode for mode, _ in system.calls] == ["auto", "direct", "p2pdma"]


def test_the_decisive_test_forbids_every_fallback() -> None:
    gpu = device("NVIDIA H200", True)
    system = FakeSystem(
        auto=ChildResult(0, lines(gpu, KVIKIO, cufile(False), good_read("GDS"))),
        direct=ChildResult(1, lines(gpu, KVIKIO, bad_read("no"))),
    )
    probe(system)
    env = dict(system.calls)["direct"]
    assert env["CUFILE_ALLOW_COMPAT_MODE"] == "false"
    assert env["KVIKIO_COMPAT_MODE"] == "OFF"
    assert env["CUFILE_FORCE_COMPAT_MODE"] == ""  # removed, whatever the user's shell says


def test_native_windows_says_what_wsl2_gives() -> None:
    verdict, table = probe(FakeSystem(platform="win32", kernel="10", kvikio=None))
    assert verdict.path == "staged"
    assert any("wsl --install" in change for change in verdict.would_change)
    assert "Windows" in verdict.headline and "native Windows" in table


def test_macos() -> None:
    verdict, _ = probe(FakeSystem(platform="darwin", kernel="24.0", kvikio=None))
    assert verdict.path == "staged"
    assert any("Linux only" in reason for reason in verdict.why_not["gds-nvfs"])


def test_no_gpu() -> None:
    error = "no NVIDIA driver: libcuda.so.1 cannot be loaded"
    verdict, table = probe(FakeSystem(auto=ChildResult(1, lines({"step": "device", "devices": [], "error": error}))))
    assert verdict.path == "staged"
    assert "No GPU" in verdict.headline
    assert error in table


def test_no_kvikio() -> None:
    gpu = device("NVIDIA H200", True)
    missing = {"step": "kvikio", "error": "ModuleNotFoundError: No module named 'kvikio'"}
    verdict, table = probe(FakeSystem(kvikio=None, auto=ChildResult(1, lines(gpu, missing))))
    assert verdict.path == "staged"
    assert verdict.why_not["kvikio-posix"] == ("kvikio is not installed",)
    assert any("python setup.py" in change for change in verdict.would_change)
    assert "not tried: no kvikio" in table


def test_kvikio_that_does_not_load() -> None:
    gpu = device("NVIDIA H200", True)
    broken = {"step": "kvikio", "error": "OSError: libkvikio.so: cannot open shared object file"}
    verdict, _ = probe(FakeSystem(auto=ChildResult(1, lines(gpu, broken))))
    assert verdict.path == "staged"
    assert any("libkvikio.so" in reason for reason in verdict.why_not["kvikio-posix"])


def test_libcufile_that_aborts_is_reported_with_its_signal() -> None:
    gpu = device("NVIDIA RTX A6000", True)
    verdict, table = probe(
        FakeSystem(
            auto=ChildResult(0, lines(gpu, KVIKIO, cufile(False), good_read("GDS"))),
            direct=ChildResult(-6, lines(gpu, KVIKIO), "terminate called\ncuFileDriverOpen: abort\n"),
        )
    )
    assert verdict.path == "cufile-compat"
    assert any("SIGABRT: cuFileDriverOpen: abort" in reason for reason in verdict.why_not["gds-nvfs"])
    assert "SIGABRT" in table


def test_a_crash_after_the_finding_does_not_undo_it() -> None:
    gpu = device("NVIDIA H100", True)
    read = good_read("GDS", stats(1), stats(2))
    system = FakeSystem(
        auto=ChildResult(-11, lines(gpu, KVIKIO, cufile(True), read)),
        direct=ChildResult(-11, lines(gpu, KVIKIO, read)),
    )
    assert probe(system)[0].path == "gds-nvfs"


def test_a_test_that_hangs_is_killed_and_said() -> None:
    gpu = device("NVIDIA H100", True)
    hung = ChildResult(None, lines(gpu, KVIKIO), timed_out=True)
    verdict, table = probe(FakeSystem(auto=hung, direct=hung))
    assert verdict.path == "staged"
    assert any("hung" in reason for reason in verdict.why_not["gds-nvfs"])
    assert any("timeout" in reason for reason in verdict.why_not["kvikio-posix"])
    assert "killed" in table


def test_wrong_bytes_are_no_success() -> None:
    gpu = device("NVIDIA H100", True)
    wrong = {**good_read("GDS", stats(1), stats(2)), "ok": False, "bytes_right": False}
    system = FakeSystem(
        auto=ChildResult(0, lines(gpu, KVIKIO, cufile(True), good_read("GDS"))),
        direct=ChildResult(1, lines(gpu, KVIKIO, wrong)),
    )
    verdict, _ = probe(system)
    assert verdict.path == "cufile-compat"
    assert any("wrong bytes" in reason for reason in verdict.why_not["gds-nvfs"])


def test_a_driver_that_kills_the_first_child_leaves_the_reason() -> None:
    verdict, table = probe(FakeSystem(auto=ChildResult(-11, "", "")))
    assert verdict.path == "staged"
    assert "SIGSEGV" in table


def test_a_slow_import_is_not_called_missing() -> None:
    gpu = device("NVIDIA H100", True)
    died = ChildResult(1, lines(gpu), "Traceback\nMemoryError\n")
    verdict, _ = probe(FakeSystem(auto=died))
    assert any("MemoryError" in reason for reason in verdict.why_not["kvikio-posix"])


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


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"/boot/config-6.8.0-45-generic": "CONFIG_PCI_P2PDMA=y\n"}, True),
        ({"/boot/config-6.8.0-45-generic": "# CONFIG_PCI_P2PDMA is not set\n"}, False),
        ({"/proc/kallsyms": "0000 t something\n" * 1000}, False),
        ({}, None),
    ],
)
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

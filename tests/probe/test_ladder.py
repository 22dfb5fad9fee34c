"""The ladder on faked machines: every verdict, and the reasons that people read."""

from types import SimpleNamespace

import pytest

from outcore.probe.gds.facts import collect_facts
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
)

WSL2 = "Linux version 5.15.167.4-microsoft-standard-WSL2 (root@f9c826d3017f)"
OPEN_MODULE = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build"
CLOSED_MODULE = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06"
VIRTUAL = SimpleNamespace(device="/dev/vda", kind="virtual", filesystem="ext4")


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

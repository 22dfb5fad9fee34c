import json
import os
from pathlib import Path

import pytest

from outcore.common.quantities import GB, GIB
from outcore.install.requirement_set import choose_set
from outcore.install.verify import host_checks
from outcore.install.verify.host_checks import (
    compiler_row,
    configured_offload_path,
    disk_row,
    extension_fix,
    gpu_row,
    host_rows,
    launcher_row,
    offload_row,
    python_row,
    ram_row,
    system_row,
)
from outcore.install.verify.rows import ReportRow, all_hold
from outcore.install.verify.wsl import host_ram_bytes, recommended_guest_gib, wsl_memory_row
from outcore.machine import Drive
from tests.install.fakes import REPOSITORY, fake_environment, gpu_machine, machine
from tests.refused import failing

CPU = choose_set(machine(), "auto", REPOSITORY)
CUDA12 = choose_set(gpu_machine("570.1", "12.8"), "auto", REPOSITORY)
CUDA13 = choose_set(gpu_machine(), "auto", REPOSITORY)


def answering(code: int, text: str):
    return lambda command: (code, text)


def drive(kind: str, free_bytes: int = 100 * GB) -> Drive:
    return Drive("/x", kind, "why", "/", "ext4", free_bytes=free_bytes, total_bytes=200 * GB)


def test_rows_of_a_plain_machine(tmp_path: Path) -> None:
    rows = host_rows(machine(), fake_environment(tmp_path), CPU, REPOSITORY, answering(1, ""))
    assert [row.part for row in rows] == ["Python", "system", "disk space", "RAM", "GPU", "compiler"]
    rows = host_rows(gpu_machine(is_wsl2=True), fake_environment(tmp_path), CUDA13, REPOSITORY, answering(1, ""))
    assert [row.part for row in rows][-3:] == ["WSL2 memory", "GPU", "compiler"]


@pytest.mark.parametrize(("version", "status"), [("3.11.7", "OK"), ("3.13.0", "OK"), ("3.14.0", "missing")])
def test_python(tmp_path: Path, version: str, status: str) -> None:
    row = python_row(version, fake_environment(tmp_path))
    assert row.status == status and row.required


@pytest.mark.parametrize(("which", "libc", "status", "word"), [
    (machine(), ("glibc", "2.36"), "OK", "Ubuntu"), (machine(is_wsl2=True), ("glibc", "2.39"), "OK", "WSL2"),
    (machine(), ("glibc", "2.27"), "missing", "2.27"), (machine(), ("", ""), "OK", "Ubuntu"),
    (machine(architecture="aarch64"), ("glibc", "2.36"), "degraded", "aarch64"),
    (machine(os_family="windows", os_name="Windows 11"), ("", ""), "degraded", "Windows"),
    (machine(os_family="macos", os_name="Darwin"), ("", ""), "degraded", "Darwin"),
])  # fmt: skip
def test_system(monkeypatch: pytest.MonkeyPatch, which, libc: tuple[str, str], status: str, word: str) -> None:
    monkeypatch.setattr(host_checks.platform, "libc_ver", lambda: libc)
    row = system_row(which)
    assert row.status == status and word in row.found and (row.status == "OK" or row.fix)


@pytest.mark.parametrize(("free", "status"), [(100 * GB, "OK"), (10 * GB, "degraded"), (GB, "missing")])
def test_disk(monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    monkeypatch.setattr(host_checks, "drive_of", lambda path: drive("ssd", free))
    assert disk_row(Path("/x")).status == status


@pytest.mark.parametrize(("gib", "status"), [(64, "OK"), (8, "degraded"), (2, "missing")])
def test_ram(gib: int, status: str) -> None:
    assert ram_row(machine(ram_total_bytes=gib * GIB)).status == status


def add_card(root: Path, vendor: str = "0x10de", kind: str = "0x030000") -> Path:
    (root / "0000:01:00.0").mkdir(parents=True)
    (root / "0000:01:00.0/vendor").write_text(vendor + "\n")
    (root / "0000:01:00.0/class").write_text(kind + "\n")
    return root


def test_gpu(tmp_path: Path) -> None:
    nothing = tmp_path / "none"
    assert gpu_row(gpu_machine(), CUDA13, nothing).status == "OK"
    row = gpu_row(gpu_machine(), CPU, nothing)
    assert row.status == "degraded" and "--set auto" in row.fix
    row = gpu_row(machine(), CPU, nothing)
    assert row.status == "degraded" and not row.required and "CPU" in row.found
    row = gpu_row(machine(), CPU, add_card(tmp_path / "pci"))
    assert "without a driver" in row.found and "ubuntu-drivers" in row.fix
    assert "none" in gpu_row(machine(), CPU, add_card(tmp_path / "sound", kind="0x040300")).found
    assert "in Windows" in gpu_row(machine(is_wsl2=True), CPU, nothing).fix
    broken = machine(notes=("nvidia-smi cannot reach the GPU: failed",))
    assert "restart" in gpu_row(broken, CPU, nothing).fix
    assert gpu_row(machine(driver_version="570", notes=("driver loaded",)), CPU, nothing).found == "driver loaded"


def test_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_checks.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert compiler_row(machine(os_family="windows")).status == "degraded"
    monkeypatch.setattr(host_checks.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    row = compiler_row(machine())
    assert row.status == "missing" and row.required and "-dev" in row.fix
    monkeypatch.setattr(host_checks.shutil, "which", lambda name: None)
    row = compiler_row(machine())
    assert row.status == "missing" and "build-essential" in row.fix


@pytest.mark.parametrize(("reason", "fix"), [
    ("no C++ compiler", "build-essential"), ("Python's headers are not installed", "-dev"),
    ("some error", "setup_build.log"),
])  # fmt: skip
def test_what_mends_an_extension(reason: str, fix: str) -> None:
    assert fix in extension_fix(reason)


@pytest.mark.parametrize(("kind", "status", "word"), [
    ("nvme", "OK", ""), ("ssd", "degraded", "slower"), ("hdd", "degraded", "slower"),
    ("virtual", "degraded", "gds_optimizer"), ("tmpfs", "degraded", "saves no RAM"),
    ("network", "degraded", "local drive"),
])  # fmt: skip
def test_offload_path_by_drive(tmp_path: Path, kind: str, status: str, word: str) -> None:
    row = offload_row(tmp_path / "not" / "yet", lambda path: drive(kind))
    assert row.status == status and word in row.fix and not row.required
    assert list(tmp_path.iterdir()) == []


def test_offload_path_that_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    row = offload_row(tmp_path / "file")
    assert row.status == "missing" and "not a folder" in row.found and row.holds
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    row = offload_row(tmp_path)
    assert row.status == "missing" and "No space left" in row.found
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    monkeypatch.undo()
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"other")
    assert "differently" in offload_row(tmp_path).found


@pytest.mark.parametrize(("config", "path"), [
    ({"outcore": {"nvme_path": "/nvme/a"}}, "/nvme/a"), ({"outcore": {"nvme_path": "offload"}}, "offload"),
    ({"zero_optimization": {"offload_optimizer": {"nvme_path": "/b"}}}, "/b"),
    ({"zero_optimization": {"offload_param": {"nvme_path": "/c"}}}, "/c"), ({"outcore": {"nvme_path": None}}, "."),
    (None, "."),
])  # fmt: skip
def test_offload_path_of_the_configuration(tmp_path: Path, config: object, path: str) -> None:
    if config is not None:
        (tmp_path / "deepspeed_config.json").write_text(json.dumps(config))
    assert configured_offload_path(tmp_path) == tmp_path / path


def test_launcher(tmp_path: Path) -> None:
    environment = fake_environment(tmp_path)
    assert launcher_row(environment).status == "missing"
    script = environment.bin_dir / "deepspeed"
    script.write_text("#!/moved/away/python\n")
    row = launcher_row(environment)
    assert "was the folder moved" in row.found and not row.holds
    script.write_text(f"#!{environment.python}\n")
    assert "not executable" in launcher_row(environment).found
    script.chmod(0o755)
    assert launcher_row(environment).status == "OK"


def test_wsl_memory() -> None:
    half = machine(is_wsl2=True, ram_total_bytes=32 * GIB)
    row = wsl_memory_row(half, answering(0, f"{64 * GIB}\r\n"))
    assert row.status == "degraded" and "32.00 GiB of the computer's 64.00 GiB" in row.found
    assert ".wslconfig" in row.fix and "memory=56GB" in row.fix and "wsl --shutdown" in row.fix
    most = machine(is_wsl2=True, ram_total_bytes=55 * GIB)
    assert wsl_memory_row(most, answering(0, str(64 * GIB))).status == "OK"
    row = wsl_memory_row(half, answering(1, "Access denied"))
    assert "did not tell" in row.found and "memory=" in row.fix
    assert host_ram_bytes(failing(OSError("exec format error"))) is None
    assert recommended_guest_gib(16 * GIB) == 12 and recommended_guest_gib(64 * GIB) == 56


def test_row_rules() -> None:
    good, bad = ReportRow("a", "", "", "OK", True), ReportRow("b", "", "", "missing", True)
    assert all_hold([good, ReportRow("c", "", "", "missing", False), ReportRow("d", "", "", "degraded", True)])
    assert not all_hold([good, bad]) and not all_hold([])
    with pytest.raises(ValueError, match="status"):
        ReportRow("a", "", "", "fine", True)

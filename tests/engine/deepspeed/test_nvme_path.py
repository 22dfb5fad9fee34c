"""Is this folder a place to offload to: what the user reads for good, bad and odd paths; speed measurement; memlock."""

import dataclasses
import errno
import os
import resource
import shutil
import signal
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from outcore.common.quantities import MIB
from outcore.engine.deepspeed.infinity import check_nvme_performance, validate_nvme_path
from outcore.machine import LinkRates, detect_machine, drive_of, memlock_limit_bytes
from outcore.machine.offload import folder as nvme
from outcore.machine.offload import temporary_file
from outcore.plan.run import drive_performance, write_combined_measured
from outcore.staging import drive_speed
from tests.refused import failing, refused

Usage = namedtuple("Usage", "total used free")


def drive(kind: str) -> SimpleNamespace:
    return SimpleNamespace(kind=kind, device="/dev/x", filesystem="ext4", mount_point="/m", free_bytes=10**12)


def leftovers(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("name", ["plain", "with spaces in it", "ünïcode", "deep/er/still"])
def test_good_folders_are_created_tested_and_left_clean(tmp_path: Path, name: str) -> None:
    ok, message = validate_nvme_path(tmp_path / name, 0.001)
    assert ok, message
    assert (tmp_path / name).is_dir() and leftovers(tmp_path) == []
    assert message == "" or message.startswith("Warning:"), "nothing is said of a drive that is well"
    assert "free" in nvme.describe_folder(tmp_path)


@pytest.mark.parametrize("folder, warned", [("C:\\nvme", True), ("c:/a", True), ("D:\\nvme", False), ("/mnt/c", False)])
def test_the_system_drive_is_warned_of(folder: str, warned: bool) -> None:
    said = nvme.system_drive_warning(folder, "C:")
    assert ("C: is the system drive" in said) == warned and (said == "") != warned
    assert nvme.system_drive_warning(folder, None) == "", "only Windows names a system drive"


def test_a_run_on_the_system_drive_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme, "resolve_nvme_path", lambda path: Path(path))
    monkeypatch.setattr(nvme, "PureWindowsPath", lambda path: SimpleNamespace(drive="C:"))
    monkeypatch.setattr(nvme, "drive_of", lambda path: drive("nvme"))
    monkeypatch.setenv("SYSTEMDRIVE", "C:")
    ok, message = validate_nvme_path(tmp_path / "x", 0.001)
    assert ok and message.startswith("Warning: C: is the system drive"), message


def test_home_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert nvme.resolve_nvme_path("~/nvme") == tmp_path / "nvme"
    assert nvme.resolve_nvme_path("a/../b") == tmp_path / "b"
    assert validate_nvme_path("~/nvme", 0)[0] and (tmp_path / "nvme").is_dir()


@pytest.mark.parametrize("path, said", [
    ("", "is empty"), ("  ", "is empty"), ("a\0b", "NUL"), ("C:\\Users\\me\\nvme", "/mnt/c/Users/me/nvme"),
    ("d:/nvme", "/mnt/d/nvme"), ("\\\\server\\share", "that share is mounted"), ("//server/share", "Windows spelling"),
])  # fmt: skip
def test_spellings_that_are_no_path_here(path: str, said: str) -> None:
    ok, message = validate_nvme_path(path, 1)
    assert not ok and said in message
    with pytest.raises(nvme.NvmePathError):
        nvme.resolve_nvme_path(path)


def test_a_share_that_is_mounted_here_is_its_folder(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    line = "36 35 0:40 / /mnt/nas rw - cifs //Server/share rw\n"
    (tmp_path / "proc/self/mountinfo").write_text("30 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw\n" + line)
    found = [
        nvme._mounted_share(text, tmp_path) for text in ("//server/share/a/b", "//server/share", "//server/shares/a")
    ]
    assert found == [Path("/mnt/nas/a/b"), Path("/mnt/nas"), None]


def test_several_drives_with_commas_between(tmp_path: Path) -> None:
    assert nvme.resolve_nvme_paths("/a, /b/c") == (Path("/a"), Path("/b/c"))
    (tmp_path / "x,y").mkdir()
    assert nvme.resolve_nvme_paths(tmp_path / "x,y") == (tmp_path / "x,y",)
    for wrong, said in (("/a,/a/", "twice"), ("/a,", "empty")):
        with pytest.raises(nvme.NvmePathError, match=said):
            nvme.resolve_nvme_paths(wrong)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "below"):
        ok, message = validate_nvme_path(path, 0)
        assert not ok and "is a file" in message
    assert file.read_text() == "mine"


def test_too_little_space_names_the_numbers_and_removes_what_it_made(tmp_path: Path) -> None:
    ok, message = validate_nvme_path(tmp_path / "new" / "folder", 1e6)
    assert not ok and "1000.00 TB" in message and "20% of the free space" in message
    assert list(tmp_path.iterdir()) == []


def test_a_fifth_stays_in_reserve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(200 * 10**9, 100 * 10**9, 100 * 10**9))
    assert validate_nvme_path(tmp_path, 80)[0]
    assert not validate_nvme_path(tmp_path, 80.1)[0]


@pytest.mark.parametrize("required", [-1, float("nan"), float("inf"), "10", True])
def test_impossible_requirements(tmp_path: Path, required: float) -> None:
    refused(ValueError, "required_space_gb", lambda: validate_nvme_path(tmp_path, required))


@pytest.mark.parametrize("code, said", [
    (errno.EACCES, "You may not write there"), (errno.EROFS, "read-only"), (errno.ENOSPC, "drive is full"),
    (errno.EIO, "reports errors"), (errno.EDQUOT, "quota"), (errno.EMFILE, "Choose another folder"),
])  # fmt: skip
def test_system_errors_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> None:
    monkeypatch.setattr(os, "fsync", failing(OSError(code, os.strerror(code))))
    ok, message = validate_nvme_path(tmp_path / "new", 0)
    assert not ok and said in message and os.strerror(code) in message
    assert list(tmp_path.iterdir()) == []


def test_a_drive_that_returns_other_bytes_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda self: b"other")
    ok, message = validate_nvme_path(tmp_path, 0)
    assert not ok and "read back differently" in message


@pytest.mark.parametrize("kind, warned", [
    ("nvme", None), ("ssd", "0.5 GB/s"), ("hdd", "rotating"), ("network", "network file system"),
    ("tmpfs", "saves no RAM"), ("virtual", None), ("unknown", None),
])  # fmt: skip
def test_the_kind_of_drive_is_told(tmp_path, monkeypatch, kind, warned):
    monkeypatch.setattr(nvme, "drive_of", lambda path: drive(kind))
    ok, message = validate_nvme_path(tmp_path, 0)
    assert ok and ((warned in message) if warned else message == "")
    assert ("cannot be seen" in nvme.describe_folder(tmp_path)) == (kind in ("virtual", "unknown"))


# --- speed


def test_speed_is_measured_and_the_file_removed(tmp_path: Path) -> None:
    speed = check_nvme_performance(tmp_path / "new", test_bytes=20 * MIB, num_threads=2)
    assert set(speed) == {"sequential_read_gb_s", "sequential_write_gb_s", "is_ssd", "warnings"}
    slowest = min(speed["sequential_read_gb_s"], speed["sequential_write_gb_s"])
    assert slowest > 0
    assert any("below 2 GB/s" in warning for warning in speed["warnings"]) == (slowest < 2.0)
    assert leftovers(tmp_path) == []


def test_speed_words() -> None:
    assert "/d reads 1.0 GB/s, below 2 GB/s" in nvme.slow_drive_warning("/d", 1.0, 3.0)
    assert "reads 1.0 GB/s and writes 1.5 GB/s" in nvme.slow_drive_warning("/d", 1.0, 1.5)
    assert nvme.slow_drive_warning("/d", 2.0, 2.0) == ""


@pytest.mark.parametrize("kind, is_ssd", [("nvme", True), ("hdd", False), ("virtual", None)])
def test_a_fresh_profile_answers_for_its_drive(tmp_path, monkeypatch, kind, is_ssd):
    """Fresh: no byte is written. Old, or of another drive: measured."""
    here = drive_of(tmp_path)
    known = dataclasses.replace(here, kind=kind, read_gb_per_s=1.25, write_gb_per_s=6.0)
    profile = dataclasses.replace(detect_machine(), drives=(known,)).save(tmp_path / "profile.json")
    monkeypatch.setattr(drive_speed, "drive_of", lambda path: known)
    folder = tmp_path / "states"
    found = drive_performance(folder, measured=profile)
    assert not folder.exists() and found["is_ssd"] is is_ssd
    assert (found["sequential_read_gb_s"], found["sequential_write_gb_s"]) == (1.25, 6.0)
    assert ["reads 1.2 GB/s, below 2 GB/s" in warning for warning in found["warnings"]] == [True]
    later_s = profile.stat().st_mtime + 31 * 86400
    assert drive_performance(folder, measured=profile, now_s=later_s)["sequential_read_gb_s"] != 1.25


def test_speed_takes_at_most_a_quarter_of_the_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = drive_speed.BlockFile
    monkeypatch.setattr(
        drive_speed, "BlockFile", lambda *args, **more: (sizes.append(more.get("size_bytes")), real(*args, **more))[1]
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 40 * MIB))
    check_nvme_performance(tmp_path, test_bytes=64 * MIB, num_threads=1)
    assert sizes[0] == 8 * MIB
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, MIB))
    refused(OSError, "too little to measure", lambda: check_nvme_performance(tmp_path))


@pytest.mark.parametrize("wrong", [{"test_bytes": 1}, {"max_s": 0}, {"num_threads": 0}])
def test_speed_arguments(tmp_path: Path, wrong: dict) -> None:
    refused(ValueError, "check_nvme_performance needs", lambda: check_nvme_performance(tmp_path, **wrong))


# --- locked memory


def test_memlock_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert memlock_limit_bytes() is None
    monkeypatch.setattr(resource, "getrlimit", lambda which: (8 * MIB, 8 * MIB))
    monkeypatch.setattr(Path, "read_text", lambda self, **_: "Name:\tx\nCapEff:\t0000000000000000\n")
    assert memlock_limit_bytes() == 8 * MIB
    monkeypatch.setattr(Path, "read_text", lambda self, **_: "Name:\tx\nCapEff:\t0000000000004000\n")
    assert memlock_limit_bytes() is None
    monkeypatch.setattr(Path, "read_text", lambda self, **_: "nothing")
    assert memlock_limit_bytes() == 8 * MIB


def test_write_combined_memory_is_judged_by_a_fresh_profile_of_this_machine(tmp_path: Path) -> None:
    here, path = detect_machine(), tmp_path / "machine_profile.json"

    def judged(share: float | None, here=here, **more: float) -> bool | None:
        links = LinkRates("measured", write_combined_share=share)
        path.write_text(dataclasses.replace(detect_machine(), links=links).to_json())
        return write_combined_measured(measured=path, here=here, **more)

    assert judged(1.04) is True and judged(0.8) is False and judged(None) is None
    assert judged(1.04, now_s=path.stat().st_mtime + 40 * 86400.0) is None, "too old"
    assert judged(1.04, here=dataclasses.replace(here, cpu_name="another")) is None
    assert write_combined_measured(measured=tmp_path / "none", here=here) is None


def test_a_kill_leaves_no_test_file(tmp_path: Path) -> None:
    """Whoever tests or measures a folder does it in such a file, which may have a GiB."""
    if not (child := os.fork()):
        with temporary_file(tmp_path) as file:
            file.write_bytes(b"x" * 5000)
            assert file.read_bytes() == b"x" * 5000
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert list(tmp_path.iterdir()) == []

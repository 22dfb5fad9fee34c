"""The probe's test file: random, locked, removed; unusable folders and full drives leave nothing."""

from pathlib import Path

import pytest

from outcore.common.quantities import MIB
from outcore.probe.bench import drive_file as test_file
from outcore.probe.bench.drive_file import TestFile, TestPathError, check_directory, sweep
from outcore.storage import BlockFile
from tests.refused import refused


def test_the_test_file_is_random_locked_and_removed(tmp_path: Path) -> None:
    with TestFile(tmp_path, 4 * MIB) as file:
        assert file.fill(limit_s=30.0) > 0
        data = file.path.read_bytes()
        assert len(data) == 4 * MIB and len(set(data[:4096])) > 200
        assert sweep(tmp_path) == []  # in use: its lock protects it
        assert file.path.exists()
    assert list(tmp_path.iterdir()) == []
    file.close()


def test_a_killed_runs_file_is_swept(tmp_path: Path) -> None:
    left = tmp_path / f"{test_file.PREFIX}123-abc.bin"
    left.write_bytes(b"x" * 100)
    other = tmp_path / "mine.bin"
    other.write_bytes(b"y")
    with TestFile(tmp_path, MIB) as file:
        assert file.swept == [left]
    assert list(tmp_path.iterdir()) == [other]


def test_fill_stops_on_a_slow_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_file, "LEAST_BYTES", MIB)
    monkeypatch.setattr(test_file, "FILL_CHUNK_BYTES", MIB)
    with TestFile(tmp_path, 8 * MIB) as file:
        file.fill(limit_s=0.0)
        assert file.size_bytes == file.path.stat().st_size == MIB


def test_unusable_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(TestPathError, "does not exist: create it", lambda: check_directory(tmp_path / "missing"))
    (tmp_path / "file").touch()
    refused(TestPathError, "not a directory", lambda: check_directory(tmp_path / "file"))
    monkeypatch.setattr(test_file, "_free_bytes", lambda directory: 1000)
    refused(TestPathError, r"no space .* 1.00 kB free", lambda: TestFile(tmp_path, 64 * MIB))

    def refuse(self: Path, exist_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "touch", refuse)
    refused(TestPathError, "read-only filesystem", lambda: check_directory(tmp_path))


def test_ctrl_c_leaves_nothing_of_the_look_at_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def interrupted(path: Path, **_: object) -> None:
        path.write_bytes(b"")
        made.append(path)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "touch", interrupted)
    with pytest.raises(KeyboardInterrupt):
        check_directory(tmp_path)
    assert made and not list(tmp_path.iterdir())


def test_a_full_drive_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outcore.storage import StorageError

    def full(self: BlockFile, size_bytes: int) -> None:
        raise StorageError("preallocate", path=self.path, offset=0, wanted=size_bytes, got=0, errno=28)

    monkeypatch.setattr(BlockFile, "preallocate", full)
    refused(TestPathError, "cannot be made", lambda: TestFile(tmp_path, 4 * MIB))
    assert list(tmp_path.iterdir()) == []

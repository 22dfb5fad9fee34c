"""Locks of runs, journals and stores on a system with msvcrt and without fcntl. Not tried on real Windows."""

import fcntl
import os
import sys
import types
from pathlib import Path

import pytest

from outcore.common import files
from outcore.common.journal import JournalHeld, LineJournal, is_held
from outcore.runs import RunInUse, RunLock, holder_of, lock_path
from tests.refused import refused


class FakeMsvcrt(types.ModuleType):
    """Its `locking`: one byte where the descriptor stands, mandatory, per descriptor, refused with EACCES."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def __init__(self) -> None:
        super().__init__("msvcrt")
        self._flock = fcntl.flock  # stands for the byte: it, too, dies with the descriptor

    def locking(self, descriptor: int, how: int, count: int) -> None:
        assert count == 1 and os.lseek(descriptor, 0, os.SEEK_CUR) == files.LOCKED_AT
        try:
            self._flock(descriptor, fcntl.LOCK_UN if how == self.LK_UNLCK else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PermissionError(13, "Permission denied") from None


@pytest.fixture(autouse=True)
def windows(monkeypatch: pytest.MonkeyPatch) -> FakeMsvcrt:
    fake = FakeMsvcrt()
    monkeypatch.setitem(sys.modules, "msvcrt", fake)
    monkeypatch.setattr(files, "IS_WINDOWS", True)
    monkeypatch.setattr(fcntl, "flock", lambda *rest: pytest.fail("Windows has no flock"))
    return fake


def test_a_lock_excludes_others_and_leaves_the_file_readable(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"who holds it")
    with path.open("r+b") as one, path.open("r+b") as two:
        os.lseek(one.fileno(), 4, os.SEEK_SET)
        files.lock_file(one.fileno())
        assert os.lseek(one.fileno(), 0, os.SEEK_CUR) == 4 and path.read_bytes() == b"who holds it"
        refused(BlockingIOError, "another process", lambda: files.lock_file(two.fileno()))
        files.unlock_file(one.fileno())
        files.lock_file(two.fileno())


def test_a_journal_is_held_once(tmp_path: Path) -> None:
    journal = LineJournal(tmp_path / "j", {"kind": "test"}, lambda place, value: None)
    journal.append([1])
    assert is_held(tmp_path / "j")
    with pytest.raises(JournalHeld):
        LineJournal(tmp_path / "j", {"kind": "test"}, lambda place, value: None)
    journal.close()
    assert not is_held(tmp_path / "j")


def test_a_run_is_trained_by_one_process(tmp_path: Path) -> None:
    lock = RunLock.take("mine", [tmp_path])
    assert holder_of(lock_path(tmp_path, "mine")) is not None
    with pytest.raises(RunInUse, match="mine"):
        RunLock.take("mine", [tmp_path])
    lock.release()
    RunLock.take("mine", [tmp_path]).release()

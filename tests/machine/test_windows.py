"""Locks, signals and files on a system with msvcrt and Ctrl-Break, without fcntl, resource, fork, /proc and pread.

Not tried on real Windows."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outcore.common import fsync_file, os_layer, write_atomic
from outcore.common.journal import JournalHeld, LineJournal, is_held
from outcore.runs import RunInUse, RunLock, holder_of, lock_path
from outcore.serve.gate.connections import MOST_FILES, most_connections
from outcore.train.process.stop_request import StopRequest
from tests.machine.windows_fakes import FakeMsvcrt
from tests.refused import refused


@pytest.fixture(autouse=True)
def windows(monkeypatch: pytest.MonkeyPatch) -> FakeMsvcrt:
    fake = FakeMsvcrt()
    monkeypatch.setitem(sys.modules, "msvcrt", fake)
    monkeypatch.setattr(os_layer, "IS_WINDOWS", True)
    monkeypatch.setattr(fcntl, "flock", lambda *rest: pytest.fail("Windows has no flock"))
    return fake


def test_a_lock_excludes_others_and_leaves_the_file_readable(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"who holds it")
    with path.open("r+b") as one, path.open("r+b") as two:
        os.lseek(one.fileno(), 4, os.SEEK_SET)
        os_layer.lock_file(one.fileno())
        assert os.lseek(one.fileno(), 0, os.SEEK_CUR) == 4 and path.read_bytes() == b"who holds it"
        refused(BlockingIOError, "another process", lambda: os_layer.lock_file(two.fileno()))
        os_layer.unlock_file(one.fileno())
        os_layer.lock_file(two.fileno())


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


def test_a_process_apart_has_a_group_and_is_asked_to_stop_by_ctrl_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signal 0 ends a process there, and SIGTERM kills it: neither may be sent."""
    monkeypatch.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0x200, raising=False)
    monkeypatch.setattr(signal, "CTRL_BREAK_EVENT", 1, raising=False)
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    assert os_layer.apart_options() == {"creationflags": 0x200}
    os_layer.ask_to_stop(77, signal.SIGTERM)
    os_layer.ask_to_stop(77)
    assert sent == [(77, 1), (77, 1)]


def test_ctrl_break_stops_a_run_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture) -> None:
    """SIGUSR1 stands for it."""
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGUSR1, raising=False)
    monkeypatch.delattr(signal, "SIGHUP")
    with StopRequest() as asked:
        assert not asked.wanted()
        signal.raise_signal(signal.SIGUSR1)
        assert asked.wanted() and asked.exit_code == 128 + signal.SIGUSR1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert "finishing this step, then saving" in capfd.readouterr().err


def test_a_reader_delays_a_replacement_and_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Windows refuses to replace what another has open, a virus scanner for one."""
    real, refusals = os.replace, iter([True, True])

    def replace(new: Path, old: Path) -> None:
        if next(refusals, False):
            raise PermissionError(13, "in use")
        real(new, old)

    monkeypatch.setattr(os, "replace", replace)
    write_atomic(tmp_path / "f", "new")
    assert (tmp_path / "f").read_text() == "new"
    monkeypatch.setattr(os_layer, "REPLACED_WITHIN_S", 0.05)
    monkeypatch.setattr(os, "replace", lambda new, old: (_ for _ in ()).throw(PermissionError(13, "in use")))
    with pytest.raises(PermissionError):
        write_atomic(tmp_path / "f", "newer")
    assert [path.name for path in tmp_path.iterdir()] == ["f"] and (tmp_path / "f").read_text() == "new"


def test_bytes_are_read_without_pread_and_synced_where_they_may_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "f").write_bytes(b"0123456789")
    monkeypatch.delattr(os, "pread")
    descriptor = os.open(tmp_path / "f", os.O_RDONLY)
    os.lseek(descriptor, 3, os.SEEK_SET)
    assert os_layer.read_at(descriptor, 4, 5) == b"5678" and os.lseek(descriptor, 0, os.SEEK_CUR) == 3
    os.close(descriptor)
    opened: list[int] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, *more: opened.append(flags) or real(path, flags, *more))
    fsync_file(tmp_path / "f")
    assert opened == [os.O_RDWR]


def test_limits_that_windows_does_not_have_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resource", None)
    os_layer.limit_memory(1)
    assert os_layer.most_open_files() is os_layer.most_locked_bytes() is None
    assert most_connections() == (MOST_FILES // 2, MOST_FILES * 3 // 4)


WITHOUT_POSIX = Path(__file__).with_name("without_posix.py")


@pytest.mark.more
@pytest.mark.parametrize("work", ["doors", "train"])
def test_it_works_where_posix_has_nothing(tmp_path: Path, work: str) -> None:
    """A child in which fcntl, resource, fork, /proc, pread and symbolic links are refused to our files."""
    done = subprocess.run(
        [sys.executable, WITHOUT_POSIX, work], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1] == "worked", done.stdout + done.stderr

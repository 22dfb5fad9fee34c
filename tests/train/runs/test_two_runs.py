"""Two processes and one run: the second is told, names are taken once, and workers end with their launcher."""

import errno
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from outcore.common import stats_below
from outcore.config import TrainConfig
from outcore.runs import RunInUse, RunLock, holder_of, list_runs, listing, lock_path, take_run
from tests.forked import ForkedProcess, fork_server, start_script
from tests.refused import failing
from tests.train.jobs import REPOSITORY, fixtures, flags, fresh_env
from tests.waiting import until

corpus, shared, straight, straight_by, in_the_repository = fixtures
TRAIN = REPOSITORY / "train_model.py"
OFTEN = [1, pytest.param(100, marks=pytest.mark.slow)]


def _take_names(root: str, times: int, names: Any, everybody: Any) -> None:
    """Take default names and keep them; in a process of its own."""
    config = TrainConfig(checkpoint_dir=f"{root}/c", log_dir=f"{root}/l", export_dir=f"{root}/e")
    taken = [take_run(config, print) for _ in range(times)]
    names.put([run.folder.name for run in taken])
    everybody.wait(240)  # its locks are held while the others still look for names


def test_default_names_are_taken_once(tmp_path: Path) -> None:
    context = fork_server()
    names, everybody = context.Queue(), context.Barrier(3)
    workers = [context.Process(target=_take_names, args=(str(tmp_path), 10, names, everybody)) for _ in range(3)]
    for worker in workers:
        worker.start()
    taken = [name for _ in workers for name in names.get(timeout=240)]
    for worker in workers:
        worker.join()
    assert len(taken) == len(set(taken)) == 30


def test_a_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    lock = RunLock.take("r", [tmp_path])
    path = lock_path(tmp_path, "r")
    with pytest.raises(RunInUse, match=rf"process {os.getpid()} on {platform.node()}.*choose another --run_name"):
        RunLock.take("r", [tmp_path])
    assert (holder_of(path) or {})["pid"] == os.getpid()
    child = os.fork()
    if not child:  # inherits descriptors, but not the lock
        time.sleep(5)
        os._exit(0)
    lock.release()
    RunLock.take("r", [tmp_path]).release()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    child = os.fork()
    if not child:
        RunLock.take("r", [tmp_path])
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert path.exists() and holder_of(path) is None
    RunLock.take("r", [tmp_path]).release()
    assert not path.exists()


def test_who_only_asks_for_the_holder_is_waited_for(tmp_path: Path) -> None:
    """However long it is kept from running between its lock and its unlock."""
    asking = os.open(lock_path(tmp_path, "r"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(asking, fcntl.LOCK_SH)
    threading.Timer(0.3, os.close, [asking]).start()
    lock = RunLock.take("r", [tmp_path])
    with pytest.raises(RunInUse):
        RunLock.take("r", [tmp_path])
    lock.release()


def test_a_holder_that_has_not_written_its_name_yet_is_named(tmp_path: Path) -> None:
    path = lock_path(tmp_path, "r")
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        threading.Timer(0.2, path.write_text, ['{"pid": 4711, "host": "here"}']).start()
        with pytest.raises(RunInUse, match="process 4711 on here"):
            RunLock.take("r", [tmp_path])


def test_a_run_that_ends_while_it_is_listed_is_listed_as_it_ended(tmp_path, monkeypatch):
    metrics = tmp_path / "l/r/metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    lines = [{"event": "header", "plan": {"total_steps": 2}}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))

    def ends(path: Path) -> None:
        metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))

    monkeypatch.setattr(listing, "holder_of", ends)
    (run,) = list_runs(tmp_path / "c", tmp_path / "l", tmp_path / "e")
    assert (run.state, run.step) == ("finished", 2)


def test_a_run_that_has_written_nothing_yet_is_the_latest(tmp_path):
    for name in ("old", "new"):
        (tmp_path / "c" / name).mkdir(parents=True)
    (tmp_path / "c/old/kept").write_text("something")
    lock = RunLock.take("new", [tmp_path / "c"])
    runs = list_runs(tmp_path / "c", tmp_path / "l", tmp_path / "e")
    lock.release()
    assert [run.folder.name for run in runs] == ["new", "old"]


def test_files_that_go_while_they_are_counted_are_left_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    stats = stats_below(tmp_path)
    assert next(stats).st_size == 1
    for path in tmp_path.iterdir():
        path.unlink()
    assert not list(stats)


def test_a_file_that_its_last_holder_removed_meanwhile_is_no_lock(tmp_path, monkeypatch):
    """A run that ends between our opening of the file and our lock takes the file's name away."""
    flock = fcntl.flock

    def late(descriptor, how):
        monkeypatch.setattr(fcntl, "flock", flock)
        lock_path(tmp_path, "r").unlink()
        flock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    lock = RunLock.take("r", [tmp_path])
    with pytest.raises(RunInUse):
        RunLock.take("r", [tmp_path])
    lock.release()


def test_a_lock_that_cannot_be_written_names_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "ftruncate", failing(OSError(errno.EROFS, "Read-only file system")))
    with pytest.raises(OSError, match="Read-only file system") as raised:
        RunLock.take("r", [tmp_path])
    assert raised.value.filename == str(lock_path(tmp_path, "r")) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("times", OFTEN)
def test_two_processes_of_one_name(tmp_path: Path, corpus: Path, times: int) -> None:
    """One trains to its end, the other gets one sentence and leaves nothing; whichever comes first."""
    for turn in range(times):
        root = tmp_path / str(turn)
        root.mkdir()
        argv = flags(root, corpus, "--run_name", "r", "--max_steps", "4", "--save_steps", "1", "--no_export")
        logs = [root / "a.txt", root / "b.txt"]
        processes = [start_script(TRAIN, argv, fresh_env(), log) for log in logs]
        codes = [process.wait(240) for process in processes]
        told = [log.read_text() for log in logs]
        assert sorted(codes) == [0, 2], told
        loser = codes.index(2)
        winner_pid = processes[1 - loser].pid
        lines = [line for line in told[loser].splitlines() if line.startswith("error: ")]
        in_use = f"run r is being written by process {winner_pid} on {platform.node()}"
        ended = "run_name r is in use. Continue that run with --resume_from_checkpoint auto"
        assert len(lines) == 1 and (in_use in lines[0] or ended in lines[0]), told[loser]
        assert [p.name for p in sorted((root / "checkpoint/r").iterdir())] == ["step-00000003", "step-00000004"]
        assert not list((root / "checkpoint").glob(".r*"))


def test_a_refused_run_leaves_no_folders(tmp_path: Path, corpus: Path) -> None:
    from outcore.train.run import main

    argv = flags(tmp_path, corpus, "--run_name", "r", "--text_column", "nowhere", "--dataset", f"{corpus}x")
    assert main(argv) == 2
    assert not list(tmp_path.glob("*/r")) and not list(tmp_path.glob("*/.r.lock"))


LAUNCHER = """
import os, sys, runpy, time
if os.fork() == 0:
    sys.argv = ["train_model.py", *sys.argv[1:]]
    runpy.run_path("train_model.py", run_name="__main__")
time.sleep(120)
"""


def _kill_the_launcher(launcher: ForkedProcess | subprocess.Popen[bytes], root: Path, kill_pid: int) -> None:
    """Once steps are saved: kill -9; the worker saves its step and ends, and the run is free."""
    saved, started = root / "checkpoint/r", [psutil.Process(launcher.pid)]
    try:
        until(lambda: saved.is_dir() and any(saved.glob("step-*")))  # a first save
        holder = holder_of(lock_path(saved.parent, "r"))
        assert holder is not None
        worker = psutil.Process(int(holder["pid"]))  # type: ignore[call-overload]
        started += [*started[0].children(recursive=True), worker]
        os.kill(kill_pid, signal.SIGKILL)
        worker.wait(120)
        assert holder_of(lock_path(saved.parent, "r")) is None
    finally:  # else the test process waits at its end for a child that sleeps
        for process in started:
            with suppress(psutil.Error):
                started += process.children(recursive=True)
        for process in started:
            with suppress(psutil.Error):
                process.kill()


def test_a_worker_ends_with_its_launcher(tmp_path: Path, corpus: Path) -> None:
    script, log = tmp_path / "launcher.py", tmp_path / "log.txt"
    script.write_text(LAUNCHER)
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "5000", "--save_steps", "20", "--eval_steps", "0")
    launcher = start_script(script, ["--local_rank=0", *argv, "--no_export"], fresh_env(), log)
    _kill_the_launcher(launcher, tmp_path, launcher.pid)
    assert "the launcher of this process has ended" in log.read_text()
    assert "saved. Go on with the same command" in log.read_text()


@pytest.mark.slow
def test_a_worker_ends_with_the_deepspeed_command(tmp_path: Path, corpus: Path) -> None:
    """Its own parent lives on: the launcher in between does not notice that the command was killed."""
    command = [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators=1", "--master_port=29655"]
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "5000", "--save_steps", "20", "--eval_steps", "0")
    env = fresh_env(DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1")
    with open(tmp_path / "log.txt", "wb") as log:
        launcher = subprocess.Popen(
            [*command, "train_model.py", *argv, "--no_export"], env=env, stdout=log, stderr=subprocess.STDOUT
        )
    _kill_the_launcher(launcher, tmp_path, launcher.pid)

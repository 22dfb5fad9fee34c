"""Where the cases happen: a folder each, one shared corpus and trained run, the real entry points.

`run_case` prepares what is wrong, calls the program in this process, and returns what a person would read. Folders are
replaced by placeholders.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from outcore.checkpoint.folders import list_checkpoints, open_checkpoint
from tests.forked import start_script

REPOSITORY = Path(__file__).resolve().parents[2]
FAST = "--seq_length 32 --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --sample_tokens 0 "
FAST += "--eval_steps 0 --save_steps 0 --max_steps 1 --report_to none --logging_steps 100 --run_name new "
FAST += "--engine deepspeed"
TWO_HOSTS = "deepspeed --hostfile=hosts train_model.py"
"""A program of `Case`: two processes with the variables that a launcher sets; what rank 0 says counts."""
SENTENCE = "the quick brown fox jumps over the lazy dog and runs away from the {} {} bears\n"


class NotHere(Exception):
    """The case cannot be set up on this machine; the message says why."""


@dataclass(frozen=True)
class Case:
    """One thing that a person can get wrong."""

    id: str
    wrong: str
    """What is wrong, in words."""
    argv: str
    """Flags as typed. {here}: the case's folder, {data}: the folder with the corpus, {model}: an exported model,
    {run}: checkpoints of a finished run; {last}: a copy of the newest one, which the case damages."""
    code: int
    words: tuple[str, ...]
    """What the message must contain."""
    leaves: str = "nothing"
    """What is on disk afterwards: a key of LEAVES."""
    setup: Callable[[World], None] | None = None
    program: str = "train_model.py"


@dataclass(frozen=True)
class Outcome:
    """What happened: exit code, everything printed, and the part that tells the person."""

    code: int
    printed: str
    message: str


class Shared:
    """What all cases of a session share: a small text below a folder with a space, and a run of two steps on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = root / "my data"
        self.data.mkdir()
        self.corpus = self.data / "a text.txt"
        self.corpus.write_text("\n\n".join(SENTENCE.format(i, i * i) * 12 for i in range(60)))
        # Real files, open to the end: compilers write to them, and libraries' log handlers keep them.
        self.streams = (open(root / "out.txt", "w+"), open(root / "err.txt", "w+"))  # noqa: SIM115

    def close(self) -> None:
        """At the end of the session."""
        for stream in self.streams:
            stream.close()

    @cached_property
    def trained(self) -> Outcome:
        """The finished run of two steps, with a checkpoint after each; made when first asked for."""
        argv = "--run_name done --max_steps 2 --save_steps 1"
        return call("train_model.py", [*self.flags(self.root / "trained"), *argv.split()], self.streams)

    @property
    def run(self) -> Path:
        assert self.trained.code == 0, self.trained.printed
        return self.root / "trained/checkpoint/done"

    @property
    def model(self) -> Path:
        assert self.trained.code == 0, self.trained.printed
        return self.root / "trained/export/done"

    def flags(self, root: Path, *, with_data: bool = True) -> list[str]:
        folders = [f"--{name}_dir={root / name}" for name in ("checkpoint", "log", "export")]
        data = ["--dataset", str(self.corpus)] if with_data else []
        return [*FAST.split(), *data, *folders, f"--data_cache_dir={self.root / 'cache'}"]


@dataclass
class World:
    """The folder of one case, and what must be undone after it."""

    here: Path
    shared: Shared
    undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def file(self, name: str, content: str | bytes | dict[str, Any] = "") -> Path:
        """A file below the case's folder."""
        path = self.here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, dict):
            content = json.dumps(content, indent=1)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def patch(self, target: Any, name: str, value: Any) -> None:
        """`target.name = value` until the case is over."""
        old = getattr(target, name)
        setattr(target, name, value)
        self.undo.callback(setattr, target, name, old)

    def copy_run(self) -> Path:
        """A copy of the finished run's checkpoints as {here}/checkpoint/done; returns the newest one."""
        shutil.copytree(self.shared.run, self.here / "checkpoint/done")
        return self.here / "checkpoint/done/step-00000002"

    def copy_model(self) -> Path:
        """A copy of the exported model as {here}/model."""
        return Path(shutil.copytree(self.shared.model, self.here / "model"))

    def mount(self, name: str, *arguments: str) -> Path:
        """A file system mounted on {here}/name until the case is over; NotHere where that is not permitted."""
        folder = self.here / name
        folder.mkdir(parents=True, exist_ok=True)
        command = shutil.which("mount")
        done = command and subprocess.run([command, *arguments, str(folder)], capture_output=True, text=True)
        if not done or done.returncode:
            raise NotHere(f"mounting is not permitted here ({done.stderr.strip() if done else 'no mount command'})")
        self.undo.callback(subprocess.run, ["umount", str(folder)], check=True)
        return folder

    def small_drive(self, name: str, size_mb: int) -> Path:
        """A drive of `size_mb` MB (a RAM disk)."""
        return self.mount(name, "-t", "tmpfs", "-o", f"size={size_mb}m", "outcore-small-drive")

    def sparse_drive(self, name: str, size_gb: int) -> Path:
        """A drive of `size_gb` GB that costs almost no space: ext4 in a sparse file."""
        image = self.here / f"{name}.img"
        with open(image, "wb") as file:
            file.truncate(size_gb * 10**9)
        if shutil.which("mkfs.ext4") is None:
            raise NotHere("no mkfs.ext4 here")
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
        return self.mount(name, "-o", "loop", str(image))

    def read_only(self, name: str) -> Path:
        """A file system that takes no writes."""
        return self.mount(name, "-t", "tmpfs", "-o", "ro,size=1m", "outcore-read-only")


def call(program: str, argv: list[str], streams: tuple[IO[str], IO[str]]) -> Outcome:
    """The program in this process, its output in `streams`; the message is left to the caller."""
    for stream in streams:
        stream.seek(0)
        stream.truncate()
    out, err = streams
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(REPOSITORY):
        try:
            code = _entry(program, argv)
        except SystemExit as leaving:  # argparse
            code = int(leaving.code or 0)
    printed = ""
    for stream in streams:
        stream.seek(0)
        printed += stream.read()
    return Outcome(code, printed, "")


def _entry(program: str, argv: list[str]) -> int:
    if program == "train_model.py":
        from outcore.train.run import main

        return main(argv)
    if program == TWO_HOSTS:
        return _two_hosts(argv)
    if program == "gds_optimizer.py":
        from outcore.probe.main import main as optimize

        return optimize(argv, REPOSITORY)
    if program == "outcore":
        from outcore.cli import main as command

        return command(argv)
    from outcore.install.job import InstallJob

    with InstallJob(argv, REPOSITORY) as job:
        job.detect()
        job.print_plan()
    return job.exit_code


def _two_hosts(argv: list[str]) -> int:
    """train_model.py twice, as ranks 0 and 1 of one run, each on a host of its own; rank 0's output is printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{rank}.txt" for rank in range(2)]
        ranks = []
        for rank, log in enumerate(logs):
            launched = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "RANK": str(rank), "LOCAL_RANK": "0"}
            launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            ranks.append(start_script(REPOSITORY / "train_model.py", argv, {**os.environ, **launched}, log))
        try:
            codes = [process.wait(900) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
        print(logs[0].read_text())
    return codes[0]


def run_case(case: Case, here: Path, shared: Shared) -> Outcome:
    """Prepare, run and clean up one case. NotHere when this machine cannot prepare it."""
    world = World(here, shared)
    with world.undo:
        if case.setup is not None:
            case.setup(world)
        argv = [word.format_map(_Places(world)) for word in shlex.split(case.argv)]
        if case.program.endswith("train_model.py"):
            argv = [*shared.flags(here, with_data="--dataset" not in argv), *argv]
        done = call(case.program, argv, shared.streams)
        problem = LEAVES[case.leaves](world)
    assert not problem, f"{case.id}: {problem}\n{done.printed}"
    return Outcome(done.code, done.printed, _message(case, done.code, normalised(done.printed, world)))


class _Places(dict[str, str]):
    """The placeholders of `Case.argv`; the trained run is made only when a case names it."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world

    def __missing__(self, name: str) -> str:
        if name == "here":
            return str(self.world.here)
        if name == "last":
            return str(self.world.here / "checkpoint/done/step-00000002")
        return str(getattr(self.world.shared, name))


def _message(case: Case, code: int, printed: str) -> str:
    """The error; for a run that goes on, the line that says so."""
    if code == 0:
        lines = [line for line in printed.splitlines() if case.words[0] in line]
        return lines[0] if lines else printed
    _, found, text = printed.partition("\nerror: " if "\nerror: " in printed else "error: ")
    return text.strip() if found else printed.strip()


def normalised(message: str, world: World) -> str:
    """The message with the folders and sizes of this machine replaced by placeholders."""
    shared = world.shared
    places = [(world.here / "checkpoint/done/step-00000002", "LAST"), (world.here / "checkpoint/done", "RUN")]
    places += [(world.here, "DIR"), (shared.data, "DATA"), (shared.root / "trained/checkpoint/done", "RUN")]
    places += [(shared.root / "trained/export/done", "MODEL"), (shared.root, "SHARED"), (REPOSITORY, "REPOSITORY")]
    for path, name in places:
        message = message.replace(str(path), name)
    message = re.sub(r"https?://[\w.]+", "URL", message)
    message = re.sub(r"\b\d[\d.,]* (?:B|[kKMGT]i?B)\b", "N GB", message)
    message = re.sub(r"\b\d+ bytes\b|\bsays \d+\b", lambda m: re.sub(r"\d+", "N", m.group()), message)
    return message


# --- what must be true on the disk afterwards: key -> (words for the table, check: '' or the problem)


def _files_below(world: World) -> list[Path]:
    roots = [world.here / name for name in ("checkpoint", "log", "export", "small")]
    return [p for root in roots if root.is_dir() for p in root.rglob("*") if p.is_file()]


def _nothing(world: World) -> str:
    made = [str(p) for p in (world.here / name for name in ("checkpoint", "log", "export")) if p.exists()]
    return f"the failed run made {made}" if made else ""


def _no_files(world: World) -> str:
    files = _files_below(world)
    return f"the failed run made {files}" if files else ""


def _checkpoints_whole(world: World) -> str:
    source = {p.name for p in list_checkpoints(world.shared.run)}
    for name in source:
        open_checkpoint(world.shared.run / name)
    return ""


def _resumable(world: World) -> str:
    found = [path.parent for path in world.here.rglob("step-*/manifest.json")]
    for checkpoint in found:
        open_checkpoint(checkpoint)
    left = list(world.here.rglob(".step-*"))
    return "" if found and not left else f"no whole checkpoint, or a half-written one: {found} {left}"


def _unharmed(world: World) -> str:
    left = [p for p in _files_below(world) if ".part" in p.name or p.parent.name.startswith(".step")]
    return f"half-written files are left: {left}" if left else ""


def _finished(world: World) -> str:
    return "" if list(world.here.rglob("step-*/manifest.json")) else "the run left no checkpoint"


LEAVES: dict[str, Callable[[World], str]] = {
    "nothing": _nothing,
    "empty folders": _no_files,
    "whole checkpoints": _checkpoints_whole,
    "resumable": _resumable,
    "no half file": _unharmed,
    "the run": _finished,
}

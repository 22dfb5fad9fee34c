"""World of saves: one or two processes at a time write a run's checkpoints, journal and answers, and are killed.

Each process does what a run does: takes the run's lock, goes on from the newest checkpoint, saves, notes lines. What it
was told is done is *announced*; whatever happens then, the next process finds it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outcore.checkpoint import (
    CheckpointError,
    ShardReader,
    TensorPlan,
    go_back_to,
    list_checkpoints,
    newest_checkpoint,
    open_checkpoint,
    plan_shards,
    save_checkpoint,
    write_shard,
)
from outcore.common import FileError, make_folder
from outcore.common.files import write_json
from outcore.common.journal import JournalHeld, LineJournal
from outcore.infer.commands.journal import JobError, Journal
from outcore.runs import RunInUse, RunLock
from tests.simulation.drive import Drive, Faults, Process
from tests.simulation.threads import Killed, Simulation

HEADER = {"what": "lines of a simulation"}
LINES = 6
"""Of the job that is answered."""
LONG = 2
"""The one whose answer is long."""


class Saves:
    """What was announced, and the processes that announce it."""

    def __init__(self, simulation: Simulation, drive: Drive) -> None:
        self.simulation, self.drive, self.root = simulation, drive, drive.root / "a"
        self.step = 0
        """The newest step that was announced."""
        self.may_be = {0}
        """Steps at which the next process may find the run."""
        self.before: set[int] = set()
        """Those to which a power cut may lead back until a save is announced: what a start finds may be a save that was
        killed before it had synced its name."""
        self.lines: list[int] = []
        """Lines of the journal, in order, of which the first `safe` are announced as being on the drive."""
        self.safe = 0
        self.answered: set[int] = set()
        """Noted answers that no power cut took."""
        self.safe_answers: set[int] = set()
        """Those noted up to one of 64 KiB, with which everything is brought to the drive."""
        self.is_finished = False
        self.inside: Process | None = None
        """The process that holds the run's lock."""
        self.value = 0
        """A file that is replaced: what it holds, and what it may hold when a replacement was cut short."""
        self.next_value: int | None = None
        self.made: list[Path] = []
        """Folders that were announced."""

    def run(self) -> None:
        """Processes one after another, sometimes two, some of which are killed, until one has looked in peace."""
        simulation, pick = self.simulation, self.simulation.random
        for life in range(pick.randint(2, 4)):
            self.drive.kill_at = self.drive.calls + pick.randint(1, 260) if pick.random() < 0.75 else None
            self.drive.cuts_power = pick.random() < 0.6
            count = 2 if pick.random() < 0.5 else 1
            tasks = [simulation.start(self._process, f"process {life}.{n}") for n in range(count)]
            simulation.block(lambda tasks=tasks: all(task.is_over for task in tasks))
            for process in self.drive.processes:
                self.drive.end_process(process)
            self.inside = None
            if self.drive.is_cut:
                self.drive.cut_power()
                self.may_be |= self.before
                self.answered = set(self.safe_answers)
                self.lines = self._left_of_lines()
            self._raise_failures()
        self.drive.kill_at, self.drive.faults = None, Faults()
        self.drive.is_full = False
        self.drive.broken.clear()
        task = simulation.start(lambda: self._process(steps=1, finishes=True), "last")
        simulation.block(lambda: task.is_over)
        self._raise_failures()
        assert self.is_finished, "the job did not end though nothing was in its way"

    def _announced(self) -> None:
        """Something is told to be done: now and then the power fails just then."""
        if self.drive.kill_at is not None and self.simulation.chance(0.1):
            self.drive.kill_at, self.drive.cuts_power = self.drive.calls + 1, True

    def _is_alone(self) -> bool:
        return sum(not process.is_dead for process in self.drive.processes) == 1

    def _raise_failures(self) -> None:
        if self.simulation.failures:
            raise self.simulation.failures[0]

    # --- a process

    def _process(self, *, steps: int | None = None, finishes: bool = False) -> None:
        process, pick = self.drive.process(), self.simulation.random
        is_faulty = bool(self.drive.faults.error)
        parents = [self.root / "checkpoints", self.root / "logs"]
        has_failed = False
        while True:
            was_alone = self._is_alone()
            try:
                for folder in parents:
                    make_folder(folder)
                lock = RunLock.take("r", parents, lambda words: None)
                break
            except RunInUse as error:
                assert "is being written by" in str(error)
                assert not (has_failed and was_alone and self._is_alone()), "a lock that was not taken is held"
                return
            except OSError as error:
                assert is_faulty, f"an error that the drive did not give: {error!r}"
                if has_failed:
                    return
                has_failed = True
        assert self.inside is None or self.inside.is_dead, "two processes hold the lock of one run"
        self.inside = process
        try:
            acts: list[Callable[[], None]] = [self._note, self._answer, self._answer, self._replace]
            acts += [lambda: self._save(steps or pick.randint(1, 4))]
            pick.shuffle(acts)
            self._look()
            for act in acts:
                with self._told(is_faulty):
                    act()
            if finishes:
                self._finish()
        finally:
            if self.inside is process:
                self.inside = None
        with self._told(is_faulty):
            lock.release()
            with self._in_peace():
                left = [path for path in parents if self._is_alone() and (path / ".r.lock").exists()]
                assert not left, f"nobody holds the run and its lock's file is in {left}"

    @contextlib.contextmanager
    def _told(self, is_faulty: bool) -> Any:
        """An error of the drive ends what was being done, in words with a path."""
        try:
            yield
        except OSError as error:
            assert is_faulty, f"an error that the drive did not give: {error!r}"
            assert isinstance(error, FileError) or error.filename or "/" in str(error), f"no path in {error!r}"
            if isinstance(error, FileError):
                assert "/" in str(error)
        except (CheckpointError, JobError) as error:
            assert is_faulty, str(error)

    @contextlib.contextmanager
    def _in_peace(self) -> Any:
        self.drive.is_quiet = True
        try:
            yield
        finally:
            self.drive.is_quiet = False

    # --- checkpoints

    @property
    def run_folder(self) -> Path:
        return self.root / "checkpoints/r"

    def _look(self) -> None:
        """What a start finds: the newest announced step or one that was being saved, whole; nothing damaged."""
        said: list[str] = []
        with self._told(bool(self.drive.faults.error)):
            if self.run_folder.is_dir() and self.simulation.chance(0.5):
                newest_checkpoint(self.run_folder, said.append)  # may be killed, or refused, in the middle
        with self._in_peace():
            found = newest_checkpoint(self.run_folder, said.append) if self.run_folder.is_dir() else None
            step = 0 if found is None else found.step
            assert not said, f"a checkpoint that has its name is not whole: {said[0]}"
            assert step in self.may_be, f"step {self.step} was announced, {step} is found (possible: {self.may_be})"
            assert not self._halves(), f"a save that was cut short is neither undone nor finished: {self._halves()}"
            for path in list_checkpoints(self.run_folder):
                checkpoint = open_checkpoint(path)
                assert not checkpoint.damaged_export, checkpoint.damaged_export
                for name, value in _values(checkpoint.step).items():
                    read = ShardReader(path, "model").read(name)
                    assert torch.equal(read, value), f"{path.name} holds other numbers than were saved"
                assert checkpoint.trainer_state()["engine"] == {"at": checkpoint.step}
        self.step, self.may_be, self.before = step, {step}, self.before | self.may_be

    def _halves(self) -> list[str]:
        """Checkpoints that a save put aside, and that have not their names."""
        found = list(self.run_folder.glob(".step-*.old.part")) if self.run_folder.is_dir() else []
        return [path.name for path in found if not (self.run_folder / path.name[1 : len("step-00000000") + 1]).exists()]

    def _save(self, count: int) -> None:
        pick = self.simulation.random
        if self.step > 1 and pick.random() < 0.5:
            with self._in_peace():
                older = [path for path in list_checkpoints(self.run_folder) if open_checkpoint(path).step < self.step]
            if older:
                target = open_checkpoint(older[-1])
                self.may_be |= {target.step}
                go_back_to(target)
                self.step, self.may_be, self.before = target.step, {target.step}, set()
                self._announced()
                with self._in_peace():
                    newest = list_checkpoints(self.run_folder)[-1].name
                    assert newest == target.path.name, f"gone back to {target.path.name}, and {newest} is the newest"
        for _ in range(count):
            step = self.step + 1
            self.may_be |= {step}
            said: list[str] = []
            keep, fill = pick.randint(1, 3), partial(_write, step=step, most_bytes=pick.choice([1200, 4000]))
            struck = len(self.drive.struck)
            try:
                save_checkpoint(self.run_folder, step, fill, needed_bytes=4096, keep=keep, say=said.append)
            except OSError:
                if len(self.drive.struck) == struck + 1 and not self.drive.is_full and not self.drive.broken:
                    with self._in_peace():
                        assert not self._halves(), f"a save that failed leaves {self._halves()}"
                raise
            self.step, self.may_be, self.before = step, {step}, set()
            self._announced()
            with self._in_peace():
                if not said:
                    assert len(list_checkpoints(self.run_folder)) <= keep, "old checkpoints were not removed"
                    left = [path.name for path in self.run_folder.glob(".*")]
                    assert not left, f"a save leaves {left}"

    # --- lines, a file that is replaced, a job

    def _left_of_lines(self) -> list[int]:
        """After a power cut: those that are there."""
        with self._in_peace():
            found: list[int] = []
            path = self.root / "logs/lines"
            if path.exists():
                LineJournal(path, HEADER, lambda at, value: found.append(value)).close()
        assert found == self.lines[: len(found)], "the journal holds other lines, or in another order"
        assert len(found) >= self.safe, f"{self.safe} lines were synced, {len(found)} are left"
        self.safe = len(found)
        return found

    def _note(self) -> None:
        found: list[int] = []
        try:
            journal = LineJournal(self.root / "logs/lines", HEADER, lambda at, value: found.append(value))
        except JournalHeld:
            raise AssertionError("the journal is held though the run's lock is ours") from None
        with contextlib.closing(journal):
            assert found[: self.safe] == self.lines[: self.safe], "synced lines are gone"
            assert found == self.lines[: len(found)], "the journal holds other lines, or in another order"
            self.lines = found
            self.safe = min(self.safe, len(found))
            with self._in_peace():
                self._check_held(self.root / "logs/lines")
            for _ in range(self.simulation.random.randint(1, 5)):
                count = self.simulation.random.randint(1, 2)
                values = [10**40 + (len(self.lines) + more) * 7 for more in range(count)]
                self.lines += values
                places = journal.append(values)
                with self._in_peace():
                    assert [journal.value_at(place) for place in places] == values, "a line is not where it was put"
                if self.simulation.chance(0.5):
                    journal.sync()
                    self.safe = len(self.lines)
                    self._announced()
        self.safe = len(self.lines)
        self._announced()

    def _check_held(self, path: Path) -> None:
        """Two starts: the second is told."""
        try:
            LineJournal(path, HEADER, lambda at, value: None)
        except JournalHeld:
            return
        raise AssertionError("two processes have one journal open")

    def _replace(self) -> None:
        path = self.root / "logs/value.json"
        with self._in_peace():
            found: int = json.loads(path.read_text())["n"] if path.exists() else 0
        assert found in (self.value, self.next_value), f"{found} instead of {self.value}"
        for folder in self.made:
            assert folder.is_dir(), f"{folder.name} was made and is gone"
        folder = self.root / f"logs/{len(self.made)}"
        make_folder(folder)
        if folder not in self.made:
            self.made.append(folder)
        self._announced()
        self.value, self.next_value = found, found + 1
        write_json(path, {"n": found + 1, "more": "x" * 1500})
        self.value, self.next_value = found + 1, None
        self._announced()
        shard = self.root / "logs/shard-00001-of-00001.safetensors"
        for _ in range(3):
            with self._in_peace():
                if shard.exists():
                    try:
                        read = ShardReader(shard.parent, "shard")
                        assert torch.equal(read.read("b"), _values(int(read.read("a")[0]))["b"])
                    except CheckpointError as error:
                        raise AssertionError(f"a shard that has its name is not whole: {error}") from None
            breaks = self.simulation.chance(0.3)

            def value(name: str, breaks: bool = breaks) -> torch.Tensor:
                if breaks and name == "b":
                    raise KeyError(name)
                return _values(self.value)[name]

            with contextlib.suppress(KeyError):
                write_shard(shard, PLANS, value)

    def _answer(self) -> None:
        """A job of `LINES` lines: each is answered once, and what was noted is not lost by a kill."""
        output = self.root / "logs/out.jsonl"
        journal_path = output.with_name("out.jsonl.journal")
        self.is_finished = self.is_finished or (output.exists() and not journal_path.exists())
        if self.is_finished:
            return self._check_output(output)
        journal = Journal(output, {"job": 1})
        try:
            for number, place in journal.done.items():
                assert journal._lines.value_at(place)[0] == number
            missing = self.answered - set(journal.done)
            assert not missing, f"answers {missing} were noted and are gone"
            for number in self.simulation.random.sample(range(LINES), LINES):
                if number not in journal.done and self.simulation.chance(0.7):
                    journal.add(number, _answer_of(number))
                    self.answered.add(number)
                    self._announced()
                    assert number in journal.done, "an answer was noted and is not known"
                    if number == LONG:
                        self.safe_answers = set(journal.done)
            if len(journal.done) == LINES:
                journal.finish(LINES)
                self.is_finished = True
                self._announced()
                assert not journal_path.exists(), "the journal is left though its answers are written"
        except BaseException:
            with contextlib.suppress(OSError):
                journal.close()
            raise
        if not self.is_finished:
            journal.close()

    def _check_output(self, output: Path) -> None:
        with self._in_peace():
            lines = [json.loads(line) for line in output.read_text().splitlines()]
        assert lines == [_answer_of(number) for number in range(LINES)], "other answers, or in another order"

    def _finish(self) -> None:
        for _ in range(40):
            if not self.is_finished:
                self._answer()
        self._check_output(self.root / "logs/out.jsonl")


def _answer_of(number: int) -> dict[str, Any]:
    return {"id": number, "text": f"answer {number}" * (9000 if number == LONG else 3)}


def _values(step: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((300,), float(step)), "b": torch.arange(150.0) + step}


PLANS = [TensorPlan("a", torch.float32, (300,)), TensorPlan("b", torch.float32, (150,))]


def _write(folder: Path, on_file: Callable[[Path, int], None], step: int, most_bytes: int) -> dict[str, Any]:
    for name, group in plan_shards(PLANS, "model", max_shard_bytes=most_bytes):
        assert sum(plan.n_bytes for plan in group) <= most_bytes, "a shard is larger than was asked"
        on_file(folder / name, write_shard(folder / name, group, lambda tensor: _values(step)[tensor]))
    for name in ("export", "more"):
        (folder / name).mkdir()
        with open(folder / name / "tokens", "wb") as file:  # as libraries write: nothing is synced
            file.write(bytes([step % 251]) * 700)
    write_json(folder / "export/config.json", {"step": step})
    return {"engine": {"at": step}}


def world(simulation: Simulation, drive: Drive) -> None:
    """Run it."""
    pick = simulation.random
    drive.faults = Faults(error=pick.choice([0, 0, 0, 4, 12]), short=pick.choice([0, 5, 50]))
    with contextlib.suppress(Killed):
        Saves(simulation, drive).run()

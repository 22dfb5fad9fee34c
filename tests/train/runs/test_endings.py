"""How runs end and go on when something around them breaks: late signals, loads that fail, readers that leave."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from outcore.checkpoint import shards
from outcore.common import FileError
from outcore.storage import TensorStore
from outcore.train.loop import TrainingLoop
from outcore.train.run import main
from tests.engine.inside import parts_of
from tests.engine.stream.runs.job import stream_settings
from tests.train.jobs import REPOSITORY, fixtures, flags, fresh_env, metrics, same, states

corpus, shared, straight, straight_by, in_the_repository = fixtures
RUN = ["--run_name", "r", "--max_steps", "6", "--precision", "bf16", "--eval_steps", "0", "--save_total_limit", "9"]


def continued(tmp_path: Path, corpus: Path, straight: Path, last_step: int) -> list[str]:
    """A copy of the straight run as it was after `last_step`; the flags that go on from there."""
    for name in ("checkpoint", "log"):
        shutil.copytree(straight / name, tmp_path / name)
    for folder in (tmp_path / "checkpoint/r").glob("step-*"):
        if int(folder.name[5:]) > last_step:
            shutil.rmtree(folder)
    return flags(tmp_path, corpus, *RUN, "--save_steps", "2", "--no_export", "--resume_from_checkpoint", "auto")


def test_a_load_that_fails_after_the_check_falls_back_to_the_older_one(tmp_path, corpus, straight, monkeypatch, capsys):
    argv, stem = continued(tmp_path, corpus, straight, 4), "exp_avg_sq"
    original = shards.ShardReader.read

    def fails(self: shards.ShardReader, name: str) -> Any:
        file = self.file_of(name)
        if file.parent.name == "step-00000004" and file.name.startswith(f"{stem}-"):
            raise FileError(f"reading {name}", file, 5)
        return original(self, name)

    monkeypatch.setattr(shards.ShardReader, "read", fails)
    assert main(argv) == 0
    said = capsys.readouterr().out
    passed_over = next(line for line in said.splitlines() if "passing over" in line)
    assert "step-00000004" in passed_over and f"{stem}-00001" in passed_over and "EIO" in passed_over
    assert "resumed from" in said and "step-00000002 at step 2" in said
    end = "checkpoint/r/step-00000006"
    assert same(states(tmp_path / end), states(straight / end))
    assert [line["step"] for line in metrics(tmp_path) if "event" not in line] == [1, 2, 3, 4, 5, 6]


def test_one_that_was_named_is_not_passed_over(tmp_path, corpus, straight, monkeypatch, capsys):
    argv = continued(tmp_path, corpus, straight, 4)
    named = tmp_path / "checkpoint/r/step-00000004"

    def fails(self: shards.ShardReader, name: str) -> Any:
        raise FileError(f"reading {name}", self.file_of(name), 5)

    monkeypatch.setattr(shards.ShardReader, "read", fails)
    assert main([*argv[:-1], str(named)]) == 1
    told = capsys.readouterr()
    assert str(named) in told.err and "EIO" in told.err and "passing over" not in told.out


@pytest.mark.parametrize("after", ["train_one", "run"])
def test_a_signal_after_the_last_step_finishes_the_export_and_ends_with_0(tmp_path, corpus, monkeypatch, capsys, after):
    original = getattr(TrainingLoop, after)

    def signalled(self: TrainingLoop, argument: Any) -> Any:
        found = original(self, argument)
        os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(TrainingLoop, after, signalled)
    assert main(flags(tmp_path, corpus, *RUN[:2], "--max_steps", "1", "--eval_steps", "0")) == 0
    told = capsys.readouterr()
    assert "SIGTERM: " in told.err and "done: 1 step in" in told.out
    assert (tmp_path / "export/r/model.safetensors").is_file()


def test_a_damaged_line_of_the_log_is_said_with_its_file(tmp_path, corpus, straight, capsys):
    argv = continued(tmp_path, corpus, straight, 4)
    log = tmp_path / "log/r/metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    third = next(number for number, line in enumerate(lines) if b'"step": 3,' in line)
    lines[third] = bytes([lines[third][0] ^ 4]) + lines[third][1:]
    log.write_bytes(b"".join(lines))
    assert main(argv) == 0
    said = capsys.readouterr().out
    (warning,) = [line for line in said.splitlines() if str(log) in line and "WARNING" in line]
    assert "1 line(s) were torn by a crash or damaged" in warning
    assert [line["step"] for line in metrics(tmp_path) if "event" not in line] == [1, 2, 4, 5, 6]


@pytest.mark.more
@pytest.mark.parametrize("saves", ["1", "0"])
def test_a_block_that_the_drive_changed_names_the_checkpoint_to_go_back_to(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saves: str
) -> None:
    stores: list[TensorStore] = []
    original, made = TrainingLoop.train_one, TensorStore.__init__

    def keep(self: TensorStore, *args: Any, **more: Any) -> None:
        made(self, *args, **more)
        stores.append(self)

    def damaged(self: TrainingLoop, batches: Any) -> Any:
        if self.step >= 2:
            parts_of(self.parts.engine).updates.drain()  # nothing under way writes over it or has been read ahead
            _flip(stores, 100 + self.step)
        return original(self, batches)

    monkeypatch.setattr(TensorStore, "__init__", keep)
    monkeypatch.setattr(TrainingLoop, "train_one", damaged)
    argv = flags(tmp_path, corpus, *RUN, "--save_steps", saves, "--no_export", "--nvme_checksums", "on")
    with stream_settings(nvme_path=str(tmp_path / "drive"), state_ram_bytes=0, weight_ram_bytes=0):
        assert main(argv) == 1
    told = capsys.readouterr().err
    assert "came back other than they were written" in told and "tensors.bin" in told and "Traceback" not in told
    newest = tmp_path / "checkpoint/r/step-00000002"
    if saves == "1":
        assert f"Go back to {newest}: the same command with --resume_from_checkpoint auto" in told
        monkeypatch.setattr(TrainingLoop, "train_one", original)
        assert main([*argv, "--resume_from_checkpoint", "auto"]) == 0
        assert f"resumed from {newest} at step 2" in capsys.readouterr().out
    else:
        assert "This run has saved none yet" in told


def _flip(stores: list[TensorStore], at: int) -> None:
    """One bit of a byte of every layer's states and weights that lie on the drive."""
    for store in stores:
        for name in (name for name in store.names if "layer" in name):
            place = store.extent(name)[0]
            with open(place.path, "r+b") as file:
                file.seek(place.offset + at)
                (byte,) = file.read(1)
                file.seek(place.offset + at)
                file.write(bytes([byte ^ 1]))


PRINTING = ["plan --model 1b --nominal", "--help", "--version", "runs --help", "models --help"]


@pytest.mark.parametrize("command", PRINTING)
def test_a_reader_that_leaves_ends_a_command_without_a_word(tmp_path: Path, command: str) -> None:
    """As `outcore runs | head -1` does, at the first byte."""
    reads, writes = os.pipe()
    os.close(reads)
    try:
        child = subprocess.run(
            [sys.executable, "-m", "outcore", *command.split()],
            cwd=tmp_path, env=fresh_env(PYTHONPATH=str(REPOSITORY)), stdout=writes, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    finally:
        os.close(writes)
    assert (child.returncode, child.stderr) == (141, "")


def test_a_run_outlives_who_reads_along(tmp_path: Path) -> None:
    script = (
        "import os, sys\n"
        "from outcore.common.output import watch_reader\n"
        "watch_reader(ends=False)\n"
        "for step in range(3): print('step', step, flush=True)\n"
        f"open({str(tmp_path / 'saved')!r}, 'w').write('whole')\n"
    )
    reads, writes = os.pipe()
    os.close(reads)
    child = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, stdout=writes, stderr=subprocess.PIPE)
    os.close(writes)
    assert (child.returncode, child.stderr, (tmp_path / "saved").read_text()) == (0, b"", "whole")


OUTPUTS = {"full": ">/dev/full", "closed": ">&-", "all_closed": ">&- 2>&- <&-", "full_errors": ">/dev/null 2>/dev/full"}


@pytest.mark.parametrize("output", OUTPUTS)
def test_standard_output_on_a_full_drive_or_closed_ends_no_run(tmp_path: Path, output: str, corpus: Path) -> None:
    """And a file that is opened next does not get what is printed."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from outcore.common.output import say, watch_reader\n"
        "watch_reader(ends=False)\n"
        "with open('saved', 'w') as file:\n"
        "    for step in range(3): print('step', step, flush=True); say('beside')\n"
        "    os.write(1, b'by a library'); file.write('whole')\n"
    )
    command = f"{sys.executable} script.py {OUTPUTS[output]}"
    env = fresh_env(PYTHONPATH=str(REPOSITORY))
    child = subprocess.run(command, shell=True, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    assert child.returncode == 0 and (tmp_path / "saved").read_text() == "whole"
    assert ("standard output cannot be written: ENOSPC" in child.stderr) == (output == "full")
    assert child.stderr.count("standard output") <= 1


@pytest.mark.more
@pytest.mark.parametrize("output", ["full", "closed"])
def test_a_run_is_finished_without_standard_output(tmp_path: Path, output: str, corpus: Path) -> None:
    argv = ["train", *flags(tmp_path, corpus, "--max_steps", "1", "--run_name", "r")]
    command = f"{shlex.join([sys.executable, '-m', 'outcore.cli', *argv])} {OUTPUTS[output]}"
    env = fresh_env(PYTHONPATH=str(REPOSITORY))
    child = subprocess.run(command, shell=True, cwd=REPOSITORY, env=env, stderr=subprocess.PIPE, text=True)
    assert child.returncode == 0, child.stderr
    assert (tmp_path / "export/r/model.safetensors").is_file() and "checkpoint_dir" not in child.stderr


@pytest.mark.parametrize("command", PRINTING)
def test_a_command_whose_output_is_all_there_is_fails_where_that_cannot_be_written(
    tmp_path: Path, command: str
) -> None:
    command = f"{sys.executable} -m outcore {command} >/dev/full"
    env = fresh_env(PYTHONPATH=str(REPOSITORY))
    child = subprocess.run(command, shell=True, cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True)
    assert child.returncode == 1
    assert child.stderr.startswith("standard output cannot be written: ENOSPC, No space left on device: the drive")
    assert child.stderr.count("\n") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="file names are any bytes there")
def test_a_run_reads_a_file_whose_name_is_no_utf_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = os.fsdecode(os.fsencode(tmp_path) + b"/n\xff.txt")
    Path(data).write_text("red \x1b[31m words of a row " * 400)
    argv = flags(tmp_path, Path(data), "--max_steps", "1", "--save_strategy", "no", "--no_export")
    assert main(argv) == 0 and "\x1b" not in capsys.readouterr().out
    header = json.loads(next((tmp_path / "log").glob("*/metrics.jsonl")).read_text().splitlines()[0])
    assert header["config"]["dataset"] == [data]
    assert main([*argv, "--export_dir", os.fsdecode(b"e\xff")]) == 2
    assert "no UTF-8" in capsys.readouterr().err

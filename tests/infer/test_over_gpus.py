"""A job over several processes on the CPU: the same bytes as one, weights once, and on with another number of them."""

import json
import threading
from pathlib import Path

import pytest
import torch

from outcore import cli
from outcore.infer.commands.journal import Journal
from outcore.infer.opening import HostShare, InferSettings, open_engine
from tests.infer.test_commands import SMALL, write_lines

pytestmark = pytest.mark.usefixtures("one_thread")


def given(folder: Path, where: Path, output: str, *more: str) -> list[str]:
    source, found = str(where / "in.jsonl"), str(where / output)
    return ["generate", str(folder), *SMALL, "--input", source, "--output", found, "--max_tokens", "5", *more]


class Meeting:
    """Threads that stand in for processes: each gives a value and gets everybody's. Only one runs at a time."""

    def __init__(self, count: int):
        self.values, self.barrier = [None] * count, threading.Barrier(count, timeout=60)
        self.turn = threading.Lock()  # what torch makes on the meta device is no matter of one thread

    def exchange_of(self, rank: int):
        def exchange(mine):
            self.values[rank] = mine
            self.turn.release()
            try:
                self.barrier.wait()
                found = list(self.values)
                self.barrier.wait()
            finally:
                self.turn.acquire()
            return found

        return exchange


def test_weights_in_ram_are_there_once(tiny_folder):
    meeting, opened, errors = Meeting(2), {}, []

    def open_one(rank: int) -> None:
        try:
            settings = InferSettings(device="cpu", context=128, ram_gib=1)
            share = HostShare(rank, 2, meeting.exchange_of(rank))
            with meeting.turn:
                opened[rank] = open_engine(str(tiny_folder[0]), settings, lambda line: None, share)
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=open_one, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads]
    [thread.join(120) for thread in threads]
    assert not errors
    homes = [opened[rank].weights.homes for rank in range(2)]
    expected = dict(tiny_folder[1].named_parameters())
    for name in homes[0].names():
        one, other = homes[0].read(name), homes[1].read(name)
        assert one.data_ptr() != other.data_ptr(), "two mappings"
        assert torch.equal(one, expected[name].detach().to(one.dtype))
        one.fill_(3)
        assert bool((other == 3).all()), "of the same memory"
    for one in opened.values():
        one.close()


def test_share_without_room_in_ram_is_refused(tiny_folder):
    share = HostShare(0, 2, lambda mine: [mine, mine])
    with pytest.raises(ValueError, match="num_gpus 2 shares weights in RAM"):
        open_engine(str(tiny_folder[0]), InferSettings(device="cpu", ram_gib=1e-5), share=share)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_same_bytes_as_one_process(tiny_folder, tmp_path, count):
    write_lines(tmp_path / "in.jsonl", 9, temperature=0.8)
    assert cli.main(given(tiny_folder[0], tmp_path, "one.jsonl")) == 0
    assert cli.main(given(tiny_folder[0], tmp_path, "many.jsonl", "--num_gpus", str(count))) == 0
    assert (tmp_path / "many.jsonl").read_bytes() == (tmp_path / "one.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "many.jsonl", "one.jsonl"]


def test_a_job_goes_on_with_another_number_of_processes(tiny_folder, tmp_path, monkeypatch, capsys):
    """What two processes left behind when they were killed is gathered by one."""
    write_lines(tmp_path / "in.jsonl", 6)
    assert cli.main(given(tiny_folder[0], tmp_path, "whole.jsonl")) == 0
    jobs = []
    real = Journal.__init__
    monkeypatch.setattr(Journal, "__init__", lambda self, output, job: (jobs.append(job), real(self, output, job))[1])
    assert cli.main(given(tiny_folder[0], tmp_path, "probe.jsonl")) == 0
    whole = [json.loads(line) for line in (tmp_path / "whole.jsonl").read_text().splitlines()]
    for rank in range(2):
        part = Journal(tmp_path / f"out.jsonl.gpu{rank}", jobs[0])
        part.add(rank, whole[rank])
        part.close()
    assert cli.main(given(tiny_folder[0], tmp_path, "out.jsonl")) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not list(tmp_path.glob("*.journal"))
    assert "6 lines (2 from before" in capsys.readouterr().err


@pytest.mark.parametrize(("more", "words"), [
    (("--num_gpus", "0"), "num_gpus is 0"), (("--num_gpus", "2", "--nvme_path", "x"), "leave out one"),
    (("--num_gpus", "2", "--device", "cuda:1"), "takes the first GPUs"),
    (("--num_gpus", "99", "--device", "auto"), "num_gpus is 99, and torch sees"),
])  # fmt: skip
def test_what_cannot_be_shared_is_refused(tmp_path, capsys, more, words):
    write_lines(tmp_path / "in.jsonl", 1)
    assert cli.main([*given(tmp_path, tmp_path, "out.jsonl"), *more]) == 2
    assert words in capsys.readouterr().err


def test_one_prompt_is_answered_by_one(tmp_path, capsys):
    assert cli.main(["generate", str(tmp_path), "--prompt", "a", "--num_gpus", "2"]) == 2
    assert "shares the lines of --input" in capsys.readouterr().err


@pytest.mark.slow
def test_the_process_that_fails_is_named(tmp_path, capsys):
    write_lines(tmp_path / "in.jsonl", 2)
    (tmp_path / "empty").mkdir()
    assert cli.main(given(tmp_path / "empty", tmp_path, "out.jsonl", "--num_gpus", "2")) == 1
    said = capsys.readouterr().err
    assert "the process of GPU" in said and "config.json" in said

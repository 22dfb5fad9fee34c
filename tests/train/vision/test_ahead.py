"""Rows with pictures are made ready while a step runs: in their order, in bounded RAM, and with their errors."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer

from outcore.data.pictures import PictureEncoder
from outcore.train.process import alone
from tests.train.vision.test_vision import made, train  # noqa: F401  # a fixture
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("one_thread")
ONE_ROW = ("--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "1", "--export", "false")
TOLD = ("--train_vision", "none", "--lora_r", "4", *ONE_ROW)


def test_rows_of_the_next_step_are_read_while_a_step_runs(made, tmp_path, monkeypatch):  # noqa: F811
    read, step, calls = PictureEncoder.batch, Trainer.training_step, itertools.count(1)
    latest = 0

    def counted(self: PictureEncoder, *given: Any) -> Any:
        nonlocal latest
        found = read(self, *given)
        latest = next(calls)
        return found

    def waiting(self: Trainer, *given: Any) -> Any:
        # Four looks at how answers end, this step's row, one that accelerate reads to see the end, and the next.
        until(lambda: latest >= 7, 60)
        return step(self, *given)

    monkeypatch.setattr(PictureEncoder, "batch", counted)
    monkeypatch.setattr(Trainer, "training_step", waiting)
    assert train(made, tmp_path, *TOLD, "--max_steps", "1") == 0


def test_a_picture_that_is_gone_when_its_turn_comes_ends_the_run_by_its_row(made, tmp_path, capsys, monkeypatch):  # noqa: F811
    begin, data = Trainer.train, tmp_path / "data"
    data.mkdir()
    for file in made.iterdir():
        if file.is_file():
            (data / file.name).write_bytes(file.read_bytes())

    def without(self: Trainer, **how: Any) -> Any:
        (data / "green.png").unlink()
        return begin(self, **how)

    monkeypatch.setattr(Trainer, "train", without)
    assert train(made, tmp_path, *TOLD, "--max_steps", "4", "--dataset", str(data / "rows.jsonl")) == 2
    said = " ".join(capsys.readouterr())
    assert "rows.jsonl, line 3" in said and "there is no file" in said, said


@pytest.mark.parametrize(("room_bytes", "most"), [(1 << 30, 4), (800, 2), (1, 1)])
def test_as_many_batches_wait_as_ram_is_given_for_and_in_their_order(room_bytes, most, monkeypatch):
    asked, begin = list[int](), alone.BatchesAhead.begin
    monkeypatch.setattr(alone, "AHEAD_BYTES", room_bytes)
    monkeypatch.setattr(alone.BatchesAhead, "begin", lambda self, count: (asked.append(count), begin(self, count))[1])
    theirs = lambda epoch, count, device: ([*itertools.islice(epoch, count)], None)  # noqa: E731
    loader = SimpleNamespace(device="cuda")
    trainer = SimpleNamespace(get_train_dataloader=lambda: loader, get_batch_samples=theirs)
    epochs = [iter([{"ids": torch.full((50,), 10 * epoch + at)} for at in range(6)]) for epoch in range(2)]
    with alone.batches_ahead(trainer):
        assert trainer.get_train_dataloader().device is None  # batches that wait are no one's on the GPU
        taken = [trainer.get_batch_samples(epoch, 4, None)[0] for epoch in epochs for _ in range(2)]
    assert [[int(batch["ids"][0]) for batch in step] for step in taken] == [
        [0, 1, 2, 3], [4, 5], [10, 11, 12, 13], [14, 15],
    ]  # fmt: skip
    assert max(asked) == most

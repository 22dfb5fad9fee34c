"""The power is cut before every system call that publishes something: what was announced before is whole, always."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from outcore.checkpoint import TensorPlan, newest_checkpoint, save_checkpoint, write_shard
from outcore.checkpoint.export import export_model
from outcore.common import write_json
from outcore.common.listing import damaged_weights
from outcore.data import DataSettings, load_or_train_tokenizer
from outcore.data.cache import open_or_build
from outcore.monitor import MetricsLog, read_metrics
from tests.faults.powercut import Drive, PowerIsCut, counted_calls, drive, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Drive]:
    with drive(tmp_path) as made:
        yield made


def cut_at_each_call(disk: Drive, prepare: Callable[[], None], work: Callable[[], object], check: Callable[[], None]):
    """Run `work` again and again, the power cut before its 1st, 2nd, ... call; `check` what a new start finds."""
    cuts = 0
    while True:
        prepare()
        calls, is_cut, done = 0, False, False

        def on_call(last: int = cuts + 1) -> None:
            nonlocal calls, is_cut
            calls += 1
            if calls == last:
                disk.cut()
                is_cut = True
                raise PowerIsCut

        try:
            with counted_calls(on_call):
                work()
            done = True
        except BaseException:
            if not is_cut:
                raise
        if done:
            disk.cut()  # the last one: right after it said that it was done
        disk.power_up()
        check()
        cuts += 1
        if done:
            return cuts


def _save(run: Path, step: int, keep: int) -> None:
    def write(folder: Path, on_file: Callable[[Path, int], None]) -> dict[str, Any]:
        path = folder / "model-00001-of-00001.safetensors"
        plan = TensorPlan("a", torch.float32, (3000,))
        on_file(path, write_shard(path, [plan], lambda name: torch.full((3000,), float(step))))
        (folder / "export").mkdir()
        (folder / "export" / "config.json").write_text(f'{{"step": {step}}}')
        return {}

    save_checkpoint(run, step, write, needed_bytes=1, keep=keep)


def test_saves_and_rotation(disk: Drive) -> None:
    run, announced = disk.root / "run", 0

    def prepare() -> None:
        nonlocal announced
        announced += 1
        _save(run, announced, keep=2)

    def work() -> None:
        nonlocal announced
        for _ in range(2):
            _save(run, announced + 1, keep=2)
            announced += 1

    def check() -> None:
        nonlocal announced
        said: list[str] = []
        found = newest_checkpoint(run, said.append)
        assert found is not None and found.step in (announced, announced + 1), said
        assert not said and not found.damaged_export and found.state["step"] == found.step
        announced = found.step

    assert cut_at_each_call(disk, prepare, work, check) > 20


def test_a_step_saved_again_keeps_one_of_the_two(disk: Drive) -> None:
    run = disk.root / "run"

    def check() -> None:
        found = newest_checkpoint(run, pytest.fail)  # type: ignore[arg-type]
        assert found is not None and found.step == 7 and not found.damaged_export

    cuts = cut_at_each_call(disk, lambda: _save(run, 7, 1), lambda: _save(run, 7, 1), check)
    assert cuts > 10


def test_exports_replace_an_older_one_or_leave_it(disk: Drive) -> None:
    from outcore.common import finish_publishing

    target = disk.root / "final_model" / "r"

    class Config:
        architectures = ("X",)

        def save_pretrained(self, folder: str) -> None:
            Path(folder, "config.json").write_text('{"model_type": "x"}')

    network = nn.Linear(30, 30)
    network.config = Config()  # type: ignore[assignment]
    export = lambda: export_model(target, network, lambda p: p.detach())  # noqa: E731

    def check() -> None:
        finish_publishing(target)
        assert damaged_weights(target) == ([], [])
        assert (target / "config.json").read_text() == '{"model_type": "x"}'

    assert cut_at_each_call(disk, export, export, check) > 8


def test_a_file_written_atomically_is_old_or_new(disk: Drive) -> None:
    path, value = disk.root / "manifest.json", 0

    def prepare() -> None:
        write_json(path, {"n": value})

    def work() -> None:
        nonlocal value
        value += 1
        write_json(path, {"n": value})

    def check() -> None:
        import json

        assert json.loads(path.read_text())["n"] in (value - 1, value)

    assert cut_at_each_call(disk, prepare, work, check) >= 3


def test_lines_of_the_log_up_to_a_checkpoint_are_there(disk: Drive) -> None:
    """The loop syncs the log before it announces a checkpoint; a resumed run cuts the rest off, also by a rewrite."""
    path, announced = disk.root / "log/metrics.jsonl", 0

    def prepare() -> None:
        with MetricsLog(path, resume_step=announced) as log:
            log.write_header({"run": "r"})

    def work() -> None:
        nonlocal announced
        went_back = announced - 1 if announced > 2 else announced  # the file is written anew, without its last line
        with MetricsLog(path, resume_step=went_back) as log:
            for step in range(went_back + 1, went_back + 4):
                log.write_step({"step": step, "loss": 1.0 / step})
                log.sync()
                announced = step
            log.write_step({"step": announced + 1, "loss": 0.0})  # of a step that no checkpoint has yet

    def check() -> None:
        nonlocal announced
        with MetricsLog(path, resume_step=announced) as log:
            assert log.damaged_lines <= 1
        steps = [step["step"] for step in read_metrics(path).steps]
        assert steps in (list(range(1, announced + 1)), list(range(1, announced))), (steps, announced)
        announced = len(steps)

    assert cut_at_each_call(disk, prepare, work, check) > 6


def test_caches_are_whole_or_built_again(disk: Drive) -> None:
    cache, text = disk.root / "cache", disk.root / "text.txt"
    settings = DataSettings(dataset=str(text), cache_dir=str(cache), seq_length=32)
    tokens = np.arange(30000, dtype=np.uint16)

    def build(writer: Any) -> dict[str, Any]:
        writer.array("tokens", np.uint16).append(tokens)
        return {"rows": 3}

    def prepare() -> None:
        shutil.rmtree(cache, ignore_errors=True)
        text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
        os.sync()

    def work(say: Callable[[str], None] = print) -> tuple[list[int], bool]:
        arrays, _ = open_or_build(cache / "tokens", build, timeout_s=300.0, say=say, what="the tokens")
        tokenizer = load_or_train_tokenizer(settings, vocab_size=512, say=say)
        return tokenizer("a lazy dog")["input_ids"], np.array_equal(arrays["tokens"], tokens)

    prepare()
    expected = work()

    def check() -> None:
        said: list[str] = []
        assert work(said.append) == expected and len([line for line in said if "damaged" in line]) <= 2, said

    assert cut_at_each_call(disk, prepare, work, check) > 8

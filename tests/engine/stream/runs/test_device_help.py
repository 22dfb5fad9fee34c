"""Updates that the device takes from the CPU: the same bits, and tried before they are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outcore.engine.base import EngineError
from outcore.optim import UpdatesFromHome
from tests.engine.inside import parts_of
from tests.engine.stream.training import LR, TINY, batches_of, fixtures

(build,) = fixtures
pytestmark = pytest.mark.usefixtures("one_thread")
HELPED = replace(TINY, device_help="on", optimizer_threads=1)


@pytest.fixture
def taken(monkeypatch) -> list[int]:
    """Jobs of each unit that the device took; the CPU is kept busy so that it takes some."""
    found: list[int] = []
    submit = UpdatesFromHome.submit

    def counted(self, jobs, hyper, updated=None):
        found.append(len(jobs))
        return submit(self, jobs, hyper, updated)

    monkeypatch.setattr(UpdatesFromHome, "submit", counted)
    return found


def train(engine, steps: int) -> list[float]:
    losses = []
    for step in range(steps):
        if parts_of(engine).optimizer.num_threads == 1:
            parts_of(engine).optimizer.submit_sumsq("busy", -1, [torch.ones(1 << 26)])
        losses.append(engine.train_step(batches_of(step), LR).loss)
    return losses


@pytest.mark.parametrize("model, dtype, states", [
    ("llama", torch.bfloat16, "split"),
    ("gpt2", torch.float16, "fp32"),
    pytest.param("qwen3", torch.float32, "fp32", marks=pytest.mark.more),
])  # fmt: skip
def test_results_are_those_of_the_cpu(build, tmp_path, taken, model, dtype, states):
    found = []
    for settings in (TINY, HELPED):
        engine = build(model, replace(settings, states=states, chunk_numel=2048), dtype=dtype, dropout=0.1)
        losses = train(engine, 4)
        folder = tmp_path / str(settings.device_help)
        folder.mkdir()
        engine.save(folder, lambda path, crc: None)
        found.append((losses, {path.name: path.read_bytes() for path in folder.iterdir()}))
        assert bool(taken) is (settings is HELPED)
    assert found[0] == found[1]
    assert "the device helps with those of the last" in engine.describe()


def test_a_failure_there_ends_the_run_with_its_reason(build, taken, monkeypatch):
    engine = build("llama", HELPED)
    train(engine, 1)

    def fail(*given):
        raise RuntimeError("the card fell off the bus")

    monkeypatch.setattr("outcore.optim.gpu.update_on_device", fail)
    with pytest.raises(EngineError, match=r"could not be made: the card fell off the bus.*resume from the last"):
        train(engine, 3)


@pytest.mark.parametrize("changes", [{"max_grad_norm": 0.0}, {"states": "split8"}, {"optimizer": "muon"}])
def test_where_it_cannot_help_nothing_is_taken(build, taken, changes):
    engine = build("llama", replace(HELPED, **changes), dtype=torch.bfloat16)
    train(engine, 2)
    assert "helps" not in engine.describe()


def after_steps(help, seconds: list[float], waited_s: float) -> list[str]:
    phases = {"backward": 0.0, "optimizer": 0.0, "stall_optimizer": waited_s}
    return [help.step_ended({"forward": step_s, **phases}, 100, is_settled=True) for step_s in seconds]


@pytest.mark.parametrize("with_help_s, is_kept", [(0.9, True), (0.99, False)])
def test_it_stays_where_steps_are_faster_with_it(build, monkeypatch, with_help_s, is_kept):
    """The first step of each side does not count, nor the slower of the two behind it."""
    engine = build("llama", HELPED)
    help = parts_of(engine).device_help
    monkeypatch.setattr(help, "_mode", "auto")
    assert after_steps(help, [0.1, 1.0, 7.0], 0.2) == [""] * 3
    assert help.words()
    *_, said = after_steps(help, [0.1, 7.0, with_help_s], 0.0)
    if is_kept:
        assert said.endswith("which spares 10 % of a step, as measured") and help.words()
    else:
        assert said == "the device does not help with updates: steps were no faster with it" and not help.words()
    train(engine, 2)


def test_it_is_not_tried_where_nothing_waits_for_updates(build, monkeypatch):
    engine = build("llama", HELPED)
    help = parts_of(engine).device_help
    monkeypatch.setattr(help, "_mode", "auto")
    assert after_steps(help, [1.0] * 6, 0.01) == [""] * 6 and not help.words()

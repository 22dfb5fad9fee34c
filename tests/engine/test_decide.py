"""What a run tells the builders of engines about its machine."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import outcore
from outcore.common.quantities import GIB
from outcore.config import ConfigError, DeepSpeedFile, ProcessFacts, TrainConfig, resolve
from outcore.engine.base import Host
from outcore.engine.decide import EngineChoice, ask_model, choose_engine
from outcore.engine.decide import decide as decide_engine
from outcore.engine.stream import decide_stream
from outcore.engine.stream.decision import decide
from outcore.machine.offload import slow_drive_warning
from outcore.model import ModelSettings
from outcore.train.run import planned
from tests.flow.models import tiny_loaded

SETTINGS = resolve(TrainConfig(), DeepSpeedFile(), ProcessFacts("bf16"))


def test_ram_is_that_of_the_control_group(monkeypatch):
    """The ring of states takes a part of it: the host's free RAM would end a run in a container."""
    given, decided = [], decide.stream_decision

    def watched(run, needs, host, *sizes):
        given.append((host.ram_available_bytes, sizes[0]))
        return decided(run, needs, host, *sizes)

    model = ModelSettings(preset="tiny", precision="bf16", seq_length=64, vocab_size=300)
    monkeypatch.setattr(decide, "stream_decision", watched)
    decide_stream(SETTINGS, model, Host(False, 5 * GIB, "run"), None, None)
    assert given == [(5 * GIB, (128,) * 4)]
    job = SimpleNamespace(device=SimpleNamespace(has_cuda=False), config=TrainConfig(), say=print)
    monkeypatch.setattr(planned, "available_ram_bytes", lambda: 7 * GIB)
    monkeypatch.setattr(planned, "load_tokenizer", lambda *_: None)
    assert planned.Planned(job, SETTINGS, model, "run").host.ram_available_bytes == 7 * GIB  # pyright: ignore[reportArgumentType]


def test_a_model_whose_code_fails_layer_by_layer_goes_to_deepspeed_with_the_reason():
    loaded = tiny_loaded("llama")
    loaded.model.model.norm.forward = lambda hidden: hidden[7]
    auto = ask_model(EngineChoice("stream", "auto", is_auto=True), None, None, loaded)  # pyright: ignore[reportArgumentType]
    assert auto.name == "deepspeed" and "layer by layer: IndexError" in auto.reason
    with pytest.raises(ConfigError, match=r"engine stream cannot train this run: .*layer by layer: IndexError"):
        ask_model(EngineChoice("stream", "as asked"), None, None, loaded)  # pyright: ignore[reportArgumentType]


def test_nobody_asks_which_engine_it_is():
    """Loop, planner and tests of performance know the protocol; a concrete engine's name stands in its own room."""
    root = Path(outcore.__file__).parent
    asks = re.compile(r"isinstance\([^)]*\bEngine\b|\b(StreamEngine|AnyEngine)\b|import .*DeepSpeedEngine")
    found = [
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if path.relative_to(root).parts[0] != "engine" and asks.search(path.read_text(encoding="utf-8"))
    ]
    assert not found


def test_gradients_on_nvme_are_deepspeeds_or_refused():
    flags = {"nvme_offload_path": "/mnt/n", "nvme_offload_gradients": True, "zero_stage": "infinity"}
    auto = choose_engine(resolve(TrainConfig(**flags), DeepSpeedFile(), ProcessFacts("bf16")))
    assert auto.name == "deepspeed" and "nvme_offload_gradients" in auto.reason
    with pytest.raises(ConfigError, match="nvme_offload_gradients is set"):
        choose_engine(resolve(TrainConfig(engine="stream", **flags), DeepSpeedFile(), ProcessFacts("bf16")))


def test_products_in_float8_are_refused_where_the_run_is_deepspeeds():
    """Under engine auto as well: the run would train with other numerics than were asked for."""
    config = TrainConfig(zero_stage="zero2", matmul="float8_rowwise")
    settings = resolve(config, DeepSpeedFile(), ProcessFacts("bf16"))
    with pytest.raises(ConfigError, match="matmul float8_rowwise is the streaming engine's"):
        decide_engine(settings, ModelSettings(preset="tiny"), Host(False, GIB, "run"), None, print)


@pytest.mark.parametrize("nvme_path, rates", [("/mnt/n", (1.0, 5.0)), ("/mnt/n", None), (None, (1.0, 5.0))])
def test_a_run_says_that_its_drive_is_slow(monkeypatch, nvme_path, rates):
    """Asked of the drive that the run uses, before weights are loaded; a drive that fails is told, not hidden."""

    def asked(folder):
        if rates is None:
            raise OSError("no room")
        return {"warnings": [slow_drive_warning(folder, *rates)]}

    monkeypatch.setattr(planned, "drive_performance", asked)
    monkeypatch.setattr(planned, "open_engine", lambda *_: (_ for _ in ()).throw(StopIteration("opened")))
    said = []
    run = planned.Planned.__new__(planned.Planned)
    run.job = SimpleNamespace(is_main=True, say=said.append)  # pyright: ignore[reportAttributeAccessIssue]
    run.model = run.host = run.tokenizer = None  # pyright: ignore[reportAttributeAccessIssue]
    decision = SimpleNamespace(nvme_path=nvme_path)
    with pytest.raises((StopIteration, RuntimeError)):
        run.open(decision)  # pyright: ignore[reportArgumentType]
    expected = "could not be measured: no room" if rates is None else "/mnt/n reads 1.0 GB/s, below 2 GB/s"
    assert [expected in line for line in said] == ([True] if nvme_path else [])

"""What a run tells the builders of engines about its machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import outcore
from outcore.common.quantities import GIB
from outcore.config import ConfigError, DeepSpeedFile, Place, TrainConfig, resolve
from outcore.model.facts import ModelFacts
from outcore.model.settings import ModelSettings
from outcore.train import engine_build
from outcore.train.configure.engine_choice import EngineChoice, ask_model
from outcore.train.configure.rooms import Hardware
from tests.flow.models import tiny_loaded

SETTINGS = resolve(TrainConfig(), DeepSpeedFile(), Place("bf16"))


def test_ram_is_that_of_the_control_group(monkeypatch):
    """The ring of states takes a part of it: the host's free RAM would end a run in a container."""
    monkeypatch.setattr(engine_build, "available_ram_bytes", lambda: 5 * GIB)
    request = engine_build.EngineRequest(SETTINGS, None, None, Hardware(False, "bf16", ""), "run")  # pyright: ignore[reportArgumentType]
    assert request.run_facts().ram_available_bytes == 5 * GIB


def test_the_streaming_engine_is_told_the_same(monkeypatch):
    monkeypatch.setattr(engine_build, "available_ram_bytes", lambda: 5 * GIB)
    request = engine_build.EngineRequest(
        SETTINGS, ModelSettings(preset="tiny", precision="bf16"), None, Hardware(False, "bf16", ""), "run"
    )
    facts = ModelFacts(4_000_000, 4_000_000, 1_000_000, 30, 128, 2, 4096, False, False, False)
    sizes = engine_build._sizes(request, facts, None)
    assert sizes.ram_available_bytes == 5 * GIB


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

"""What the planner is told of the streaming engine's decision."""

from dataclasses import replace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outcore.config import DeepSpeedFile, ProcessFacts, TrainConfig, resolve
from outcore.engine.base import Host
from outcore.engine.stream.decision import decide
from outcore.engine.stream.decision.homes import RunSizes
from outcore.model import ModelSettings
from tests.flow.models import tiny_loaded


def test_forecast_and_engine_are_told_once_what_the_device_had_free(monkeypatch):
    """The forecast was made anew after the engine had taken its buffers, and planned with what they had left."""
    free_bytes = [8 * 10**9]
    settings = resolve(TrainConfig(), DeepSpeedFile(), ProcessFacts("bf16"))
    sizes = RunSizes(10**6, 10**6, 2, 64, (128,), 10**11, has_cuda=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(decide, "free_device_bytes", lambda device: free_bytes[0] if device.type == "cuda" else None)
    on_the_cpu = decide.stream_decision(settings, sizes)
    assert on_the_cpu.layout.device_bytes is None
    decision = decide.stream_decision(settings, replace(sizes, has_cuda=True))
    free_bytes[0] = 3 * 10**9
    assert decision.told.device_bytes == decision.layout.device_bytes == 8 * 10**9


def test_muons_matrices_of_an_own_class_are_counted_in_the_model_itself(monkeypatch):
    """They were counted from its config, for which transformers has no model: the run was refused."""

    class OwnConfig(LlamaConfig):
        model_type = "own"

    class Own(LlamaForCausalLM):
        config_class = OwnConfig

    tiny, seen, decided = tiny_loaded("llama"), [], decide.stream_decision
    own = replace(tiny, model=Own(OwnConfig(**tiny.config.to_dict())), config=OwnConfig(**tiny.config.to_dict()))
    monkeypatch.setattr(decide, "stream_decision", lambda run, sizes: seen.append(sizes) or decided(run, sizes))
    settings = resolve(TrainConfig(optimizer="muon"), DeepSpeedFile(), ProcessFacts("fp32"))
    decide.decide_stream(settings, ModelSettings(preset="tiny"), Host(False, 10**11, "run"), None, own)
    layers = own.model.model.layers.parameters()
    assert seen[0].muon_params == sum(p.numel() for p in layers if p.ndim == 2) > 0

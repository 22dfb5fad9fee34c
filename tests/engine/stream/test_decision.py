"""What the planner is told of the streaming engine's decision."""

from dataclasses import replace

import torch

from outcore.config import DeepSpeedFile, ProcessFacts, TrainConfig, resolve
from outcore.engine.stream.decision import decide
from outcore.engine.stream.decision.homes import RunSizes


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

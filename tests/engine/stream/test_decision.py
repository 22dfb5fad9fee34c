"""What the planner is told of the streaming engine's decision."""

from __future__ import annotations

import torch

from outcore.engine.stream.decision import decision
from outcore.engine.stream.settings import StreamSettings


def test_the_forecast_is_told_what_the_device_has_free(monkeypatch):
    """A cap of the allocator or another process on the card was not known to the forecast, only to the engine."""
    assert decision.stream_layout(StreamSettings(), 1, 1, "cpu").device_bytes is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(decision, "free_device_bytes", lambda device: 8 * 10**9)
    assert decision.stream_layout(StreamSettings(), 1, 1, "cuda").device_bytes == 8 * 10**9
    assert decision.stream_layout(StreamSettings(device_bytes=5), 1, 1, "cuda").device_bytes == 5

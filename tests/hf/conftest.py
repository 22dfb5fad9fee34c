"""What has no mark for a GPU is streamed on the CPU, also on a machine that has one, and in one process, also where
other tests have left a process group behind: a trainer would take it for its own."""

import pytest
import torch
from accelerate.state import AcceleratorState, PartialState


@pytest.fixture(autouse=True)
def on_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    AcceleratorState._reset_state()
    PartialState._reset_state()

"""What a run tells the builders of engines about its machine."""

from __future__ import annotations

from outcore.machine.host import RamInfo
from outcore.train import engine_build
from outcore.train.config import TrainConfig
from outcore.train.settings import Hardware
from outcore.units import GIB


def test_ram_is_that_of_the_control_group(monkeypatch):
    """The ring of states takes a part of it: the host's free RAM would end a run in a container."""
    monkeypatch.setattr(engine_build, "detect_ram", lambda root: RamInfo(8 * GIB, 5 * GIB, 0))
    request = engine_build.EngineRequest(TrainConfig(), {}, None, None, Hardware(False, "bf16", ""), 1, "run")  # pyright: ignore[reportArgumentType]
    assert request.run_facts().ram_available_bytes == 5 * GIB

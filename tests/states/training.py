"""Training of a tiny model with optimizer states on NVMe, a share of them in RAM, over a drive that may fail."""

import threading
from dataclasses import replace

import pytest
import torch

from outcore.common.quantities import MIB
from outcore.flow.weights import scratch
from tests.engine.inside import parts_of
from tests.engine.stream.training import fixtures as engine_fixtures
from tests.engine.stream.training import homes_of, losses_of, same
from tests.flow.models import TINY_SETTINGS, plain_batch, tiny_loaded
from tests.storage.faulty import FaultyEngine

(built,) = engine_fixtures
TINY = replace(TINY_SETTINGS, chunk_numel=1 << 12, max_grad_norm=0.5, state_ring_bytes=MIB, state_ring_slots=3)
TINY = replace(TINY, optimizer_backend="auto")  # torch takes three times as long where states are compressed
IMMEDIATE = replace(TINY, max_grad_norm=0.0, update="immediate")


@pytest.fixture
def build(tmp_path, engines, built):
    """Engines of a tiny model; `share` of its states in RAM, the rest in a folder of its own."""

    def make(settings=TINY, share: float | None = None, *, model="llama", dtype=torch.bfloat16):
        if share is not None:
            numel = sum(p.numel() for p in tiny_loaded(model).model.parameters())
            per_param = {"fp32": 12, "split": 10, "fp32_m8": 6.03, "split8": 4.03, "fp24_m8": 3.03}[settings.states]
            folder = tmp_path / f"drive{len(engines)}"
            settings = replace(settings, nvme_path=str(folder), state_ram_bytes=int(share * numel * per_param))
        return built(model, settings, dtype=dtype)

    return make
    assert not [path for path in tmp_path.glob("drive*/**/*") if path.is_file()]  # nothing is left on the drive
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("state-ring")]


@pytest.fixture
def faulty(monkeypatch) -> list[FaultyEngine]:
    """Drive engines made from now on, which fail on command."""
    made: list[FaultyEngine] = []

    def open_faulty(how):
        made.append(FaultyEngine(how.open()))
        return made[-1]

    monkeypatch.setattr(scratch, "_opened", open_faulty)
    return made


def batches_of(step: int):
    return [plain_batch(2, 12, seed=100 * step), plain_batch(1, 15, seed=100 * step + 1)]


def trained(engine, steps=2) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, all states and weights by name)."""
    return losses_of(engine, range(steps), batches_of), everything(engine)


def everything(engine) -> dict[str, torch.Tensor]:
    found = homes_of(engine)
    homes, families = parts_of(engine).homes, ("master", "exp_avg", "exp_avg_sq")
    # family by family, as a save does: a chunk on the drive is then read once, and not for each parameter again
    return found | {f"{family} {name}": homes.read_state(name, family) for family in families for name in found}


def assert_same(first, second) -> None:
    assert first[0] == second[0]  # which ones differ is seen at once
    assert same(first, second)


fixtures = (built, build, faulty)

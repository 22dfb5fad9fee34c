"""Training of a tiny model with optimizer states on NVMe, a share of them in RAM, over a drive that may fail."""

import threading
from dataclasses import replace

import pytest
import torch

from outcore.common.quantities import MIB
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.weights import scratch
from tests.engine.inside import parts_of
from tests.flow.models import plain_batch, set_dropout, tiny_loaded
from tests.storage.faulty import FaultyEngine

TINY = StreamSettings(
    staging_bytes=2 * MIB,
    slot_bytes=64 * 1024,
    num_slots=2,
    optimizer_threads=1,
    optimizer_backend="torch",
    chunk_numel=1 << 11,
    max_grad_norm=0.5,
    state_ring_bytes=MIB,
    state_ring_slots=3,
    seed=5,
)
IMMEDIATE = replace(TINY, max_grad_norm=0.0, update="immediate")
LR = 3e-3


@pytest.fixture
def build(tmp_path, engines):
    """Engines of a tiny model; `share` of its states in RAM, the rest in a folder of its own."""

    def make(settings=TINY, share: float | None = None, *, model="llama", dtype=torch.bfloat16):
        loaded = tiny_loaded(model, dtype=dtype)
        set_dropout(loaded.model, 0.0)
        if share is not None:
            numel = sum(p.numel() for p in loaded.model.parameters())
            per_param = {"fp32": 12, "split": 10, "fp32_m8": 6.03, "split8": 4.03, "fp24_m8": 3.03}[settings.states]
            folder = tmp_path / f"drive{len(engines)}"
            settings = replace(settings, nvme_path=str(folder), state_ram_bytes=int(share * numel * per_param))
        engines.append(build_stream_engine(loaded, settings, device="cpu", pinned_grant=False, trial=False))
        return engines[-1]

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


def trained(engine, steps=3) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(losses, all states and weights by name)."""
    losses = [engine.train_step(batches_of(step), LR).loss for step in range(steps)]
    return losses, everything(engine)


def everything(engine) -> dict[str, torch.Tensor]:
    parts_of(engine).updates.drain()
    homes = parts_of(engine).homes
    found = {}
    for name in homes.weights.names():
        found[name] = homes.weights.read(name).clone()
        for family in ("master", "exp_avg", "exp_avg_sq"):
            found[f"{family} {name}"] = homes.read_state(name, family)
    return found


def assert_same(first, second) -> None:
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])


fixtures = (build, faulty)

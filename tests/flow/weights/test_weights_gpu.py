"""Parameters, states and activation checkpoints on NVMe with a CUDA device: what everything in RAM gives."""

from contextlib import closing
from dataclasses import replace

import pytest
import torch

from outcore.common.quantities import MIB
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.settings import StreamSettings
from outcore.model import LoraSettings
from outcore.model.adapters import apply_lora
from outcore.model.facts import model_facts
from tests.engine.inside import parts_of
from tests.engine.stream.test_gpu import batches_of
from tests.engine.stream.training import LR
from tests.flow.models import plain_batch, tiny_loaded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SETTINGS = StreamSettings(
    staging_bytes=64 * MIB, slot_bytes=256 * 1024, num_slots=2, optimizer_threads=4, chunk_numel=2048, compile="off",
    activations="device", weight_read_ahead_bytes=4 * MIB, state_ring_bytes=4 * MIB,
)  # fmt: skip


def train(folder, *, lora: bool, steps: int = 6, **changes):
    loaded = tiny_loaded("llama", dtype=torch.bfloat16, num_hidden_layers=6)
    if lora:
        network = apply_lora(loaded.model, LoraSettings(r=4, alpha=8, dropout=0.0), seed=0)
        loaded = replace(loaded, model=network.train(), facts=model_facts(network))
    settings = replace(SETTINGS, nvme_path=str(folder), **changes)
    with closing(build_stream_engine(loaded, settings, device=DEVICE, pinned_grant=False, trial=False)) as engine:
        losses = [engine.train_step(batches_of(s), LR).loss for s in range(steps)]
        losses.append(engine.evaluate([plain_batch(seed=77)]).loss)
        homes = parts_of(engine).homes
        return losses, homes.weights.nvme_bytes, {n: homes.weights.read(n).clone() for n in homes.weights.names()}


ON_NVME = {"weight_ram_bytes": 0, "activations": "nvme"}


@pytest.mark.gpu
@pytest.mark.parametrize(("lora", "changes"), [
    (True, {"weight_ram_bytes": 0}),
    (True, {"weight_ram_bytes": 60_000, "num_layer_buffers": 1, "weight_read_ahead_bytes": 0}),
    (True, ON_NVME | {"slot_bytes": 4096}), (False, ON_NVME | {"state_ram_bytes": 0}),
    (False, ON_NVME | {"state_ram_bytes": 0, "states": "split", "max_grad_norm": 0.0}),
])  # fmt: skip
def test_residency_on_nvme_changes_no_bit(fixed_order, tmp_path, lora, changes):
    """Tiny layers finish in microseconds, so a copy that does not wait for its gate shows as another loss."""
    plain = {key: value for key, value in changes.items() if key in ("states", "max_grad_norm")}
    expected, _, weights = train(tmp_path / "ram", lora=lora, **plain)
    losses, nvme_bytes, theirs = train(tmp_path / "nvme", lora=lora, **changes)
    assert nvme_bytes > 0
    assert losses == expected and all(torch.equal(weights[n], theirs[n]) for n in weights)


@pytest.mark.gpu
def test_many_passes_over_a_base_on_nvme_stay_the_same(fixed_order, tmp_path):
    """The same step again and again without learning: every pass must read the same weights."""
    engine_losses, _, _ = train(tmp_path, lora=True, steps=2, weight_ram_bytes=0)
    again, _, _ = train(tmp_path, lora=True, steps=2, weight_ram_bytes=30_000, num_layer_buffers=2)
    assert again == engine_losses


@pytest.mark.more
@pytest.mark.parametrize("lora", [True, False])
def test_the_same_path_on_this_machine(tmp_path, lora):
    """What the tests above run, without a GPU if there is none: there the losses are equal to the bit."""
    changes = ON_NVME if lora else ON_NVME | {"state_ram_bytes": 0}
    expected, _, weights = train(tmp_path / "ram", lora=lora, steps=2)
    losses, nvme_bytes, theirs = train(tmp_path / "nvme", lora=lora, steps=2, **changes)
    assert nvme_bytes > 0
    if DEVICE == "cpu":
        assert losses == expected and all(torch.equal(weights[n], theirs[n]) for n in weights)
    else:
        assert losses == pytest.approx(expected, rel=1e-3)

"""Muon for the layers' matrices beside AdamW for all else: torch's own, with checkpoints, and refused in words."""

from dataclasses import replace

import pytest
import torch

from outcore.checkpoint import CheckpointError
from outcore.engine.base import EngineError
from tests.engine.inside import parts_of
from tests.engine.stream.training import (
    LR,
    TINY,
    adamw_of,
    fixtures,
    homes_of,
    losses_of,
    plain_training,
    same,
    weights_of,
)
from tests.flow.models import tiny_loaded
from tests.refused import failing, refused

(build,) = fixtures
pytestmark = pytest.mark.usefixtures("one_thread")
MUON = replace(TINY, optimizer="muon", states="fp32")


def torch_training(loaded, steps: int, *, max_norm: float):
    """Losses of torch.optim.Muon and AdamW over the whole model."""
    network = loaded.model
    matrices = [p for n, p in network.named_parameters() if ".layers." in n and p.dim() == 2]
    others = [p for n, p in network.named_parameters() if not (".layers." in n and p.dim() == 2)]
    assert len(matrices) >= 14 and others
    muon = torch.optim.Muon(matrices, lr=LR, weight_decay=MUON.weight_decay, adjust_lr_fn="match_rms_adamw")
    return plain_training(loaded, steps, max_norm=max_norm, optimizers=[muon, adamw_of(others)])[0]


@pytest.mark.more(after=1)
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_equals_torch_muon_and_adamw(build, max_norm):
    """Products in bf16 make of a difference in the last bit of fp32 one of 2^-8 of an update: hence the tolerance."""
    plain = tiny_loaded("llama")
    expected = torch_training(plain, 6, max_norm=max_norm)
    engine = build("llama", replace(MUON, max_grad_norm=max_norm))
    assert losses_of(engine, range(6)) == pytest.approx(expected, rel=2e-4)
    found, theirs = weights_of(engine), dict(plain.model.named_parameters())
    for name, p in theirs.items():
        assert (found[name] - p).norm() <= 2e-3 * p.norm(), name
    adamw = build("llama", replace(MUON, optimizer="adamw", max_grad_norm=max_norm))
    losses_of(adamw, range(6))
    name = next(n for n in found if ".layers." in n and found[n].dim() == 2)
    other = weights_of(adamw)[name]
    assert (found[name] - other).norm() > 2e-2 * other.norm(), "AdamW would have passed as well"


def test_a_split_master_gives_the_same_bits_and_momentum_saves_states(build):
    engines = {
        (optimizer, states): build("llama", replace(MUON, optimizer=optimizer, states=states), dtype=torch.bfloat16)
        for optimizer, states in (("muon", "fp32"), ("muon", "split"), ("adamw", "split"))
    }
    losses = {key: losses_of(engine, range(4)) for key, engine in engines.items()}
    assert losses["muon", "fp32"] == losses["muon", "split"] != losses["adamw", "split"]
    matrices = sum(
        p.numel()
        for n, p in engines["muon", "split"].loaded.model.named_parameters()
        if ".layers." in n and p.dim() == 2
    )
    saved = [engines[optimizer, "split"].facts().state_bytes for optimizer in ("adamw", "muon")]
    assert saved[0] - saved[1] == 4 * matrices


def test_a_checkpoint_goes_on_bit_by_bit_and_fits_no_other_optimizer(build, tmp_path):
    settings = replace(MUON, states="split", max_grad_norm=0.5)
    engine = build("llama", settings, dtype=torch.bfloat16)
    losses_of(engine, range(2))
    written = []
    state = engine.save(tmp_path, lambda path, crc: written.append(path.stat().st_size))
    assert 0 <= sum(written) - engine.facts().state_bytes < 65536
    on = losses_of(engine, range(2, 4))
    resumed = build("llama", replace(settings, states="fp32", chunk_numel=1 << 12), dtype=torch.bfloat16, seed=9)
    resumed.load(tmp_path, state)
    assert same((losses_of(resumed, range(2, 4)), weights_of(resumed)), (on, weights_of(engine)))
    adamw = build("llama", replace(settings, optimizer="adamw"), dtype=torch.bfloat16)
    refused(CheckpointError, "states of muon, and this run's optimizer is adamw", lambda: adamw.load(tmp_path, state))


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_a_matrix_whose_update_fails_is_named(build, monkeypatch, max_norm):
    engine = build("llama", replace(MUON, max_grad_norm=max_norm))
    monkeypatch.setattr("outcore.optim.gpu.update_matrix", failing(torch.OutOfMemoryError("no room for a matrix")))
    with pytest.raises(EngineError, match=r"update of layer \d+ could not be made: no room for a matrix"):
        losses_of(engine, range(2))


@pytest.mark.more(after=1)
@pytest.mark.parametrize("where", ["states", "half of them", "parameters, too"])
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_states_on_a_drive_give_the_same_bits(build, tmp_path, where, max_norm):
    """The momentum and the master of a matrix pass through the ring, one matrix a slot, as large as it may be."""
    in_ram = replace(MUON, states="split", max_grad_norm=max_norm)
    rooms = {"states": 0, "half of them": 100_000, "parameters, too": 0}
    on_drive = replace(
        in_ram, nvme_path=str(tmp_path / "drive"), state_ram_bytes=rooms[where], state_ring_bytes=4096,
        weight_ram_bytes=0 if where == "parameters, too" else None,
    )  # fmt: skip
    engines = [build("llama", settings, dtype=torch.bfloat16) for settings in (in_ram, on_drive)]
    losses = [losses_of(engine, range(4)) for engine in engines]
    chunks = [chunk for unit in parts_of(engines[1]).units.all for chunk in parts_of(engines[1]).homes[unit].chunks]
    assert any(chunk.matrix is not None and chunk.on_nvme for chunk in chunks)
    assert same(*((lost, homes_of(engine)) for lost, engine in zip(losses, engines, strict=True)))
    (tmp_path / "saved").mkdir()
    state = engines[0].save(tmp_path / "saved", lambda path, crc: None)
    resumed = build("llama", replace(on_drive, nvme_path=str(tmp_path / "other")), dtype=torch.bfloat16, seed=9)
    resumed.load(tmp_path / "saved", state)
    assert losses_of(resumed, range(4, 6)) == losses_of(engines[1], range(4, 6))


def test_a_matrix_on_a_drive_whose_update_fails_ends_the_run(build, monkeypatch, tmp_path):
    settings = replace(MUON, nvme_path=str(tmp_path), state_ram_bytes=0, state_ring_bytes=4096)
    engine = build("llama", settings)
    monkeypatch.setattr("outcore.optim.gpu.update_matrix", failing(torch.OutOfMemoryError("no room for a matrix")))
    with pytest.raises(EngineError, match="could not be moved or updated: no room for a matrix"):
        losses_of(engine, range(2))


def test_what_muon_does_not_do_is_said(build):
    refused(ValueError, "keeps its momentum in fp32", lambda: replace(MUON, states="split8"))
    with pytest.raises(ValueError, match="memory for layers in one piece is short"):
        build("llama", replace(MUON, tiling="on", tile_bytes=4096))

    def freeze(model):
        next(p for n, p in model.named_parameters() if ".layers." in n).requires_grad_(False)

    refused(ValueError, "some are frozen here", lambda: build("llama", MUON, prepare=freeze))

"""Muon for the layers' matrices beside AdamW for all else: torch's own, with checkpoints, and refused in words."""

from dataclasses import replace

import pytest
import torch

from outcore.checkpoint import CheckpointError
from outcore.engine.base import EngineError
from tests.engine.stream.training import LR, TINY, adamw_of, fixtures, losses_of, plain_training, same, weights_of
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


def test_what_muon_does_not_do_is_said(build, tmp_path):
    refused(ValueError, "would go to the drive", lambda: replace(MUON, nvme_path=str(tmp_path), state_ram_bytes=0))
    refused(ValueError, "not in the 8 bits of split8", lambda: replace(MUON, states="split8"))
    with pytest.raises(ValueError, match="memory for layers in one piece is short"):
        build("llama", replace(MUON, tiling="on", tile_bytes=4096))

    def freeze(model):
        next(p for n, p in model.named_parameters() if ".layers." in n).requires_grad_(False)

    refused(ValueError, "parameters are frozen", lambda: build("llama", MUON, prepare=freeze))

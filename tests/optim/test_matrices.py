"""Muon on matrices in RAM: the bits of torch's own, whatever is on its way at the same time."""

import pytest
import torch

from outcore.optim import AdamWHyper, ChunkJob, ChunkState, MatrixJob, MatrixUpdates, state_format

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(48, 80), (80, 48), (16, 80), (48, 48)] * 2
HYPER = AdamWHyper(step=1, lr=0.02, weight_decay=0.1, grad_scale=0.7)
STEPS = 2


class Matrix:
    """A matrix at home, and the same in torch's hands."""

    def __init__(self, states: str, shape: tuple[int, int], device: str) -> None:
        form, numel = state_format(states).without_squares, shape[0] * shape[1]
        padded = -(-numel // 256) * 256
        pinned = device == "cuda"
        self.param = torch.zeros(padded, dtype=torch.bfloat16, pin_memory=pinned)
        self.param[:numel].normal_()
        self.param[numel:] = 5.0  # another parameter's
        self.grad = torch.zeros(padded, dtype=torch.bfloat16, pin_memory=pinned)
        buffer = torch.zeros(form.chunk_bytes(padded), dtype=torch.uint8, pin_memory=pinned)
        self.state = ChunkState(form, buffer, padded, self.param)
        self.state.initialise()
        self.numel = numel
        self.job = MatrixJob(form, ChunkJob(self.grad, buffer, self.param), shape)
        self.own = torch.nn.Parameter(self.param[:numel].float().view(shape).to(device))
        self.torch_muon = torch.optim.Muon(
            [self.own], lr=HYPER.lr, weight_decay=HYPER.weight_decay, adjust_lr_fn="match_rms_adamw"
        )

    def new_gradient(self) -> None:
        self.grad[: self.numel].normal_()
        self.own.grad = self.grad[: self.numel].to(self.own.device).float().mul_(HYPER.grad_scale).view_as(self.own)

    def check(self) -> None:
        """Master, momentum and parameter are torch's, and what lies behind them is left alone."""
        own = self.own.detach().cpu().flatten()
        assert torch.equal(self.state.read("master", 0, self.numel), own)
        momentum = self.torch_muon.state[self.own]["momentum_buffer"].cpu().flatten()
        assert torch.equal(self.state.read("exp_avg", 0, self.numel), momentum)
        assert (self.param[: self.numel].float() - own).abs().le(own.abs() * 2**-8).all()
        assert (self.param[self.numel :] == 5.0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("states", ["fp32", "split"])
@pytest.mark.parametrize("under_way_bytes", [0, 1 << 17])
def test_equals_torchs_own_bit_by_bit(device, states, under_way_bytes, monkeypatch):
    monkeypatch.setattr("outcore.optim.gpu.MUON_BYTES_UNDER_WAY", under_way_bytes)
    torch.manual_seed(0)
    units = [[Matrix(states, shape, device) for shape in SHAPES] for _ in range(2)]
    updates = MatrixUpdates(torch.device(device))
    for _ in range(STEPS):
        for unit in units:
            for matrix in unit:
                matrix.new_gradient()
        ends = [updates.submit([matrix.job for matrix in unit], HYPER) for unit in units]
        for unit in units:
            for matrix in unit:
                matrix.torch_muon.step()
        for end in ends:
            end.result(60.0)
    for unit in units:
        for matrix in unit:
            matrix.check()
    updates.close()


@pytest.mark.parametrize("device", DEVICES)
def test_a_failure_is_its_units_own_and_leaves_its_room(device, monkeypatch):
    """Twice as many failures as there is room for: the last unit is updated all the same."""
    monkeypatch.setattr("outcore.optim.gpu.MUON_BYTES_UNDER_WAY", 0)
    torch.manual_seed(0)
    last = Matrix("fp32", (48, 80), device)
    last.new_gradient()
    updates = MatrixUpdates(torch.device(device))
    broken = [updates.submit([last.job._replace(shape=(49, 81))], HYPER) for _ in range(4)]
    whole = updates.submit([last.job], HYPER)
    last.torch_muon.step()
    for end in broken:
        with pytest.raises(RuntimeError, match="shape"):
            end.result(60.0)
    whole.result(60.0)
    last.check()
    updates.close()

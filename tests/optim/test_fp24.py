"""Masters of 24 bits: how they are split and rounded, and that small updates are not lost."""

from __future__ import annotations

import pytest
import torch

from outcore.optim import FP24_M8, SPLIT8, ChunkJob, ChunkState
from outcore.optim.formats.chunk_state import join_master, round_to_24_bits, split_master
from outcore.optim.formats.state_format import _random, random_bytes
from tests.optim.cases import NON_FINITE_BITS, extension, from_bits, hyper, make_job


def test_split_is_exact_for_every_master_of_24_bits():
    for start in range(0, 2**24, 2**21):
        master = from_bits(torch.arange(start, start + 2**21, dtype=torch.int64) << 8)
        param, residual = split_master(master, torch.int8)
        assert residual.dtype == torch.int8
        assert torch.equal(join_master(param, residual).view(torch.int32), master.view(torch.int32))
        assert torch.equal(param.view(torch.int16), split_master(master)[0].view(torch.int16))


@pytest.mark.parametrize("byte", [None, 0, 255])
def test_what_is_special_stays(byte):
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, -1.5, 2.0**-126, 2.0**-133])
    random = None if byte is None else torch.full(special.shape, byte)
    assert torch.equal(round_to_24_bits(special, random).view(torch.int32), special.view(torch.int32))
    nans = from_bits(torch.tensor([bits for bits in NON_FINITE_BITS if bits & 0x7FFFFFFF > 0x7F800000]))
    rounded = round_to_24_bits(nans, None if random is None else random[: len(nans)])
    assert (rounded.view(torch.int32) == 0x7FC00000).all()


def test_to_nearest_keeps_the_parameter():
    """Within half a unit in the last place but just below the border between two parameters, there within one."""
    upper = torch.arange(2**16, dtype=torch.int64)[:, None] << 16
    x = from_bits((upper + torch.tensor([0, 1, 0x7F, 0x80, 0x7F7F, 0x7F80, 0x7FFF, 0x8000, 0xFF7F, 0xFF80])).flatten())
    x = x[x.isfinite()]
    rounded = round_to_24_bits(x)
    bits, rounded_bits = x.view(torch.int32), rounded.view(torch.int32)
    assert not (rounded_bits & 0xFF).any()
    assert torch.equal(split_master(rounded)[0].view(torch.int16), split_master(x)[0].view(torch.int16))
    at_border = ((bits & 0xFFFF) >= 0x7F80) & ((bits & 0xFFFF) < 0x8000)
    distance = (rounded_bits - bits).abs()
    assert (distance[~at_border] <= 0x80).all() and (distance[at_border] <= 0xFF).all()
    assert torch.equal(round_to_24_bits(rounded).view(torch.int32), rounded_bits)


def test_random_bytes_are_uniform_and_independent_of_what_rounds_the_moments():
    num_blocks = 4000
    found = random_bytes(256 * num_blocks, seed=3, step=2, first_block=5)
    counts = torch.bincount(found, minlength=256).double()
    expected = len(found) / 256
    assert counts.numel() == 256
    assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * (2 * 255) ** 0.5  # chi square, six deviations
    m, s = (x.flatten() for x in _random(3, 2, 5, num_blocks))
    other_half = found.view(num_blocks, 2, 128).flip(1).flatten()
    together = torch.stack([found.float(), other_half.float(), m, s, found.roll(1).float()])
    assert torch.corrcoef(together)[0, 1:].abs().max() < 0.006  # 1,024,000 numbers: six standard errors
    lowest_bits = torch.stack([(found & 1).float(), m * 2**16 % 2, s * 2**16 % 2])
    assert torch.corrcoef(lowest_bits)[0, 1:].abs().max() < 0.006
    assert torch.equal(random_bytes(300, seed=3, step=2, first_block=6), found[256:556])


def test_updates_below_a_unit_are_not_lost():
    """lr moves each master by an eighth of its last place a step: after 64 steps the mean is where it should be."""
    numel, unit = 256 * 64, 2.0**-15
    param = torch.ones(numel, dtype=torch.bfloat16)
    job = ChunkJob(torch.full((numel,), -1.0), torch.zeros(FP24_M8.chunk_bytes(numel), dtype=torch.uint8), param)
    chunk = ChunkState(FP24_M8, job.state, numel, param)
    chunk.initialise()
    for step in range(1, 65):
        extension().update(FP24_M8, job, hyper(step, lr=unit / 8, beta1=0.0, beta2=0.0, weight_decay=0.0))
    moved = (chunk.read("master") - 1).double() / unit
    assert torch.equal(moved, moved.round())
    assert float(moved.std()) == pytest.approx((64 * 1 / 8 * 7 / 8) ** 0.5, rel=0.05)  # 64 times one in eight
    assert float(moved.mean()) == pytest.approx(8, abs=5 * float(moved.std()) / numel**0.5)


def test_moments_are_those_of_split8_and_the_master_is_next_to_its():
    """From the same states and gradient only the new masters differ, by less than a unit in the last place."""
    numel = 1000
    exact_job = make_job(SPLIT8, numel, torch.Generator().manual_seed(1))
    assert exact_job.param is not None
    exact = ChunkState(SPLIT8, exact_job.state, numel, exact_job.param)
    exact.write("master", round_to_24_bits(exact.read("master")))
    state = torch.zeros(FP24_M8.chunk_bytes(numel), dtype=torch.uint8)
    short_job = ChunkJob(exact_job.grad, state, exact_job.param.clone())
    short = ChunkState(FP24_M8, state, numel, short_job.param)
    for name in ("master", "exp_avg", "exp_avg_sq"):
        short.write(name, exact.read(name))
    extension().update(SPLIT8, exact_job, hyper())
    extension().update(FP24_M8, short_job, hyper())
    for name in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(short.read(name), exact.read(name))
    a, b = exact.read("master").view(torch.int32), short.read("master").view(torch.int32)
    assert ((a - b).abs() < 256).all()
    assert not torch.equal(a, b)

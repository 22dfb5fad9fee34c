"""8-bit moments: exact round trips, unbiased rounding, randomness that depends on place and step only."""

import pytest
import torch

from outcore.optim import SPLIT8, ChunkJob, ChunkState
from outcore.optim.formats.state_format import Codes, _random, exact_sqrt, pack_nearest, pack_stochastic, unpack
from tests.optim.cases import extension, hyper, make_job

SCALES = (2.0**-112, 2.0**-112 * 1.37, 1e-20, 3.3e-7, 0.7, 1.0, 123.456, 1e18)
ROOT_SCALES = (2.0**-46.5, 1.1e-14, 1e-9, 3.3e-4, 0.7, 1.0, 123.456, 1e18)


@pytest.mark.parametrize(("scale", "root_scale"), zip(SCALES, ROOT_SCALES))
def test_every_code_survives_a_checkpoint_in_fp32(scale, root_scale):
    """All codes of a block whose largest is the top code, as the kernels make them."""
    q = torch.cat([torch.arange(-127, 128), torch.tensor([127])]).to(torch.int8)  # [256]
    r = torch.cat([torch.arange(1, 256), torch.tensor([255])]).to(torch.uint8)
    codes = Codes(q, r, torch.tensor([scale]), torch.tensor([root_scale]))
    again = pack_nearest(*unpack(codes))
    for before, after in zip(codes, again):
        assert torch.equal(before, after)


def test_the_largest_of_a_block_is_exact():
    generator = torch.Generator().manual_seed(0)
    m = torch.randn(1000, generator=generator) * torch.exp(4 * torch.randn(1000, generator=generator))
    root = m.abs() * 3
    codes = pack_stochastic(m, root, seed=1, step=2, first_block=3)
    back_m, back_v = unpack(codes)
    for start in range(0, 1000, 256):
        top = m[start : start + 256].abs().argmax() + start
        assert back_m[top] == m[top]
        assert back_v[top] == root[top] * root[top]
        assert codes.exp_avg_code[start : start + 256].abs().max() == 127


def test_rounding_is_unbiased():
    """Mean over 4,000 blocks of moments that lie between levels, within five standard errors of the truth."""
    num_blocks = 4000
    m = torch.cat([torch.linspace(-1, 1, 255), torch.tensor([1.0])])
    root = torch.cat([torch.linspace(1e-3, 1, 255), torch.tensor([1.0])])
    codes = pack_stochastic(m.repeat(num_blocks), root.repeat(num_blocks), seed=0, step=5, first_block=0)
    back_m, back_v = unpack(codes)
    samples = torch.stack([back_m.view(num_blocks, 256), exact_sqrt(back_v).view(num_blocks, 256)]).double()
    error = samples.std(1) / num_blocks**0.5  # [2, 256]
    truth = torch.stack([m, root]).double()
    assert ((samples.mean(1) - truth).abs() <= 5 * error + 1e-6).all()
    assert (error > 0).sum() > 450  # nearly all of them lie between levels


def test_random_bits_depend_on_seed_step_and_place_only():
    m, s = _random(7, 3, 10, 4)
    for other in (_random(8, 3, 10, 4), _random(7, 4, 10, 4), _random(7, 3, 11, 4)):
        assert not torch.equal(other[0], m)
        assert not torch.equal(other[1], s)
    later = _random(7, 3, 12, 2)
    assert torch.equal(later[0], m[2:])
    assert torch.equal(later[1], s[2:])
    m, s = _random(0, 1, 0, 2000)
    both = torch.stack([m.flatten(), s.flatten(), m.roll(1, 0).flatten(), m.roll(1, 1).flatten()])
    assert both.min() >= 0
    assert both.max() < 1
    assert torch.allclose(both.mean(1), torch.full((4,), 0.5), atol=0.003)
    correlation = torch.corrcoef(both) - torch.eye(4)
    assert correlation.abs().max() < 0.007  # 512,000 samples: five standard errors
    assert m.unique().numel() > 65_400  # of 65,536; 65,509 expected


def test_an_average_that_moves_less_than_a_level_still_moves():
    """v decays by 0.1 % a step without gradients: after 2,000 steps it is where exact arithmetic puts it."""
    numel = 256 * 8
    job = make_job(SPLIT8, numel, torch.Generator().manual_seed(0))
    chunk = ChunkState(SPLIT8, job.state, numel, job.param)
    v = torch.linspace(0.2, 1, numel) ** 2
    chunk.write("exp_avg_sq", v)
    keeps = torch.zeros(numel)
    keeps[::256] = 1.0  # one per block holds the block's scale up
    for step in range(1, 2001):
        extension().update(SPLIT8, ChunkJob(keeps, job.state, job.param), hyper(step, lr=0.0))
    decayed = ~keeps.bool()
    ratio = (chunk.read("exp_avg_sq") / (v * 0.999**2000))[decayed]
    assert abs(ratio.mean().item() - 1) < 0.05
    assert ratio.std() < 0.3


def test_no_second_moment_becomes_zero_beside_a_large_one():
    root = torch.full((256,), 1e-9)
    root[17] = 1.0
    codes = pack_stochastic(root * 0, root, seed=0, step=1, first_block=0)
    assert codes.exp_avg_sq_code.min() == 1
    assert codes.exp_avg_code.abs().max() == 0
    empty = pack_stochastic(torch.zeros(256), torch.zeros(256), seed=0, step=1, first_block=0)
    assert all(not part.any() for part in empty)


def test_what_cannot_be_packed():
    good = torch.ones(10)
    for bad_m, bad_v in ((good * float("inf"), good), (good, good * float("nan")), (good, -good)):
        with pytest.raises(ValueError, match="must be finite"):
            pack_nearest(bad_m, bad_v)


def test_square_roots_are_correctly_rounded():
    """Against the processor's instruction, over one octave pair and all denormals of a stride."""
    for start, stop, stride in ((0x3F800000, 0x40800000, 97), (1, 1 << 23, 61), (0x00800000, 0x7F800000, 8191)):
        x = torch.arange(start, stop, stride, dtype=torch.int32).view(torch.float32)
        root = exact_sqrt(x).double()
        # the rounding interval of the root contains the exact one: (root +- half an ulp)^2 encloses x
        ulp = (exact_sqrt(x).nextafter(torch.tensor(float("inf"))).double() - root) / 2
        below = root - (root - exact_sqrt(x).nextafter(torch.tensor(0.0)).double()) / 2
        exact = x.double()
        assert ((below * below <= exact) & (exact <= (root + ulp) * (root + ulp))).all()

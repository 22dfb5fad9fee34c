"""8-bit moments in torch: block-wise codes with square companding, stochastic or nearest rounding.

Blocks of 256 parameters share two fp32 scales, their largest |m| and largest sqrt(v):

    m = scale * (q/127)|q/127|,  q int8          sqrt(v) = scale * (r/255)^2,  r uint8

Squaring puts more levels near zero: |m| is resolved down to 1/16129 of the largest, v down to 2.4e-10. Updates round
stochastically, unbiased in m and in sqrt(v): an average that moves by less than a level per step still moves. The
random bits are a hash of (seed, step, block, place in the block), so they depend on neither chunks nor scheduling. The
largest of a block is exact. In a block with a v above zero none is stored as zero (at least code 1), since the update
divides by its root; a parameter whose m is zero is not touched by that.

States below 2^-112 (m) and 2^-93 (v) are stored as zero, so that even the smallest code stands for a normal fp32: then
`nearest(unpack(codes)) == codes` for all codes a block can hold, and checkpoints in fp32 lose nothing.
A block with a non-finite number has NaN scales: it shows, and stays."""

from __future__ import annotations

from typing import NamedTuple

import torch

from outcore.optim.formats.state_format import BLOCK_NUMEL
from outcore.optim.hyper import round_to_fp32

LEVELS = 127.0 * 127.0
ROOT_LEVELS = 255.0 * 255.0
INVERSE_LEVELS = round_to_fp32(1 / LEVELS)
INVERSE_ROOT_LEVELS = round_to_fp32(1 / ROOT_LEVELS)
SMALLEST_EXP_AVG = 2.0**-112
SMALLEST_EXP_AVG_SQ = 2.0**-93
GOLDEN_64 = 0x9E3779B97F4A7C15
MASK_32 = 0xFFFFFFFF


class Codes(NamedTuple):
    """Packed moments of n parameters in b = ceil(n / 256) blocks."""

    exp_avg_code: torch.Tensor  # int8 [n]
    exp_avg_sq_code: torch.Tensor  # uint8 [n]
    exp_avg_scale: torch.Tensor  # fp32 [b]
    exp_avg_sq_scale: torch.Tensor  # fp32 [b]


def unpack(codes: Codes) -> tuple[torch.Tensor, torch.Tensor]:
    """(m, v), both fp32 [n]."""
    n = codes.exp_avg_code.numel()
    q = codes.exp_avg_code.to(torch.int32)
    r = codes.exp_avg_sq_code.to(torch.int32)
    exp_avg = _per_element(codes.exp_avg_scale, n) * ((q * q.abs()).float() * INVERSE_LEVELS)
    root = _per_element(codes.exp_avg_sq_scale, n) * ((r * r).float() * INVERSE_ROOT_LEVELS)
    return exp_avg, root * root


def pack_stochastic(exp_avg: torch.Tensor, root: torch.Tensor, *, seed: int, step: int, first_block: int) -> Codes:
    """Codes of m and sqrt(v), fp32 [n] each; first_block: index in the model of the first one here."""
    uniform_m, uniform_s = _random(seed, step, first_block, -(-exp_avg.numel() // BLOCK_NUMEL))
    return _pack(exp_avg, root, 2 * uniform_m, 2 * uniform_s)


def pack_nearest(exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> Codes:
    """Codes of m and v, fp32 [n] each, rounded to the nearest level: for states that come from a checkpoint.

    ValueError when they are not finite or v is negative."""
    if not (torch.isfinite(exp_avg).all() and torch.isfinite(exp_avg_sq).all()) or (exp_avg_sq < 0).any():
        raise ValueError("moments must be finite and exp_avg_sq not negative to be packed into 8 bits")
    exp_avg = _without_tiny_blocks(exp_avg, SMALLEST_EXP_AVG)
    # half the kernels' bound: the square of the smallest root they store may lie just below it
    exp_avg_sq = _without_tiny_blocks(exp_avg_sq, SMALLEST_EXP_AVG_SQ / 2)
    return _pack(exp_avg, exact_sqrt(exp_avg_sq), None, None)


def exact_sqrt(x: torch.Tensor) -> torch.Tensor:
    """The correctly rounded square root of fp32 [n], whatever library torch computes roots with.

    A double's root is within an ulp of double; rounding that to fp32 gives the correctly rounded root, because no root
    of an fp32 number lies that close to the middle between two fp32 numbers."""
    return x.double().sqrt().float()


def _pack(
    exp_avg: torch.Tensor, root: torch.Tensor, twice_m: torch.Tensor | None, twice_s: torch.Tensor | None
) -> Codes:
    n = exp_avg.numel()
    m, s = _blocks(exp_avg), _blocks(root)  # [b, 256]
    top_m, top_s = m.abs().amax(1, keepdim=True), s.amax(1, keepdim=True)  # [b, 1]
    broken = ~(torch.isfinite(m).all(1, keepdim=True) & torch.isfinite(s).all(1, keepdim=True))  # [b, 1]
    m, s = torch.where(broken, 0.0, m), torch.where(broken, 0.0, s)
    y = (m.abs() * _to_levels(top_m, LEVELS)).clamp_max(LEVELS)
    q = _round_root(y, twice_m) * torch.where(m < 0, -1.0, 1.0)
    z = torch.maximum((s * _to_levels(top_s, ROOT_LEVELS)).clamp_max(ROOT_LEVELS), (top_s != 0).float())
    r = torch.where(broken, 0.0, _round_root(z, twice_s))
    nan = float("nan")
    return Codes(
        q.to(torch.int8).flatten()[:n],
        r.to(torch.uint8).flatten()[:n],
        torch.where(broken, nan, top_m).flatten(),
        torch.where(broken, nan, top_s).flatten(),
    )


def _round_root(x: torch.Tensor, twice: torch.Tensor | None) -> torch.Tensor:
    """A whole number next to sqrt(x): at random so that its square is x on average, or the nearest."""
    root = exact_sqrt(x)
    if twice is None:
        return root.round()
    low = root.trunc()
    return low + (twice * (low + 0.5) < x - low * low)


def _to_levels(top: torch.Tensor, levels: float) -> torch.Tensor:
    """Maps the largest magnitude of a block to `levels`, or by rounding a hair above it, never below."""
    factor = (torch.full_like(top, levels) / top) * (1 + 2.0**-22)
    return torch.where((top == 0) | ~torch.isfinite(top), 0.0, factor)


def _without_tiny_blocks(x: torch.Tensor, smallest: float) -> torch.Tensor:
    blocks = _blocks(x)
    return torch.where(blocks.abs().amax(1, keepdim=True) < smallest, 0.0, blocks).flatten()[: x.numel()]


def _blocks(x: torch.Tensor) -> torch.Tensor:
    padding = -x.numel() % BLOCK_NUMEL
    return torch.nn.functional.pad(x, (0, padding)).view(-1, BLOCK_NUMEL)


def _per_element(scale: torch.Tensor, n: int) -> torch.Tensor:
    return scale.repeat_interleave(BLOCK_NUMEL)[:n]


def _signed(x: int) -> int:
    x &= 2**64 - 1
    return x - 2**64 if x >= 2**63 else x


def _mix_int(x: int) -> int:
    x &= 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)


def _mix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer on int64 [n], which hold unsigned numbers."""

    def shifted(x: torch.Tensor, by: int) -> torch.Tensor:
        return (x >> by) & (2 ** (64 - by) - 1)

    x = (x ^ shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ shifted(x, 31)


def random_bytes(numel: int, *, seed: int, step: int, first_block: int) -> torch.Tensor:
    """Whole numbers in [0, 256), int64 [numel]: what rounds masters of 24 bits, independent of what rounds a moment."""
    x = _hashes(seed, step, first_block, -(-numel // BLOCK_NUMEL)) * 0x9E3779B9 & MASK_32
    return torch.cat([x >> 24, x >> 16 & 0xFF], 1).flatten()[:numel]


def _random(seed: int, step: int, first_block: int, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two independent multiples of 2^-16 in [0, 1) per element, fp32 [num_blocks, 256] each.

    A hash of 32 bits has two. The element half a block further takes them the other way round."""
    x = _hashes(seed, step, first_block, num_blocks)
    low, high = (x & 0xFFFF).float() * 2.0**-16, (x >> 16).float() * 2.0**-16
    return torch.cat([low, high], 1), torch.cat([high, low], 1)


def _hashes(seed: int, step: int, first_block: int, num_blocks: int) -> torch.Tensor:
    """32 random bits for two elements, int64 [num_blocks, 128]."""
    key = _mix_int(_mix_int(seed + GOLDEN_64) ^ step)
    block = torch.arange(first_block, first_block + num_blocks, dtype=torch.int64)
    block_key = _mix(block * _signed(GOLDEN_64) + _signed(key))[:, None]
    x = torch.arange(BLOCK_NUMEL // 2, dtype=torch.int64) * 0x9E3779B9 + (block_key & MASK_32) & MASK_32
    x = (x ^ (x >> 16)) * 0x7FEB352D & MASK_32
    x = x ^ ((block_key >> 32) & MASK_32)
    x = (x ^ (x >> 15)) * 0x846CA68B & MASK_32
    return x ^ (x >> 16)

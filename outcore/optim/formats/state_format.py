"""Layouts of a chunk's optimizer states in one buffer: which formats there are, their bytes, their named views.

A chunk is a contiguous range of parameters whose states move, live and are updated together. Its states are one uint8
buffer, so that they are one transfer: each state starts at a multiple of 64 bytes, the whole is a multiple of 4 KiB.
The 16-bit parameter itself lives elsewhere (it goes to the GPU); the split formats need it to know the master.

| format | states | bytes per parameter | parameter |
|---|---|---|---|
| `fp32` | fp32 master, exp_avg, exp_avg_sq | 12 | bf16, fp16, fp32 or none |
| `split` | 16-bit residual (master = parameter + residual, exact), fp32 moments | 10 | bf16 |
| `fp32_m8` | fp32 master, 8-bit moments with two fp32 scales per 256 | 6.03 | bf16, fp16, fp32 or none |
| `split8` | 16-bit residual, 8-bit moments | 4.03 | bf16 |
| `fp24_m8` | 8-bit residual (a master of 24 bits, rounded stochastically), 8-bit moments | 3.03 | bf16 |

A split needs the parameter to be the upper half of the master's bits, which holds for bf16 only: fp16 compute takes
`fp32` or `fp32_m8`. The layout is that of `abi.h`.

On a drive fp32 moments may be compressed without loss (`StateFormat.on_drive`, `outcore.optim.formats.compressed`):
11.03 and 9.03 bytes per parameter instead of 12 and 10. It is a form of the same states, not a choice of its own.

8-bit moments in torch: block-wise codes with square companding, stochastic or nearest rounding.

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

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from outcore.common.quantities import round_up
from outcore.optim.hyper import round_to_fp32
from outcore.sizing.states import BLOCK_HEAD_BYTES, BLOCK_NUMEL, COMPRESSED_MOMENTS, PLANES_BYTES, STATE_FORMATS

REGION_BYTES = 64
CHUNK_BYTES = 4096

PARAM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GRAD_DTYPES = PARAM_DTYPES


@dataclass(frozen=True)
class Region:
    """One state inside a chunk's buffer."""

    name: str
    dtype: torch.dtype
    offset_bytes: int
    numel: int

    @property
    def size_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class StateFormat:
    """One of the formats above; take it from `state_format(name)`."""

    name: str
    split_master: bool
    moments8: bool
    short_residual: bool = False
    """A split whose residual has 8 bits instead of 16: the master loses its lowest 8."""
    compressed: bool = False
    """fp32 moments in 28 bits, without loss; see `outcore.optim.formats.compressed`."""
    only_momentum: bool = False
    """Has no exp_avg_sq: of a matrix that Muon updates."""

    @property
    def code(self) -> int:
        """Number in abi.h."""
        bits = (self.split_master, self.moments8, self.short_residual, self.compressed)
        return sum(1 << place for place, is_set in enumerate(bits) if is_set)

    @property
    def on_drive(self) -> StateFormat:
        """The form of the same states with the fewest bytes to move: compressed where moments are fp32."""
        if self.moments8 or self.compressed:
            return self
        return replace(self, name=f"{self.name}_compressed", compressed=True)

    @property
    def without_squares(self) -> StateFormat:
        """Make the variant of this format whose only moment is the momentum, in fp32, with the same master."""
        assert not self.moments8
        return replace(self, name=f"{self.name}_momentum", only_momentum=True)

    @property
    def plain(self) -> StateFormat:
        """The format whose states these are: itself unless compressed."""
        return state_format(self.name.removesuffix("_compressed")) if self.compressed else self

    @property
    def residual_dtype(self) -> torch.dtype:
        """Type of the residual of a split master."""
        return torch.int8 if self.short_residual else torch.int16

    @property
    def bytes_per_param(self) -> float:
        """States per parameter, the 16-bit parameter, padding and what compression leaves over not counted."""
        master, moments = STATE_FORMATS[self.plain.name]
        return master + (COMPRESSED_MOMENTS if self.compressed else moments)

    def check_param_dtype(self, dtype: torch.dtype | None) -> None:
        """ValueError when parameters of this type (None: no parameter copy) cannot go with the format."""
        if self.split_master and dtype != torch.bfloat16:
            raise ValueError(
                f"the format {self.name!r} splits the fp32 master into a bf16 parameter and a residual, so it cannot "
                f"go with parameters of type {dtype}; take 'fp32{'_m8' if self.moments8 else ''}' instead"
            )
        if dtype is not None and dtype not in PARAM_DTYPES:
            raise ValueError(f"parameters must be bf16, fp16 or fp32, not {dtype}")

    def regions(self, numel: int) -> dict[str, Region]:
        """Name -> place of each state of a chunk of `numel` parameters, in order."""
        if numel <= 0:
            raise ValueError(f"a chunk needs at least one parameter, got {numel}")
        blocks = -(-numel // BLOCK_NUMEL)
        master = ("residual", self.residual_dtype, numel) if self.split_master else ("master", torch.float32, numel)
        if self.moments8:
            moments = [
                ("exp_avg_code", torch.int8, numel),
                ("exp_avg_sq_code", torch.uint8, numel),
                ("exp_avg_scale", torch.float32, blocks),
                ("exp_avg_sq_scale", torch.float32, blocks),
            ]
        elif self.compressed:
            moments = [
                ("exp_avg", torch.uint8, blocks * PLANES_BYTES),
                ("exp_avg_sq", torch.uint8, blocks * PLANES_BYTES),
                ("block_heads", torch.uint8, blocks * BLOCK_HEAD_BYTES),
                ("chunk_head", torch.int64, REGION_BYTES // 8),
            ]
        else:
            moments = [("exp_avg", torch.float32, numel), ("exp_avg_sq", torch.float32, numel)]
            moments = moments[:1] if self.only_momentum else moments
        regions: dict[str, Region] = {}
        end_bytes = 0
        for name, dtype, count in (master, *moments):
            region = Region(name, dtype, round_up(end_bytes, REGION_BYTES), count)
            regions[name] = region
            end_bytes = region.offset_bytes + region.size_bytes
        return regions

    def fixed_bytes(self, numel: int) -> int:
        """Bytes of a chunk, up to the tails of compressed moments: a multiple of 4 KiB."""
        return _fixed_bytes(self, numel)

    def tail_bytes(self, numel: int) -> int:
        """Room for what does not fit into the planes of compressed moments, 0 otherwise: a multiple of 4 KiB."""
        return round_up(-(-numel // BLOCK_NUMEL) * BLOCK_NUMEL, CHUNK_BYTES) if self.compressed else 0

    def chunk_bytes(self, numel: int) -> int:
        """Size of the buffer of a chunk of `numel` parameters, a multiple of 4 KiB. An update of compressed moments
        writes one tail while it reads the other."""
        return self.fixed_bytes(numel) + 2 * self.tail_bytes(numel)

    def stored_bytes(self, numel: int) -> int:
        """Bytes that a chunk may take on a drive."""
        return self.fixed_bytes(numel) + self.tail_bytes(numel)

    def views(self, buffer: torch.Tensor, numel: int) -> dict[str, torch.Tensor]:
        """Name -> 1-D view into `buffer` (uint8, [>= chunk_bytes(numel)], on the CPU, 4-byte aligned)."""
        check_buffer(buffer, self.chunk_bytes(numel))
        if self.compressed and buffer.data_ptr() % 8:
            raise ValueError(f"compressed states must be 8-byte aligned, their address is {buffer.data_ptr():#x}")
        return {
            name: buffer[at.offset_bytes : at.offset_bytes + at.size_bytes].view(at.dtype)
            for name, at in self.regions(numel).items()
        }


@cache
def _fixed_bytes(form: StateFormat, numel: int) -> int:
    last = list(form.regions(numel).values())[-1]
    return round_up(last.offset_bytes + last.size_bytes, CHUNK_BYTES)


def check_buffer(buffer: torch.Tensor, needed_bytes: int) -> None:
    """ValueError unless `buffer` can hold the states of a chunk."""
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous() or buffer.device.type != "cpu":
        raise ValueError(
            "the buffer of a chunk must be a contiguous 1-D uint8 tensor on the CPU, got "
            f"{list(buffer.shape)} {buffer.dtype} on {buffer.device}, contiguous: {buffer.is_contiguous()}"
        )
    if buffer.numel() < needed_bytes:
        raise ValueError(f"the buffer of this chunk needs {needed_bytes} bytes, got {buffer.numel()}")
    if buffer.data_ptr() % 4:
        raise ValueError(f"the buffer of a chunk must be 4-byte aligned, its address is {buffer.data_ptr():#x}")


FP32 = StateFormat("fp32", split_master=False, moments8=False)
SPLIT = StateFormat("split", split_master=True, moments8=False)
FP32_M8 = StateFormat("fp32_m8", split_master=False, moments8=True)
SPLIT8 = StateFormat("split8", split_master=True, moments8=True)
FP24_M8 = StateFormat("fp24_m8", split_master=True, moments8=True, short_residual=True)
FORMATS = (FP32, SPLIT, FP32_M8, SPLIT8, FP24_M8)


def state_format(name: str) -> StateFormat:
    """The format of this name; ValueError with the choices otherwise."""
    for candidate in FORMATS:
        if candidate.name == name:
            return candidate
    raise ValueError(f"no optimizer state format {name!r}; there are {', '.join(f.name for f in FORMATS)}")


LEVELS = 127.0 * 127.0
ROOT_LEVELS = 255.0 * 255.0
INVERSE_LEVELS = round_to_fp32(1 / LEVELS)
INVERSE_ROOT_LEVELS = round_to_fp32(1 / ROOT_LEVELS)
SMALLEST_EXP_AVG = 2.0**-112  # below it the smallest code would be no normal fp32 number
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

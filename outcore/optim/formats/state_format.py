"""How the optimizer states of a chunk lie in one buffer: which formats there are, their bytes, their named views.

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
11.03 and 9.03 bytes per parameter instead of 12 and 10. It is a form of the same states, not a choice of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from outcore.common.quantities import round_up
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
        """This format with a momentum alone, in fp32, beside its master."""
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
        """What a chunk may take on a drive."""
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

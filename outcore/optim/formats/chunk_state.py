"""One chunk's states by name: set up, read for a checkpoint, written from one.

Names are the checkpoint's: `master`, `exp_avg`, `exp_avg_sq`, always fp32, whatever the format. Writing what was read
gives the same bytes back, for every format (8-bit codes included, see `moments8`), so checkpoints in fp32 are exact and
may be resumed in another format: fp32 and split hold the same numbers; going to 8-bit moments or a master of 24 bits
rounds to the nearest. Of compressed states only the master is read and written here; their moments are expanded first.

The exact split of an fp32 master into its bf16 parameter and a 16-bit residual, and one with 8 bits that is not.

    residual  = low 16 bits of the master
    parameter = (bits of the master + 0x8000) >> 16        (mod 2^16)
    master    = parameter * 2^16 + residual as a signed number (mod 2^32)

The carry into the parameter is the residual's top bit, so every one of the 2^32 bit patterns is recovered exactly:
denormals, infinities and NaN included. The parameter is the master rounded to nearest with ties away from zero (half
up in the bit pattern). Ties to even, which a plain cast takes, would be ambiguous: the residual 0x8000 could belong to
the parameter below or above it. The two differ only for masters exactly halfway between two bf16 numbers. Formats with
an fp32 master round their bf16 parameters in the same way, so a run is the same in `fp32` and in `split`.

A NaN in the range 0x7f800001-0x7f807fff or 0x7fff8000-0x7fffffff (or their negatives) would show as infinity or zero in
the parameter; the kernels therefore only ever store the quiet NaN 0x7fc00000, whose parameter is a NaN.

With a residual of 8 bits the master is an fp32 number whose lowest 8 bits are zero: 15 bits after the point where bf16
has 7 and fp32 23. The residual is the upper half of the one above, and parameter and master follow from it in the same
way. Small updates would be lost to rounding to nearest, so a new master is rounded up or down at random, unbiased."""

from __future__ import annotations

from typing import Literal

import torch

from outcore.optim.formats.state_format import BLOCK_NUMEL, Codes, StateFormat, pack_nearest, unpack


def join_master(param: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """(bf16 [n], int16 or int8 [n]) -> fp32 [n], the exact master."""
    low = residual.to(torch.int32) << (0 if residual.dtype == torch.int16 else 8)
    high = param.view(torch.int16) + (low >> 15)  # the carry taken back; nothing here leaves 32 bits
    return (high << 16).bitwise_or_(low.bitwise_and_(0xFFFF)).view(torch.float32)


def split_master(master: torch.Tensor, residual_dtype: torch.dtype = torch.int16) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [n] -> (bf16 parameter [n], residual [n]); for int8 the master must have been rounded to 24 bits."""
    bits = master.contiguous().view(torch.int32)
    residual = bits.to(torch.int16) if residual_dtype == torch.int16 else (bits >> 8).to(torch.int8)
    return _rounded(bits), residual


def _rounded(bits: torch.Tensor) -> torch.Tensor:
    """(bits + 0x8000) >> 16 without leaving 32 bits, as bf16."""
    return (bits >> 15).add_(1).bitwise_right_shift_(1).to(torch.int16).view(torch.bfloat16)


def round_to_24_bits(master: torch.Tensor, random: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 [n] with the lowest 8 bits zero: rounded by `random` (whole numbers in [0, 256), [n]), or to nearest.

    Rounding is of the magnitude; halves go away from zero. To nearest the bf16 parameter stays that of `master`: where
    the next number above has another one, the one below is taken. A NaN becomes the quiet one."""
    bits = torch.where(master.isnan(), float("nan"), master).view(torch.int32)
    if random is None:
        low = bits & 0xFFFF
        add = torch.where((low >= 0x7F80) & (low < 0x8000), 0, 0x80).to(torch.int32)
    else:
        add = random.to(torch.int32)
    return ((bits + add) & ~0xFF).view(torch.float32)


def cast_param(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 [n] rounded to a parameter type: fp16 to nearest, ties to even; bf16 as `split_master` does.

    The only NaN in it may be the canonical one."""
    if dtype == torch.bfloat16:
        return _rounded(master.contiguous().view(torch.int32))
    return one_nan(master).to(dtype)


def one_nan(x: torch.Tensor) -> torch.Tensor:
    """Values with every NaN the canonical one."""
    return torch.where(x.isnan(), float("nan"), x)


StateName = Literal["master", "exp_avg", "exp_avg_sq"]
STATE_NAMES: tuple[StateName, ...] = ("master", "exp_avg", "exp_avg_sq")


class ChunkState:
    """The states of a chunk of `numel` parameters in `buffer` (uint8, [>= chunk_bytes(numel)]), in place.

    `param`: the chunk's 16-bit or fp32 parameters, [numel]; needed for the master of split formats, and kept in step
    when the master is written. No update of the chunk may be in progress. ValueError for what does not fit."""

    def __init__(
        self, state_format: StateFormat, buffer: torch.Tensor, numel: int, param: torch.Tensor | None = None
    ) -> None:
        state_format.check_param_dtype(None if param is None else param.dtype)
        if param is not None and (param.numel() != numel or not param.is_contiguous() or param.device.type != "cpu"):
            raise ValueError(
                f"the parameters of this chunk must be {numel} contiguous elements on the CPU, got {list(param.shape)} "
                f"on {param.device}"
            )
        self.state_format = state_format
        self.numel = numel
        self.param = None if param is None else param.detach().view(-1)
        self.views = state_format.views(buffer, numel)
        """Raw states by name (codes, scales, residual), as the kernels see them."""
        self._buffer = buffer[: state_format.chunk_bytes(numel)]

    def initialise(self, master: torch.Tensor | None = None) -> None:
        """Zero moments; master from `master` (fp32, [numel]), else from the parameters as they are.

        From a given master the parameters are set too."""
        self._buffer.zero_()
        if master is not None:
            self.write("master", master)
        elif self.param is None:
            raise ValueError("a chunk without parameters needs a master to start from")
        elif not self.state_format.split_master:  # split: a residual of zero is the parameter itself
            self.views["master"].copy_(self.param)

    def read(self, name: StateName, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Elements [start, stop) of a state as a new fp32 tensor."""
        at = self._range(name, start, stop)
        if name == "master":
            if not self.state_format.split_master:
                return self.views["master"][at].clone()
            assert self.param is not None
            return join_master(self.param[at], self.views["residual"][at])
        self._check_plain(name)
        if not self.state_format.moments8:
            return self.views[name][at].clone()
        first = at.start // BLOCK_NUMEL
        codes = self._codes(slice(first * BLOCK_NUMEL, at.stop))
        inside = slice(at.start - first * BLOCK_NUMEL, at.stop - first * BLOCK_NUMEL)
        return unpack(codes)[0 if name == "exp_avg" else 1][inside].clone()

    def write(self, name: StateName, values: torch.Tensor, start: int = 0) -> None:
        """Set elements from `start` on to `values` (fp32).

        8-bit moments are written in whole blocks of 256 (the last may be shorter), because a block shares its scale."""
        if values.dtype != torch.float32 or values.device.type != "cpu":
            raise ValueError(f"{name} is written from fp32 on the CPU, got {values.dtype} on {values.device}")
        values = values.detach().reshape(-1)
        at = self._range(name, start, start + values.numel())
        if name == "master":
            if self.state_format.split_master:
                assert self.param is not None
                if self.state_format.short_residual:
                    values = round_to_24_bits(values)
                high, residual = split_master(values, self.state_format.residual_dtype)
                self.param[at] = high
                self.views["residual"][at] = residual
            else:
                self.views["master"][at] = values
                if self.param is not None:
                    self.param[at] = cast_param(values, self.param.dtype)
        elif not self.state_format.moments8:
            self._check_plain(name)
            self.views[name][at] = values
        else:
            if at.start % BLOCK_NUMEL or (at.stop % BLOCK_NUMEL and at.stop != self.numel):
                raise ValueError(
                    f"8-bit moments share a scale per {BLOCK_NUMEL} parameters: write {name} in whole blocks, not "
                    f"[{at.start}, {at.stop}) of {self.numel}"
                )
            zeros = torch.zeros_like(values)
            is_first = name == "exp_avg"
            packed = pack_nearest(values if is_first else zeros, zeros if is_first else values)
            for field, target, value in zip(Codes._fields, self._codes(at), packed):
                if field.startswith("exp_avg_sq") != is_first:
                    target.copy_(value)

    def _check_plain(self, name: str) -> None:
        if self.state_format.compressed:
            raise ValueError(f"{name} is compressed here: take it to the plain format first (Backend.expand)")

    def _codes(self, at: slice) -> Codes:
        blocks = slice(at.start // BLOCK_NUMEL, -(-at.stop // BLOCK_NUMEL))
        return Codes(*(self.views[name][blocks if name.endswith("_scale") else at] for name in Codes._fields))

    def _range(self, name: str, start: int, stop: int | None) -> slice:
        if name not in STATE_NAMES:
            raise ValueError(f"a chunk has the states {', '.join(STATE_NAMES)}, not {name!r}")
        stop = self.numel if stop is None else stop
        if not 0 <= start <= stop <= self.numel:
            raise ValueError(f"[{start}, {stop}) is not within the {self.numel} parameters of this chunk")
        return slice(start, stop)

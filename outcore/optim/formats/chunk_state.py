"""One chunk's states by name: set up, read for a checkpoint, written from one.

Names are the checkpoint's: `master`, `exp_avg`, `exp_avg_sq`, always fp32, whatever the format. Writing what was read
gives the same bytes back, for every format (8-bit codes included, see `moments8`), so checkpoints in fp32 are exact and
may be resumed in another format: fp32 and split hold the same numbers; going to 8-bit moments or a master of 24 bits
rounds to the nearest. Of compressed states only the master is read and written here; their moments are expanded first.
"""

from __future__ import annotations

from typing import Literal

import torch

from outcore.optim.formats.moments8 import Codes, pack_nearest, unpack
from outcore.optim.formats.split import cast_param, join_master, round_to_24_bits, split_master
from outcore.optim.formats.state_format import BLOCK_NUMEL, StateFormat

StateName = Literal["master", "exp_avg", "exp_avg_sq"]
STATE_NAMES: tuple[StateName, ...] = ("master", "exp_avg", "exp_avg_sq")


class ChunkState:
    """The states of a chunk of `numel` parameters in `buffer` (uint8, [>= chunk_bytes(numel)]), in place.

    `param`: the chunk's 16-bit or fp32 parameters, [numel]; needed for the master of split formats, and kept in step
    when the master is written. No update of the chunk may be in progress. ValueError for what does not fit.
    """

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

        From a given master the parameters are set too.
        """
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

        8-bit moments are written in whole blocks of 256 (the last may be shorter), because a block shares its scale.
        """
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

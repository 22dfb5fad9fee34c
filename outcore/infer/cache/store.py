"""Keys and values of one attention in pages: where they are written, how they are read back.

In 16 or 32 bits as the model computes them, or in 8 bits with one scale per token and head (a quarter or half of the
bytes; results differ a little). A store may live in RAM while the model computes on a GPU (`memory`).
Legend: N tokens, P pages, T tokens a page, H heads, D width of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

KvFormat = Literal["same", "int8"]


@dataclass(frozen=True)
class KvShape:
    """Widths of one attention's keys and values."""

    heads: int
    key_width: int
    value_width: int

    @property
    def width(self) -> int:
        """Numbers of a token's keys and values."""
        return self.heads * (self.key_width + self.value_width)

    def token_bytes(self, dtype: torch.dtype, kv_format: KvFormat) -> int:
        """Bytes that one token takes."""
        return self.width * dtype.itemsize if kv_format == "same" else self.width + 2 * self.heads * 4


class Memory(Protocol):
    """Memory that a store's tensors come from."""

    device: torch.device

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor there, all zero."""
        ...


class KvStore:
    """Pages of one attention. `memory`: where they live; `dtype`: what is given out."""

    def __init__(
        self,
        shape: KvShape,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        memory: Memory,
        kv_format: KvFormat = "same",
    ) -> None:
        self.shape, self.page_tokens, self.dtype, self.home = shape, page_tokens, dtype, memory.device
        self.is_packed = kv_format != "same"
        stored = torch.int8 if self.is_packed else dtype

        def empty(width: int, kind: torch.dtype) -> torch.Tensor:
            return memory.zeros((num_pages, page_tokens, shape.heads, width), kind)

        self._keys, self._values = empty(shape.key_width, stored), empty(shape.value_width, stored)
        self._scales = None if kv_format == "same" else (empty(1, torch.float32), empty(1, torch.float32))

    @property
    def size_bytes(self) -> int:
        scales = () if self._scales is None else self._scales
        return sum(tensor.nbytes for tensor in (self._keys, self._values, *scales))

    @property
    def planes(self) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
        """Keys and values [P, T, H, D], and in 8 bits the scales [P, T, H, 1] of both: for kernels that read pages
        where they are."""
        return self._keys, self._values, self._scales

    def write(self, keys_NHD: torch.Tensor, values_NHD: torch.Tensor, slots_N: torch.Tensor) -> None:
        """Put tokens into slots (page x page_tokens + place within it); `slots_N` on the store's home."""
        into = (self._keys, self._values, *(self._scales or ()))
        for stored, given in zip(into, as_stored(keys_NHD, values_NHD, in_8_bits=self.is_packed), strict=True):
            _flat(stored).index_copy_(0, slots_N, given.to(self.home, stored.dtype))

    def read(self, pages: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [..., P * T, H, D] of pages [..., P] (on the store's home), on `device`."""
        found = []
        for which, part in enumerate((self._keys, self._values)):
            rows = part[pages].to(device, non_blocking=True)
            if self._scales is not None:
                scale = self._scales[which][pages].to(device, non_blocking=True)
                rows = dequantized(rows, scale, self.dtype)
            found.append(rows.flatten(pages.ndim - 1, pages.ndim))
        return found[0], found[1]

    def page_contents(self, page: int) -> list[torch.Tensor]:
        """All tensors of one page, as they are stored: views, in RAM or on the device."""
        scales = () if self._scales is None else self._scales
        return [tensor[page] for tensor in (self._keys, self._values, *scales)]

    def page_like(self) -> list[torch.Tensor]:
        """Empty tensors in RAM of the shapes and types that `page_contents` gives."""
        size, shape = self.page_tokens, self.shape
        stored = torch.int8 if self.is_packed else self.dtype
        kinds = [(shape.key_width, stored), (shape.value_width, stored)]
        kinds += [(1, torch.float32)] * 2 if self.is_packed else []
        return [torch.empty((size, shape.heads, width), dtype=dtype) for width, dtype in kinds]

    def put_page(self, page: int, contents: Sequence[torch.Tensor]) -> None:
        """Fill a page with what `page_contents` gave of it, or of the same page in a store like this one."""
        for mine, given in zip(self.page_contents(page), contents, strict=True):
            mine.copy_(given)

    def read_ahead(self, pages: torch.Tensor) -> None:
        """Note that these pages will be read soon: nothing to do where they are at hand."""


def _flat(pages: torch.Tensor) -> torch.Tensor:
    return pages.view(-1, *pages.shape[2:])


def quantized(rows_NHD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 values, fp32 scale of each token and head)."""
    rows = rows_NHD.float()
    scale = rows.abs().amax(-1, keepdim=True).clamp_min_(1e-8).div_(127)
    return (rows / scale).round_().to(torch.int8), scale  # 127 at most: the largest is the scale 127 times


def as_stored(keys_NHD: torch.Tensor, values_NHD: torch.Tensor, *, in_8_bits: bool) -> list[torch.Tensor]:
    """Keys and values as pages hold them, in 8 bits with the scales of both behind them. Those of equal widths are
    rounded together, which takes the host half the launches."""
    if not in_8_bits:
        return [keys_NHD, values_NHD]
    if keys_NHD.shape != values_NHD.shape:
        rows, scales = zip(quantized(keys_NHD), quantized(values_NHD), strict=True)
        return [*rows, *scales]
    rows, scale = quantized(torch.cat((keys_NHD, values_NHD), 1))
    return [*rows.chunk(2, 1), *scale.chunk(2, 1)]


def dequantized(rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows as they were, but for rounding."""
    return rows.float().mul_(scale).to(dtype)


def rounded(rows_NHD: torch.Tensor) -> torch.Tensor:
    """Rows as they are after they were stored in 8 bits."""
    return dequantized(*quantized(rows_NHD), rows_NHD.dtype)

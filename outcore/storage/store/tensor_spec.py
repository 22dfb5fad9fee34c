"""`TensorSpec`: name, element type and shape of a stored tensor, and `Extent`: where a part of it lies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

# The types a store may hold, by the name written in manifests. Nothing else is looked up from a file's text.
_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


@dataclass(frozen=True)
class TensorSpec:
    """What is stored under one name. Raises ValueError for an empty name, a negative size or an unsupported type."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if not self.name or not isinstance(self.name, str):
            raise ValueError(f"a stored tensor needs a non-empty name, got {self.name!r}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"{self.name}: shape {self.shape} has a negative size")
        if self.dtype not in _DTYPES.values():
            raise ValueError(f"{self.name}: {self.dtype} cannot be stored; supported are {', '.join(_DTYPES)}")

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def dtype_by_name(name: str) -> torch.dtype:
    """'bfloat16' -> torch.bfloat16. Raises ValueError for a name no store writes."""
    try:
        return _DTYPES[name]
    except (KeyError, TypeError):
        raise ValueError(f"unknown element type {name!r}; known are {', '.join(_DTYPES)}") from None


@dataclass(frozen=True)
class Extent:
    """`n_bytes` of a tensor, from its byte `tensor_offset`, at byte `offset` of the file `path`."""

    path: Path
    offset: int
    n_bytes: int
    tensor_offset: int

"""`TensorSpec`: name, element type and shape of a stored tensor; `Entry` and `Extent`: where it lies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class TensorSpec:
    """What is stored under one name. Raises ValueError for an empty name or a negative size."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if not self.name or not isinstance(self.name, str):
            raise ValueError(f"a stored tensor needs a non-empty name, got {self.name!r}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"{self.name}: shape {self.shape} has a negative size")

    @property
    def n_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Entry:
    """One tensor and its place in the store's byte range."""

    spec: TensorSpec
    start: int


@dataclass(frozen=True)
class Extent:
    """`n_bytes` of a tensor at byte `offset` of the file `path`."""

    path: Path
    offset: int
    n_bytes: int

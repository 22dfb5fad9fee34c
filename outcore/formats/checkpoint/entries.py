"""One weight of a checkpoint, under the name that it has in the same checkpoint without quantization."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from outcore.formats.checkpoint.places import TensorPlace
from outcore.formats.packed import PackedSpec, PackedTensor

Parts = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PlainEntry:
    """A weight stored as it is."""

    place: TensorPlace

    @property
    def shape(self) -> tuple[int, ...]:
        return self.place.shape

    def read(self) -> torch.Tensor:
        """Read the values, in the type of the file."""
        return self.place.read()


@dataclass(frozen=True)
class PackedEntry:
    """A weight that stays packed."""

    spec: PackedSpec
    parts: Mapping[str, TensorPlace]
    """The checkpoint's tensors for it, by what they are."""
    planes: Callable[[Parts], Sequence[torch.Tensor]]
    """From those tensors to the planes of the format, without changing a number."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.value_shape

    def read(self) -> PackedTensor:
        """Read the packed bytes."""
        parts = {name: place.read() for name, place in self.parts.items()}
        return PackedTensor(self.spec, self.spec.assemble(self.planes(parts)))


@dataclass(frozen=True)
class ExpandedEntry:
    """A weight stored in a way that no format here keeps: expanded to 16 bits when it is read."""

    shape: tuple[int, ...]
    why: str
    """For people."""
    parts: Mapping[str, TensorPlace]
    values: Callable[[Parts], torch.Tensor]

    def read(self) -> torch.Tensor:
        """Read the values, fp32."""
        return self.values({name: place.read() for name, place in self.parts.items()})


Entry = PlainEntry | PackedEntry | ExpandedEntry

"""Places where the tensors of a published checkpoint lie: file, byte offset, type, shape; read from the headers alone.

A safetensors file begins with 8 bytes (length of the header), the header as JSON, then the tensors' bytes. Reading a
tensor is one read of exactly its bytes into memory of its own: no mapping, so nothing piles up in the page tables.

One weight of a checkpoint, under the name that it has in the same checkpoint without quantization."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from outcore.common.quantities import format_gb
from outcore.formats.packed import PackedSpec, PackedTensor

TYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "C64": torch.complex64,
    "BOOL": torch.bool,
}
"""Types of the safetensors format that torch has."""
ONE_OF_TWO = "Which of the two counts is not known: download the model again, or remove the file that is left over."
LENGTH_BYTES = 8
HEADER_LIMIT_BYTES = 100_000_000
"""Bytes of a header at most, as the safetensors library itself accepts."""


@dataclass(frozen=True)
class TensorPlace:
    """One tensor in a file."""

    file: Path
    offset: int
    """First byte, from the beginning of the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """The tensor on the CPU. RuntimeError when the file gives fewer bytes."""
        raw = torch.empty(self.size_bytes, dtype=torch.uint8)
        buffer: Any = raw.numpy()
        view, done = memoryview(buffer), 0
        try:
            with self.file.open("rb", buffering=0) as opened:
                opened.seek(self.offset)
                while done < len(view) and (count := opened.readinto(view[done:])):
                    done += count
        except OSError as error:
            raise RuntimeError(f"{self.file} cannot be read: {error}") from error
        if done < len(view):
            raise RuntimeError(
                f"{self.file} is damaged or cut short: it ends {format_gb(len(view) - done)} before a tensor of its "
                "own does. Copy or download it again."
            )
        return raw.view(self.dtype).view(self.shape)


def safetensors_places(files: Iterable[Path]) -> dict[str, TensorPlace]:
    """Name -> place of every tensor in these files. RuntimeError naming the file that is not one."""
    found: dict[str, TensorPlace] = {}
    for path in files:
        header, start = _header(path)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if (dtype := TYPES.get(entry["dtype"])) is None:
                raise RuntimeError(f"{path}: {name} is of type {entry['dtype']}, which torch does not have")
            begin, end = entry["data_offsets"]
            place = TensorPlace(path, start + begin, dtype, tuple(entry["shape"]))
            if place.size_bytes != end - begin:
                raise RuntimeError(f"{path}: the header gives {name} {end - begin} bytes, its shape {place.size_bytes}")
            if name in found:
                raise RuntimeError(f"{path}: holds {name}, which {found[name].file.name} holds as well. {ONE_OF_TWO}")
            found[name] = place
    return found


def _header(path: Path) -> tuple[dict, int]:
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as opened:
            length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
            if not 2 <= length <= min(HEADER_LIMIT_BYTES, size_bytes - LENGTH_BYTES):
                raise RuntimeError(f"{path} is not a safetensors file, or its beginning is damaged. Download it again.")
            header = json.loads(opened.read(length))
    except (OSError, ValueError) as error:
        raise RuntimeError(f"{path} cannot be read: {error}") from error
    start = LENGTH_BYTES + length
    ends = [start + entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    if max(ends, default=start) > size_bytes:
        missing = format_gb(max(ends) - size_bytes)
        raise RuntimeError(f"{path} is damaged or cut short: it lacks its last {missing}. Copy or download it again.")
    return header, start


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
    """Text for people: why it is expanded; '' where that needs no words."""
    parts: Mapping[str, TensorPlace]
    values: Callable[[Parts], torch.Tensor]

    def read(self) -> torch.Tensor:
        """Read the values, fp32."""
        return self.values({name: place.read() for name, place in self.parts.items()})


Entry = PlainEntry | PackedEntry | ExpandedEntry

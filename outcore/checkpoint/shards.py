"""Safetensors shards written and read as a stream: never more than one tensor in memory.

The header of a safetensors file comes first and holds every tensor's offsets, so shapes and dtypes are planned
ahead and the tensors then follow in that order. Each file is written beside its name, fsynced and renamed, with its
CRC-32 taken while writing. Cost: one pass over the bytes. Nothing here reads or writes pickle.

Format: https://github.com/huggingface/safetensors (8-byte little-endian header length, JSON header, data).
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outcore.common.quantities import GB, format_gb

MAX_SHARD_BYTES = 5 * GB
"""Default size of a shard: what transformers' own save_pretrained uses."""

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class CheckpointError(RuntimeError):
    """A checkpoint is missing, damaged, or of another model; the message says which file and why."""


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of a shard, before its values are there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor's values."""
        n = 1
        for size in self.shape:
            n *= size
        return n * self.dtype.itemsize


def plan_shards(
    plans: Sequence[TensorPlan], stem: str, max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[tuple[str, list[TensorPlan]]]:
    """Split tensors, in order, over files `stem-00001-of-0000N.safetensors` of at most `max_shard_bytes`.

    A tensor larger than that gets a file of its own.
    """
    groups: list[list[TensorPlan]] = [[]]
    filled_bytes = 0
    for plan in plans:
        if groups[-1] and filled_bytes + plan.n_bytes > max_shard_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1].append(plan)
        filled_bytes += plan.n_bytes
    return [(f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors", group) for i, group in enumerate(groups)]


def write_shard(
    path: Path,
    plans: Sequence[TensorPlan],
    value: Callable[[str], torch.Tensor],
    metadata: dict[str, str] | None = None,
) -> int:
    """Write one safetensors file, asking `value(name)` for each tensor when its turn comes; returns its CRC-32.

    The file appears under its name only when it is whole and on the drive.
    Raises OSError (with the path) when the drive refuses, ValueError when a tensor is not as planned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    offset = 0
    for plan in plans:
        header[plan.name] = {
            "dtype": DTYPE_NAMES[plan.dtype],
            "shape": list(plan.shape),
            "data_offsets": [offset, offset + plan.n_bytes],
        }
        offset += plan.n_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    aside = path.with_name(path.name + ".part")
    crc = 0
    try:
        with open(aside, "wb") as file:
            for piece in (struct.pack("<Q", len(text)), text):
                file.write(piece)
                crc = zlib.crc32(piece, crc)
            for plan in plans:
                tensor = value(plan.name).detach().to("cpu").contiguous()
                if tensor.dtype != plan.dtype or tuple(tensor.shape) != plan.shape:
                    raise ValueError(
                        f"{plan.name}: planned as {plan.dtype} {plan.shape}, got {tensor.dtype} {tuple(tensor.shape)}"
                    )
                if tensor.numel():
                    data = tensor.reshape(-1).view(torch.uint8).numpy().data
                    file.write(data)
                    crc = zlib.crc32(data, crc)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise OSError(error.errno, f"{error.strerror} (writing {format_gb(offset)})", str(path)) from error
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return crc


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file, checked against the file's size.

    Raises CheckpointError for a file that is missing, cut short or not safetensors.
    """
    try:
        size_bytes = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
            if not 0 < length <= size_bytes - 8:
                raise CheckpointError(f"{path}: not a safetensors file, or cut short ({size_bytes} bytes).")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: its header is damaged: {error}.") from error
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end != size_bytes:
        raise CheckpointError(f"{path}: should have {8 + length + end} bytes but has {size_bytes}: it was cut short.")
    return header


class ShardReader:
    """All tensors of a folder's shards with one stem, by name; files are mapped, tensors come one at a time."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        types = {name: dtype for dtype, name in DTYPE_NAMES.items()}
        for path in sorted(folder.glob(f"{stem}-*-of-*.safetensors")):
            for name, entry in read_header(path).items():
                self._file_of[name] = path
                self.shapes[name] = tuple(entry["shape"])
                self.dtypes[name] = types[entry["dtype"]]

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> Iterator[str]:
        """Names of all tensors, in file order."""
        return iter(self._file_of)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in plain memory. CheckpointError when it is not there."""
        from safetensors import safe_open

        if name not in self._file_of:
            raise CheckpointError(f"{self.folder}: holds no tensor named {name}.")
        with safe_open(self._file_of[name], framework="pt", device="cpu") as file:
            return file.get_tensor(name)


def crc32_of(path: Path, chunk_bytes: int = 8 << 20) -> int:
    """CRC-32 of a file's bytes."""
    crc = 0
    with open(path, "rb") as file:
        while chunk := file.read(chunk_bytes):
            crc = zlib.crc32(chunk, crc)
    return crc

"""Safetensors shards written and read as a stream: never more than one tensor in memory.

The header of a safetensors file comes first and holds every tensor's offsets, so shapes and dtypes are planned
ahead and the tensors then follow in that order. Each file is written beside its name, synced and renamed, with its
CRC-32 taken while writing. Cost: one pass over the bytes. Nothing here reads or writes pickle. What a reader takes from
a checkpoint's folder is what the manifest lists, and nothing else.

Format: https://github.com/huggingface/safetensors (8-byte little-endian header length, JSON header, data)."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outcore.checkpoint.manifest import CheckpointError, listed_files
from outcore.common import FileError, describe_errno, file_errors
from outcore.common.os_layer import replace_file
from outcore.common.quantities import GB, format_gb
from outcore.formats.checkpoint import TYPES

MAX_SHARD_BYTES = 5 * GB
"""Default size of a shard: what transformers' own save_pretrained uses."""

DTYPE_NAMES = {dtype: name for name, dtype in TYPES.items()}


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

    A tensor larger than that gets a file of its own."""
    groups: list[list[TensorPlan]] = [[]]
    filled_bytes = 0
    for plan in plans:
        if groups[-1] and filled_bytes + plan.n_bytes > max_shard_bytes:
            groups.append([])
            filled_bytes = 0
        groups[-1].append(plan)
        filled_bytes += plan.n_bytes
    return [(f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors", group) for i, group in enumerate(groups)]


def write_shard(path: Path, plans: Sequence[TensorPlan], value: Callable[[str], torch.Tensor]) -> int:
    """Write one safetensors file, asking `value(name)` for each tensor when its turn comes and the one before is gone;
    returns its CRC-32.

    The file appears under its name only when it is whole and on the drive.
    Raises FileError when the drive refuses, ValueError when a tensor is not as planned, and what `value` raises."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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
    with _NewFile(path, offset) as file:
        for piece in (struct.pack("<Q", len(text)), text):
            file.write(piece)
        for plan in plans:
            tensor = value(plan.name).detach().to("cpu").contiguous()
            if tensor.dtype != plan.dtype or tuple(tensor.shape) != plan.shape:
                raise ValueError(
                    f"{plan.name}: planned as {plan.dtype} {plan.shape}, got {tensor.dtype} {tuple(tensor.shape)}"
                )
            if tensor.numel():
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one is gathered: memory holds the largest, never two
    return file.crc


class _NewFile:
    """A file that takes its name when all of it is on the drive. Only errors of its own name its path: what supplies
    the values may read from another drive."""

    def __init__(self, path: Path, n_bytes: int) -> None:
        self._path, self._aside = path, path.with_name(path.name + ".part")
        self._n_bytes = n_bytes
        self.crc = 0

    def __enter__(self) -> _NewFile:
        with self._errors():
            self._file = open(self._aside, "wb")
        return self

    def write(self, data: Any) -> None:
        with self._errors():
            self._file.write(data)
        self.crc = zlib.crc32(data, self.crc)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        try:
            if error is None:
                with self._errors():
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    replace_file(self._aside, self._path)
        finally:
            with contextlib.suppress(OSError):  # a full drive refuses the rest of the buffer once more
                self._file.close()
            with contextlib.suppress(OSError):
                self._aside.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            words = f"{describe_errno(error.errno)} ({format_gb(self._n_bytes)} were to be written)"
            raise FileError("writing weights", self._path, error.errno, words) from error


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file, checked against the file's size, and where its data begins.

    Raises CheckpointError for a file that is missing, cut short or not safetensors."""
    try:
        size_bytes = path.stat().st_size
        with open(path, "rb") as file:
            head = file.read(8)
            length = struct.unpack("<Q", head)[0] if len(head) == 8 else -1
            if not 0 < length <= size_bytes - 8:
                raise CheckpointError(f"{path}: not a safetensors file, or cut short ({size_bytes} bytes).")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {describe_errno(error.errno)}.") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is damaged: {error}.") from error
    if 8 + length + end != size_bytes:
        raise CheckpointError(f"{path}: should have {8 + length + end} bytes but has {size_bytes}: it was cut short.")
    return header, 8 + length


class ShardReader:
    """All tensors of a folder's shards with one stem, by name, read one at a time. Nothing is mapped: an error of the
    drive while a mapped file is read would end the process without a word."""

    def __init__(self, folder: Path, stem: str) -> None:
        self.folder = folder
        self._places: dict[str, tuple[Path, int]] = {}
        """(file, first byte) of each tensor."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for path in listed_files(folder, stem):
            header, data_at = read_header(path)
            for name, entry in header.items():
                if name in self._places:
                    raise CheckpointError(f"{path}: holds {name}, which {self._places[name][0].name} holds as well.")
                try:
                    start, stop = entry["data_offsets"]
                    plan = TensorPlan(name, TYPES[entry["dtype"]], tuple(int(size) for size in entry["shape"]))
                    if start < 0 or stop - start != plan.n_bytes:
                        raise ValueError(f"{stop - start} bytes for {plan.dtype} {plan.shape}")
                except (KeyError, TypeError, ValueError) as error:
                    raise CheckpointError(f"{path}: its header is damaged at {name}: {error}.") from error
                self._places[name] = path, data_at + start
                self.shapes[name], self.dtypes[name] = plan.shape, plan.dtype

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def file_of(self, name: str) -> Path:
        """The shard that holds a tensor."""
        return self._places[name][0]

    @property
    def n_bytes(self) -> int:
        """Bytes of all values."""
        return sum(TensorPlan(name, self.dtypes[name], self.shapes[name]).n_bytes for name in self._places)

    def check_holds(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """CheckpointError unless every one of these tensors is there, in its shape."""
        missing = [name for name in shapes if name not in self._places]
        if missing:
            raise CheckpointError(
                f"{self.folder}: is of another model, or not whole: it holds no {missing[0]}"
                + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
                + ". Resume with the model, preset and LoRA settings that it was made with."
            )
        for name, shape in shapes.items():
            if self.shapes[name] != shape:
                raise CheckpointError(
                    f"{self.folder}: is of another model: {name} has shape {list(self.shapes[name])} there and "
                    f"{list(shape)} here."
                )

    def names(self) -> Iterator[str]:
        """Names of all tensors, in file order."""
        return iter(self._places)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in plain memory. CheckpointError when it is not there, FileError when it cannot be read."""
        if name not in self._places:
            raise CheckpointError(f"{self.folder}: holds no tensor named {name}.")
        path, offset = self._places[name]
        value = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        if not value.numel():
            return value
        memory = value.reshape(-1).view(torch.uint8).numpy().data
        with file_errors(f"reading {name}", path), open(path, "rb", buffering=0) as file:
            file.seek(offset)
            done = 0
            while done < len(memory):
                got = file.readinto(memory[done:])
                if not got:
                    raise CheckpointError(f"{path}: ends at {done} of {len(memory)} bytes of {name}: it was cut short.")
                done += got
        return value

"""`StoreManifest`: what a tensor store contains and where, as JSON that notices when it was damaged.

The file is {"crc32": ..., "body": {...}}; the checksum is taken over the body in canonical form. It is written aside,
fsynced and renamed, so that after a crash there is the old one or the new one and never half of one. Reading checks
everything that could lead a transfer to a wrong place: format, version, sizes, extents inside their range, no overlap.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outcore.common import write_atomic
from outcore.storage.errors import StorageError
from outcore.storage.store.stripe_layout import StripeLayout
from outcore.storage.store.tensor_spec import TensorSpec, dtype_by_name

FORMAT = "outcore-tensor-store"
VERSION = 1
FILE_NAME = "manifest.json"
ALIGN_BYTES = 4096


@dataclass(frozen=True)
class Entry:
    """One tensor: its spec, its place in the store's byte range, and checksums of its chunks (None: not known)."""

    spec: TensorSpec
    start: int
    crc32: tuple[int | None, ...] | None = None


@dataclass(frozen=True)
class StoreManifest:
    store_id: str
    generation: int
    """Counts commits; 0 means that no data was ever committed."""
    layout: StripeLayout
    file_sizes: tuple[int, ...]
    total_bytes: int
    checksum_chunk_bytes: int | None
    entries: tuple[Entry, ...]

    def next_generation(self, entries: tuple[Entry, ...]) -> StoreManifest:
        return replace(self, generation=self.generation + 1, entries=entries)

    def _body(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "store_id": self.store_id,
            "generation": self.generation,
            "stripe_bytes": self.layout.stripe_bytes,
            "pattern": list(self.layout.pattern),
            "header_bytes": self.layout.header_bytes,
            "file_sizes": list(self.file_sizes),
            "total_bytes": self.total_bytes,
            "checksum": None if self.checksum_chunk_bytes is None else "crc32",
            "checksum_chunk_bytes": self.checksum_chunk_bytes,
            "tensors": [
                {
                    "name": entry.spec.name,
                    "dtype": entry.spec.dtype_name,
                    "shape": list(entry.spec.shape),
                    "start": entry.start,
                    "n_bytes": entry.spec.n_bytes,
                    "crc32": None if entry.crc32 is None else list(entry.crc32),
                }
                for entry in self.entries
            ],
        }

    def save(self, directory: Path) -> None:
        """Replace the manifest in `directory` atomically and durably. Raises StorageError."""
        body = self._body()
        text = json.dumps({"crc32": _crc32(body), "body": body}, indent=1)
        path = directory / FILE_NAME
        try:
            write_atomic(path, text)
        except OSError as error:
            raise StorageError("write of the manifest", path=path, wanted=len(text), errno=error.errno) from error

    @staticmethod
    def load(directory: Path) -> StoreManifest:
        """Read and check the manifest in `directory`. Raises StorageError with the reason it cannot be used."""
        path = directory / FILE_NAME
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise StorageError("open of the store", path=path, errno=error.errno, reason="no manifest") from error
        except ValueError as error:
            raise _refused(path, f"the manifest is damaged: not valid JSON ({error})") from error
        try:
            body, found = document["body"], document["crc32"]
        except (KeyError, TypeError):
            raise _refused(path, "the manifest is damaged: no body and checksum in it") from None
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise _refused(path, "not the manifest of a tensor store")
        if body.get("version") != VERSION:
            reason = f"the store has format version {body.get('version')!r}, this program reads version {VERSION}"
            raise _refused(path, f"{reason}: use the program version that wrote it, or create the store anew")
        if _crc32(body) != found:
            raise _refused(path, f"the manifest is damaged: its checksum is {_crc32(body)}, written was {found}")
        try:
            manifest = _parse(body)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise _refused(path, f"the manifest is damaged: {type(error).__name__}: {error}") from error
        problem = manifest.problem()
        if problem is not None:
            raise _refused(path, f"the manifest contradicts itself: {problem}")
        return manifest

    def problem(self) -> str | None:
        """What would lead a transfer astray, in words; None when all is well."""
        if list(self.file_sizes) != self.layout.file_sizes(self.total_bytes):
            return f"file sizes {list(self.file_sizes)} do not follow from {self.total_bytes} bytes"
        end, previous, names = 0, "", set()
        for entry in sorted(self.entries, key=lambda entry: (entry.start, entry.spec.n_bytes)):
            name, n_bytes = entry.spec.name, entry.spec.n_bytes
            if name in names:
                return f"{name!r} is listed twice"
            names.add(name)
            if entry.start < 0 or entry.start % ALIGN_BYTES or entry.start + n_bytes > self.total_bytes:
                return f"the extent of {name!r} at {entry.start} is not aligned or lies outside the store"
            if entry.start < end:
                return f"the extents of {previous!r} and {name!r} overlap"
            end, previous = entry.start + n_bytes, name
            if (entry.crc32 is None) != (self.checksum_chunk_bytes is None):
                return f"{name!r} has checksums where the store has none, or none where it has"
            if entry.crc32 is not None and self.checksum_chunk_bytes is not None:
                chunks = -(-n_bytes // self.checksum_chunk_bytes)
                if len(entry.crc32) != chunks:
                    return f"{name!r} has {len(entry.crc32)} checksums for {chunks} chunks"
        return None


def _parse(body: dict[str, Any]) -> StoreManifest:
    file_sizes = tuple(_whole(size) for size in body["file_sizes"])
    chunk = body["checksum_chunk_bytes"]
    if chunk is not None and _whole(chunk) < 1:
        raise ValueError(f"checksum_chunk_bytes {chunk}")
    entries = []
    for item in body["tensors"]:
        spec = TensorSpec(item["name"], dtype_by_name(item["dtype"]), tuple(_whole(size) for size in item["shape"]))
        if spec.n_bytes != item["n_bytes"]:
            raise ValueError(f"{spec.name}: {item['n_bytes']} bytes do not fit shape {spec.shape}")
        crc32 = item["crc32"]
        entries.append(Entry(spec, _whole(item["start"]), None if crc32 is None else tuple(crc32)))
    layout = StripeLayout(
        len(file_sizes),
        _whole(body["stripe_bytes"]),
        tuple(_whole(number) for number in body["pattern"]),
        _whole(body["header_bytes"]),
    )
    return StoreManifest(
        str(body["store_id"]),
        _whole(body["generation"]),
        layout,
        file_sizes,
        _whole(body["total_bytes"]),
        chunk,
        tuple(entries),
    )


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return value


def _crc32(body: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(body, sort_keys=True, separators=(',', ':')).encode()):08x}"


def _refused(path: Path, reason: str) -> StorageError:
    return StorageError("open of the store", path=path, reason=reason)

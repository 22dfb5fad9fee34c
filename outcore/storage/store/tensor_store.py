"""`TensorStore`: named tensors in preallocated files, one per drive, written in place: scratch of one process.

Layout: the tensors lie one behind the other, each at a 4 KiB boundary, in one byte range that `StripeLayout` deals out
over the drives. All space is reserved by `create`, so that a full drive is found before step 1. Reads and writes of
whole tensors or byte ranges go through an engine, many at a time; the store adds no copy.

Cost: nothing per byte without digests; with them one fast pass on the engine's threads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from outcore.common.classes import Closing
from outcore.common.deadline import TIMEOUT_S
from outcore.common.quantities import MIB, format_gb, round_up
from outcore.storage.block_file import BlockFile
from outcore.storage.engine import StorageEngine, open_engine
from outcore.storage.engines.request_queue import Kind
from outcore.storage.errors import StorageError
from outcore.storage.host_buffer import host_bytes
from outcore.storage.store.digests import BLOCK_BYTES, BlockDigests, DigestRule
from outcore.storage.store.files import (
    DirectoryLock,
    check_space,
    create_files,
    lock_directories,
    remove_files,
)
from outcore.storage.store.stripe_layout import StripeLayout
from outcore.storage.store.tensor_spec import Entry, Extent, TensorSpec
from outcore.storage.store.traffic import StoreTraffic
from outcore.storage.transfer import Transfer

ALIGN_BYTES = 4096
STRIPE_BYTES = 8 * MIB  # a request of one stripe reaches a drive's full rate (measured: 99 % from 8 MiB on)


class TensorStore(Closing):
    """Made by `create`. Safe from several threads; `close` and `delete` wait for transfers under way."""

    def __init__(
        self,
        directories: list[Path],
        layout: StripeLayout,
        entries: Sequence[Entry],
        files: list[BlockFile],
        locks: list[DirectoryLock],
        engine: StorageEngine | None,
        digests: DigestRule | None,
    ) -> None:
        self._directories = directories
        self._layout = layout
        self._files = files
        self._locks = locks
        self._owns_engine = engine is None
        self.engine: StorageEngine = engine if engine is not None else open_engine("auto")
        self._entries = {entry.spec.name: entry for entry in entries}
        self._digests: dict[str, BlockDigests] = {}
        if digests is not None:
            for name, entry in self._entries.items():
                locate = functools.partial(self._locate, entry)
                self._digests[name] = BlockDigests(name, entry.spec.n_bytes, digests, locate)
        self._traffic = StoreTraffic(files, layout, self.engine)

    # ------------------------------------------------------------------ making

    @classmethod
    def create(
        cls,
        paths: Sequence[str | Path],
        specs: Sequence[TensorSpec],
        engine: StorageEngine | None = None,
        *,
        stripe_bytes: int = STRIPE_BYTES,
        digests: DigestRule | None = None,
    ) -> TensorStore:
        """Make a store in directories `paths`, one per drive, with all its space reserved. Tensors start as zeros.

        `engine`: whose threads to use; None opens one for this store. `digests`: how what is read is verified. A data
        file that a killed process left there is replaced. Raises ValueError for impossible arguments, StorageError when
        there is no space or the place is in use; after a failure nothing is left behind."""
        directories = _directories(paths)
        if stripe_bytes < ALIGN_BYTES or stripe_bytes % ALIGN_BYTES:
            raise ValueError(f"stripe_bytes must be a positive multiple of {ALIGN_BYTES}, got {stripe_bytes}")
        layout = StripeLayout(len(directories), stripe_bytes)
        entries, total_bytes = _place(specs)
        file_sizes = layout.file_sizes(total_bytes)
        for directory in directories:
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError("creation of the store", path=directory, errno=error.errno) from error
        locks = lock_directories(directories, exclusive=True)
        try:
            check_space(directories, file_sizes)
            files = create_files(directories, file_sizes)
            try:
                return cls(directories, layout, entries, files, locks, engine, digests)
            except BaseException:
                for file in files:
                    file.close()
                raise
        except BaseException:
            remove_files(directories)
            for lock in locks:
                lock.release(remove=True)
            raise

    # ------------------------------------------------------------------ facts

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    @property
    def total_bytes(self) -> int:
        """Bytes on all drives together, padding included."""
        return sum(file.size_bytes for file in self._files)

    @property
    def grain_bytes(self) -> int:
        """Reads and writes are best cut at multiples of this from a tensor's start: what is verified; 1: anywhere."""
        return BLOCK_BYTES if self._digests else 1

    @property
    def unchecked_bytes(self) -> int:
        """Bytes of reads so far that no digest covered; 0 too where there are none."""
        return sum(digests.unchecked_bytes for digests in self._digests.values())

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def spec(self, name: str) -> TensorSpec:
        """Raises ValueError for a name the store does not have."""
        return self._entry(name).spec

    def extent(self, name: str) -> tuple[Extent, ...]:
        """Extents where the tensor lies, piece by piece; one piece when the store has one file."""
        entry = self._entry(name)
        pieces = self._layout.pieces(entry.start, entry.spec.n_bytes)
        return tuple(Extent(self._files[number].path, offset, n_bytes) for number, offset, n_bytes in pieces)

    # ------------------------------------------------------------------ transfers

    def submit_read(self, name: str, tensor: torch.Tensor, offset_bytes: int = 0, *, priority: int = 0) -> Transfer:
        """Fill `tensor` with the stored bytes from byte `offset_bytes` of `name` on; returns at once.

        `tensor`: contiguous, of the stored type or uint8, any shape that fits; pinned or page-aligned memory is read
        without a copy. Raises ValueError for what cannot fit; failures of transfer and verification are raised by
        `wait`."""
        return self._submit("read", name, tensor, offset_bytes, priority)

    def submit_write(self, name: str, tensor: torch.Tensor, offset_bytes: int = 0, *, priority: int = 0) -> Transfer:
        """Store `tensor` at byte `offset_bytes` of `name`; returns at once."""
        return self._submit("write", name, tensor, offset_bytes, priority)

    def _submit(self, kind: Kind, name: str, tensor: Any, offset_bytes: int, priority: int) -> Transfer:
        entry = self._entry(name)
        flat = _flat_bytes(tensor, entry.spec, offset_bytes, writable=kind == "read")
        return self._traffic.submit(kind, entry, flat, offset_bytes, priority, self._digests.get(name))

    def _locate(self, entry: Entry, byte: int) -> tuple[Path, int]:
        number, offset, _ = next(self._layout.pieces(entry.start + byte, 1))
        return self._files[number].path, offset

    def _entry(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise ValueError(f"the store has no tensor {name!r}; it has {len(self._entries)} others") from None

    # ------------------------------------------------------------------ end

    def close(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait for transfers under way, then let go of files, lock and own engine. May be repeated.

        TimeoutError when a transfer does not end: everything then stays as it is, for a later call or the process's
        end, because the drive may still move its bytes."""
        self._end(timeout_s, remove=False)

    def delete(self, timeout_s: float = TIMEOUT_S) -> None:
        """Close and remove the store's files; the directories stay. StorageError, and TimeoutError as `close`."""
        if not self._end(timeout_s, remove=True):
            raise RuntimeError("the tensor store is closed")

    def _end(self, timeout_s: float, *, remove: bool) -> bool:
        if not self._traffic.close(timeout_s):
            return False
        try:
            if self._owns_engine:
                self.engine.close()
            for file in self._files:
                file.close()
            if remove:
                remove_files(self._directories)
        finally:
            for lock in self._locks:
                lock.release(remove=remove)
        return True

    def __repr__(self) -> str:
        return (
            f"TensorStore({[str(path) for path in self._directories]}, {len(self._entries)} tensors, "
            f"{format_gb(self.total_bytes)})"
        )


def _directories(paths: Sequence[str | Path]) -> list[Path]:
    if isinstance(paths, str | Path):
        raise ValueError(f"paths must be a list of directories, got {paths!r} alone: write [{str(paths)!r}]")
    directories = [Path(path).resolve() for path in paths]
    if not directories:
        raise ValueError("a tensor store needs at least one path")
    if len(set(directories)) != len(directories):
        raise ValueError(f"the paths of a tensor store must differ, got {[str(path) for path in directories]}")
    return directories


def _place(specs: Sequence[TensorSpec]) -> tuple[tuple[Entry, ...], int]:
    """Put the tensors one behind the other; returns them and the bytes they span."""
    entries, end, names = [], 0, set()
    for spec in specs:
        if spec.name in names:
            raise ValueError(f"two tensors are named {spec.name!r}")
        names.add(spec.name)
        entries.append(Entry(spec, end))
        end = round_up(end + spec.n_bytes, ALIGN_BYTES)
    return tuple(entries), end


def _flat_bytes(tensor: Any, spec: TensorSpec, offset_bytes: int, *, writable: bool) -> Any:
    """The tensor's bytes as a flat view (numpy on the host, torch on a device), checked against the spec."""
    if isinstance(tensor, torch.Tensor) and tensor.dtype not in (spec.dtype, torch.uint8):
        raise ValueError(f"{spec.name!r} holds {spec.dtype}, the tensor given has {tensor.dtype}")
    if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
        if not tensor.is_contiguous():
            raise ValueError(f"the tensor given for {spec.name!r} is not contiguous")
        flat = tensor.detach().reshape(-1).view(torch.uint8)
    else:
        flat = host_bytes(tensor, writable=writable)
    if not isinstance(offset_bytes, int) or offset_bytes < 0 or offset_bytes + flat.nbytes > spec.n_bytes:
        raise ValueError(
            f"{flat.nbytes} bytes at offset_bytes={offset_bytes!r} do not fit into {spec.name!r}, "
            f"which has {spec.n_bytes} bytes"
        )
    return flat

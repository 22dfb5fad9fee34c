"""`TensorStore`: named tensors in preallocated files, one per drive, written in place and committed at once.

Layout: the tensors lie one behind the other, each at a 4 KiB boundary, in one byte range that `StripeLayout` deals out
over the drives. All space is reserved by `create`, so that a full drive is found before step 1. Reads and writes of
whole tensors or byte ranges go through an engine, many at a time; the store adds no copy.

Commit: `commit` waits for the writes, makes the data durable (fsync), then replaces the manifest atomically. A store
that was killed opens again with its last committed manifest. Writes are in place: bytes overwritten after the last
commit are new or torn after a crash (with checksums, reading them is refused). Data that must survive a crash *as of
the last commit* needs a second store or tensor to write into; manifests are versioned so that such shadow extents can
be added.

Cost: nothing per byte without checksums; with them one CRC-32 pass on the engine's threads (digests: a faster one)."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from outcore.common.classes import Closing
from outcore.common.deadline import TIMEOUT_S
from outcore.common.quantities import MIB, format_gb, round_up
from outcore.storage.block_file import BlockFile
from outcore.storage.engine import StorageEngine, open_engine
from outcore.storage.engines.request_queue import Kind
from outcore.storage.errors import StorageError
from outcore.storage.host_buffer import aligned_bytes, host_bytes
from outcore.storage.store.checksums import CHUNK_BYTES, Checksums
from outcore.storage.store.digests import BLOCK_BYTES, BlockDigests, DigestRule
from outcore.storage.store.files import (
    HEADER_BYTES,
    DirectoryLock,
    check_space,
    check_vacant,
    create_files,
    lock_directories,
    open_files,
    remove_files,
)
from outcore.storage.store.manifest import ALIGN_BYTES, Entry, StoreManifest
from outcore.storage.store.manifest import FILE_NAME as MANIFEST_NAME
from outcore.storage.store.stripe_layout import StripeLayout, stripe_pattern
from outcore.storage.store.tensor_spec import Extent, TensorSpec
from outcore.storage.store.traffic import StoreTraffic
from outcore.storage.transfer import Transfer

STRIPE_BYTES = 8 * MIB  # a request of one stripe reaches a drive's full rate (measured: 99 % from 8 MiB on)


class TensorStore(Closing):
    """Made by `create` or `open`. Safe from several threads; `close` and `delete` wait for transfers under way."""

    def __init__(
        self,
        directories: list[Path],
        manifest: StoreManifest,
        files: list[BlockFile],
        locks: list[DirectoryLock],
        engine: StorageEngine | None,
        writable: bool,
        digests: DigestRule | None = None,
    ) -> None:
        self._directories = directories
        self._manifest = manifest
        self._files = files
        self._locks = locks
        self._owns_engine = engine is None
        self.engine: StorageEngine = engine if engine is not None else open_engine("auto")
        self.writable = writable
        self._entries = {entry.spec.name: entry for entry in manifest.entries}
        chunk_bytes = manifest.checksum_chunk_bytes
        self._checksums: dict[str, Checksums] = {}
        self._digests: dict[str, BlockDigests] = {}
        if digests is not None:
            for name, entry in self._entries.items():
                locate = functools.partial(self._locate, entry)
                self._digests[name] = BlockDigests(name, entry.spec.n_bytes, digests, locate)
        if chunk_bytes is not None:
            for name, entry in self._entries.items():
                locate = functools.partial(self._locate, entry)
                self._checksums[name] = Checksums(name, entry.spec.n_bytes, chunk_bytes, locate, entry.crc32)
        self._traffic = StoreTraffic(files, manifest.layout, self.engine)
        self._broken: str | None = None

    # ------------------------------------------------------------------ making and opening

    @classmethod
    def create(
        cls,
        paths: Sequence[str | Path],
        specs: Sequence[TensorSpec],
        checksum: bool = False,
        engine: StorageEngine | None = None,
        *,
        stripe_bytes: int = STRIPE_BYTES,
        weights: Sequence[int] | None = None,
        direct: bool = True,
        digests: DigestRule | None = None,
    ) -> TensorStore:
        """Make a store in directories `paths`, one per drive, with all its space reserved. Tensors start as zeros.

        `engine`: whose threads to use; None opens one for this store. `weights`: relative speeds of the drives.
        `checksum`: sums in the manifest, for a store that is opened again; `digests`: of scratch, kept in RAM.
        Raises ValueError for impossible arguments, StorageError when there is no space, the place is taken or in use;
        after a failure nothing is left behind."""
        directories = _directories(paths)
        if stripe_bytes < ALIGN_BYTES or stripe_bytes % ALIGN_BYTES:
            raise ValueError(f"stripe_bytes must be a positive multiple of {ALIGN_BYTES}, got {stripe_bytes}")
        weights = [1] * len(directories) if weights is None else list(weights)
        if len(weights) != len(directories):
            raise ValueError(f"{len(weights)} weights for {len(directories)} paths: give one per path")
        layout = StripeLayout(len(directories), stripe_bytes, stripe_pattern(weights), HEADER_BYTES)
        entries, total_bytes = _place(specs, checksum)
        file_sizes = layout.file_sizes(total_bytes)
        store_id = uuid.uuid4().hex
        chunk_bytes = CHUNK_BYTES if checksum else None
        manifest = StoreManifest(store_id, 0, layout, tuple(file_sizes), total_bytes, chunk_bytes, entries)
        for directory in directories:
            try:
                directory.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise StorageError("creation of the store", path=directory, errno=error.errno) from error
        locks = lock_directories(directories, exclusive=True)
        created = False
        try:
            check_vacant(directories)
            created = True
            check_space(directories, file_sizes)
            files = create_files(directories, file_sizes, store_id, direct)
            try:
                manifest.save(directories[0])
                return cls(directories, manifest, files, locks, engine, True, digests)
            except BaseException:
                for file in files:
                    file.close()
                raise
        except BaseException:
            if created:
                remove_files(directories)
            for lock in locks:
                lock.release(remove=created)
            raise

    @classmethod
    def open(
        cls,
        paths: Sequence[str | Path],
        mode: Literal["r", "rw"] = "rw",
        engine: StorageEngine | None = None,
        *,
        direct: bool = True,
    ) -> TensorStore:
        """Open the store in directories `paths`, given in the order of its creation.

        "rw" refuses while any process has it open, "r" while a writer has. Raises StorageError with the reason for a
        damaged or foreign manifest, a missing or foreign data file, a wrong size, overlapping extents."""
        if mode not in ("r", "rw"):
            raise ValueError(f"mode must be 'r' or 'rw', got {mode!r}")
        directories = _directories(paths)
        for directory in directories:
            if not directory.is_dir():
                raise StorageError(
                    "open of the store", path=directory, reason="no such directory: is the drive mounted?"
                )
        if not (directories[0] / MANIFEST_NAME).exists():
            reason = f"no {MANIFEST_NAME} here: not a store, or not the first of its directories"
            raise StorageError("open of the store", path=directories[0], reason=reason)
        locks = lock_directories(directories, exclusive=mode == "rw")
        try:
            manifest = StoreManifest.load(directories[0])
            if manifest.layout.num_files != len(directories):
                reason = f"the store lies in {manifest.layout.num_files} directories, {len(directories)} were given"
                raise StorageError("open of the store", path=directories[0], reason=reason)
            files = open_files(
                directories, manifest.file_sizes, manifest.store_id, writable=mode == "rw", direct=direct
            )
            return cls(directories, manifest, files, locks, engine, mode == "rw")
        except BaseException:
            for lock in locks:
                lock.release()
            raise

    # ------------------------------------------------------------------ facts

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    @property
    def generation(self) -> int:
        """How often the store was committed; 0: its tensors were never committed."""
        return self._manifest.generation

    @property
    def total_bytes(self) -> int:
        """Bytes on all drives together, headers and padding included."""
        return sum(self._manifest.file_sizes)

    @property
    def has_checksums(self) -> bool:
        """Whether the manifest has checksums; then reads of whole chunks are verified."""
        return self._manifest.checksum_chunk_bytes is not None

    @property
    def grain_bytes(self) -> int:
        """Reads and writes are best cut at multiples of this from a tensor's start: what is verified; 1: anywhere."""
        return BLOCK_BYTES if self._digests else self._manifest.checksum_chunk_bytes or 1

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
        extents, done = [], 0
        for number, offset, n_bytes in self._manifest.layout.pieces(entry.start, entry.spec.n_bytes):
            extents.append(Extent(self._files[number].path, offset, n_bytes, done))
            done += n_bytes
        return tuple(extents)

    # ------------------------------------------------------------------ transfers

    def submit_read(self, name: str, tensor: torch.Tensor, offset_bytes: int = 0, *, priority: int = 0) -> Transfer:
        """Fill `tensor` with the stored bytes from byte `offset_bytes` of `name` on; returns at once.

        `tensor`: contiguous, of the stored type or uint8, any shape that fits; pinned or page-aligned memory is read
        without a copy. Raises ValueError for what cannot fit; transfer and checksum failures are raised by `wait`."""
        return self._submit("read", name, tensor, offset_bytes, priority)

    def submit_write(self, name: str, tensor: torch.Tensor, offset_bytes: int = 0, *, priority: int = 0) -> Transfer:
        """Store `tensor` at byte `offset_bytes` of `name`; returns at once. Durable after `commit`."""
        if not self.writable:
            raise StorageError("write", path=self._directories[0], reason="the store was opened for reading")
        return self._submit("write", name, tensor, offset_bytes, priority)

    def _submit(self, kind: Kind, name: str, tensor: Any, offset_bytes: int, priority: int) -> Transfer:
        entry = self._entry(name)
        flat = _flat_bytes(tensor, entry.spec, offset_bytes, writable=kind == "read")
        sums = self._digests.get(name) or self._checksums.get(name)
        return self._traffic.submit(kind, entry, flat, offset_bytes, priority, sums)

    def _locate(self, entry: Entry, byte: int) -> tuple[Path, int]:
        number, offset, _ = next(self._manifest.layout.pieces(entry.start + byte, 1))
        return self._files[number].path, offset

    def _entry(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise ValueError(f"the store has no tensor {name!r}; it has {len(self._entries)} others") from None

    # ------------------------------------------------------------------ commit and end

    def commit(self) -> int:
        """Make all writes so far durable, then the manifest; returns the new generation.

        Waits for transfers under way; new writes are refused meanwhile. Raises StorageError when a write failed and was
        not repeated, or when the drive cannot make the data durable (then the store refuses further commits: what the
        drive holds is unknown), TimeoutError when a drive hangs. The last committed manifest stays in force after any
        failure."""
        if not self.writable:
            raise StorageError("commit", path=self._directories[0], reason="the store was opened for reading")
        if self._broken is not None:
            reason = f"an earlier commit failed and the drive's content is unknown ({self._broken})"
            raise StorageError("commit", path=self._directories[0], reason=reason)
        self._traffic.hold_writes()
        try:
            failed = self._traffic.failed_writes()
            if failed:
                (name, start, stop), error = next(iter(failed.items()))
                reason = f"{len(failed)} writes failed, first bytes {start} to {stop} of {name!r}: {error}"
                raise StorageError("commit", path=self._directories[0], reason=reason) from error
            self._sum_stale_chunks()
            try:
                with ThreadPoolExecutor(len(self._files)) as pool:  # one drive's flush does not wait for another's
                    list(pool.map(BlockFile.sync, self._files))
            except StorageError as error:
                self._broken = str(error)
                raise
            entries = tuple(
                replace(entry, crc32=self._checksums[name].values()) if name in self._checksums else entry
                for name, entry in self._entries.items()
            )
            manifest = self._manifest.next_generation(entries)
            manifest.save(self._directories[0])
            self._manifest = manifest
            return manifest.generation
        finally:
            self._traffic.allow_writes()

    def _sum_stale_chunks(self) -> None:
        buffer = aligned_bytes(CHUNK_BYTES)
        for name, checksums in self._checksums.items():
            for start, stop in checksums.stale_ranges():
                view = buffer[: stop - start]
                self._traffic.read_now(self._entries[name], view, start)
                checksums.written(view, start)

    def close(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait for transfers under way, then let go of files, lock and own engine. Commits nothing; may be repeated.

        TimeoutError when a transfer does not end: everything then stays as it is, for a later call or the process's
        end, because the drive may still move its bytes."""
        self._end(timeout_s, remove=False)

    def delete(self, timeout_s: float = TIMEOUT_S) -> None:
        """Close and remove the store's files; the directories stay. StorageError, and TimeoutError as `close`."""
        if not self.writable:
            raise StorageError("delete", path=self._directories[0], reason="the store was opened for reading")
        if not self._end(timeout_s, remove=True):
            raise RuntimeError("the tensor store is closed: open it to delete it")

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
            f"{format_gb(self.total_bytes)}, generation {self.generation})"
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


def _place(specs: Sequence[TensorSpec], checksum: bool) -> tuple[tuple[Entry, ...], int]:
    """Put the tensors one behind the other; returns them and the bytes they span."""
    entries, end, names = [], 0, set()
    for spec in specs:
        if spec.name in names:
            raise ValueError(f"two tensors are named {spec.name!r}")
        names.add(spec.name)
        sums = (None,) * -(-spec.n_bytes // CHUNK_BYTES) if checksum else None
        entries.append(Entry(spec, end, sums))
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

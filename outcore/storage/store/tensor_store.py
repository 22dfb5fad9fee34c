"""`TensorStore`: named tensors in preallocated files, one per drive, written in place: scratch of one process.

Layout: the tensors lie one behind the other, each at a 4 KiB boundary, in one byte range that `StripeLayout` deals out
over the drives. All space is reserved by `create`, so that a full drive is found before step 1. Reads and writes of
whole tensors or byte ranges go through an engine, many at a time; the store adds no copy.

Cost: nothing per byte without digests; with them one fast pass on the engine's threads.

`StoreTraffic`: the reads and writes of a tensor store under way.

A request for a tensor becomes one engine request per stripe (one in all with one drive and no digests). With digests
it is cut into sections of 8 MiB, so that several threads sum one tensor. Every wait here has a limit: a drive that
hangs ends in a TimeoutError that names what is under way, and whoever is told must leave its buffers alone."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outcore.common.classes import Closing
from outcore.common.deadline import TIMEOUT_S
from outcore.common.quantities import MIB, format_gb, format_s, round_up
from outcore.storage.block_file import BlockFile
from outcore.storage.block_spans import aligned_bytes, host_bytes
from outcore.storage.engine import StorageEngine, open_engine
from outcore.storage.engines.worker import Kind
from outcore.storage.errors import StorageError, Transfer, gather
from outcore.storage.store.digests import BLOCK_BYTES, BlockDigests, DigestRule, Seen
from outcore.storage.store.files import (
    DirectoryLock,
    Entry,
    Extent,
    StripeLayout,
    TensorSpec,
    check_space,
    create_files,
    lock_directories,
    remove_files,
)

SECTION_BYTES = 8 * MIB  # what one thread sums at a time; a multiple of digests.BLOCK_BYTES


class StoreTraffic:
    """Submits byte ranges of tensors to the engine and counts what is under way."""

    def __init__(self, files: Sequence[BlockFile], layout: StripeLayout, engine: StorageEngine) -> None:
        self.files = files
        self.layout = layout
        self.engine = engine
        self._idle = threading.Condition()
        self._under_way: dict[object, tuple[Kind, Entry, int]] = {}
        """(kind, tensor, first byte) of every request that has not ended."""
        self._closed = self._ended_once = False

    def submit(
        self, kind: Kind, entry: Entry, flat: Any, start: int, priority: int, digests: BlockDigests | None
    ) -> Transfer:
        """Move `flat` from or to byte `start` of the entry's tensor. Raises RuntimeError when closed."""
        stop = start + flat.nbytes
        with self._idle:
            if self._closed:
                raise RuntimeError("the tensor store is closed")
            token = object()
            self._under_way[token] = kind, entry, start
        try:
            if digests is None or start == stop:  # nothing is written, so what is known holds
                transfer = self._submit_range(kind, entry, flat, start, priority)
            else:
                if kind == "write":
                    for at, to in digests.cut(start, stop):
                        digests.split(at, to, start, stop, lambda at, to: self._read_whole(entry, at, to))
                    digests.mark(start, stop)
                transfer = self._submit_sections(kind, entry, flat, start, priority, digests)
        except BaseException:
            self._ended(token)
            raise
        transfer.add_done_callback(lambda done: self._ended(token))
        return transfer

    def _submit_sections(
        self, kind: Kind, entry: Entry, flat: Any, start: int, priority: int, digests: BlockDigests
    ) -> Transfer:
        stop = start + flat.nbytes
        before = digests.seen(start, stop)
        is_read = kind == "read"
        after: Callable[..., object] = functools.partial(digests.verify, before=before) if is_read else digests.written
        sections: list[Transfer] = []
        steps: list[Callable[[], object] | None] = []
        done = 0
        try:
            while done < flat.nbytes:
                at = start + done
                take = min(SECTION_BYTES - at % SECTION_BYTES, flat.nbytes - done)
                view = flat[done : done + take]
                sections.append(self._submit_range(kind, entry, view, at, priority))
                is_taken = digests.takes(at // SECTION_BYTES)
                steps.append((lambda view=view, at=at: after(_on_host(view), at)) if is_taken else None)
                done += take
            whole = gather(sections, f"{kind} of {entry.spec.name!r}", steps)
            if is_read and (cut := digests.cut(start, stop)):
                return self._with_cut(whole, entry, flat, start, priority, digests, cut, before)
            return whole
        except BaseException as error:
            return _failed_half_way(sections, error, f"{kind} of {entry.spec.name!r}")

    def _with_cut(
        self,
        main: Transfer,
        entry: Entry,
        flat: Any,
        start: int,
        priority: int,
        digests: BlockDigests,
        cut: Sequence[tuple[int, int]],
        before: Seen,
    ) -> Transfer:
        """The read `main` with what it cuts in two, which is read whole to be verified."""
        what = f"read of {entry.spec.name!r}"
        parts = [main]
        buffers = [(at, aligned_bytes(to - at)) for at, to in cut]
        try:
            parts += [self._submit_range("read", entry, buffer, at, priority) for at, buffer in buffers]
        except BaseException as error:
            return _failed_half_way(parts, error, what)

        def check() -> None:
            data = _on_host(flat)
            for at, buffer in buffers:
                digests.check_cut(buffer, at, data, start, before)

        both = gather(parts, what)
        total = gather([both], what, [check])
        total.n_bytes = main.n_bytes
        return total

    def _submit_range(self, kind: Kind, entry: Entry, flat: Any, start: int, priority: int) -> Transfer:
        submit = self.engine.submit_read if kind == "read" else self.engine.submit_write
        parts: list[Transfer] = []
        done = 0
        try:
            for number, offset, n_bytes in self.layout.pieces(entry.start + start, flat.nbytes):
                parts.append(submit(self.files[number], offset, flat[done : done + n_bytes], priority=priority))
                done += n_bytes
        except BaseException as error:
            return _failed_half_way(parts, error, f"{kind} of {entry.spec.name!r}")
        return parts[0] if len(parts) == 1 else gather(parts, f"{kind} of {entry.spec.name!r}")

    def _read_whole(self, entry: Entry, at: int, to: int) -> np.ndarray:
        buffer = aligned_bytes(to - at)
        self._submit_range("read", entry, buffer, at, priority=0).wait(TIMEOUT_S)
        return buffer

    def _ended(self, token: object) -> None:
        with self._idle:
            self._under_way.pop(token)
            if not self._under_way:
                self._idle.notify_all()

    def close(self, timeout_s: float = TIMEOUT_S) -> bool:
        """Refuse new requests and wait for those under way; False when that has been done before.

        TimeoutError when some do not end: files and buffers must stay, and a later call waits again."""
        with self._idle:
            self._closed = True
            self._wait_idle(timeout_s)
            was_open, self._ended_once = not self._ended_once, True
            return was_open

    def _wait_idle(self, timeout_s: float) -> None:
        if self._idle.wait_for(lambda: not self._under_way, timeout_s):
            return
        kind, entry, start = next(iter(self._under_way.values()))
        number, offset, _ = next(self.layout.pieces(entry.start + start, 1))
        raise TimeoutError(
            f"close() of a tensor store: {len(self._under_way)} transfers did not end within {format_s(timeout_s)}, "
            f"the first a {kind} of {entry.spec.name!r} at offset {offset} of {self.files[number].path}: the drive "
            "hangs, or is far slower than this run needs"
        )


def _on_host(view: Any) -> np.ndarray:
    return view if isinstance(view, np.ndarray) else view.cpu().numpy()


def _failed_half_way(parts: Sequence[Transfer], error: BaseException, what: str) -> Transfer:
    """Submission failed after `parts`, which nobody else will wait for: raises `error` once they have ended.

    Where they do not end, a transfer that fails with `error` when they do: the buffer is theirs until then."""
    until_s = time.monotonic() + TIMEOUT_S
    for part in parts:
        with contextlib.suppress(Exception):
            part.wait(max(0.0, until_s - time.monotonic()))
    if all(part.done() for part in parts) or not isinstance(error, Exception):
        raise error
    refused = Transfer(0, what)
    refused.finish(error)
    return gather([refused, *parts], what)


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

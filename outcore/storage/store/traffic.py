"""`StoreTraffic`: the reads and writes of a tensor store under way, and which writes have failed since.

A request for a tensor becomes one engine request per stripe (one in all with one drive and no checksums). With
checksums it is cut into sections of 8 MiB, so that several threads sum one tensor. Commits ask here whether everything
written has really been written. Every wait here has a limit: a drive that hangs ends in a TimeoutError that names what
is under way, and whoever is told must leave its buffers alone."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outcore.common.deadline import TIMEOUT_S
from outcore.common.quantities import MIB, format_s
from outcore.storage.block_file import BlockFile
from outcore.storage.engine import StorageEngine
from outcore.storage.engines.request_queue import Kind
from outcore.storage.host_buffer import aligned_bytes
from outcore.storage.store.checksums import Checksums
from outcore.storage.store.digests import BlockDigests, Seen
from outcore.storage.store.manifest import Entry
from outcore.storage.store.stripe_layout import StripeLayout
from outcore.storage.transfer import Transfer, gather

SECTION_BYTES = 8 * MIB  # what one thread sums at a time; a multiple of checksums.CHUNK_BYTES


class StoreTraffic:
    """Submits byte ranges of tensors to the engine and counts what is under way."""

    def __init__(self, files: Sequence[BlockFile], layout: StripeLayout, engine: StorageEngine) -> None:
        self.files = files
        self.layout = layout
        self.engine = engine
        self._idle = threading.Condition()
        self._under_way: dict[object, tuple[Kind, Entry, int]] = {}
        """(kind, tensor, first byte) of every request that has not ended."""
        self._writes_held = False
        self._closed = self._ended_once = False
        self._failed: dict[tuple[str, int, int], BaseException] = {}

    def submit(
        self, kind: Kind, entry: Entry, flat: Any, start: int, priority: int, checksums: Checksums | BlockDigests | None
    ) -> Transfer:
        """Move `flat` from or to byte `start` of the entry's tensor. Raises RuntimeError when closed or committing."""
        name, stop = entry.spec.name, start + flat.nbytes
        with self._idle:
            if self._closed:
                raise RuntimeError("the tensor store is closed")
            if kind == "write" and self._writes_held:
                raise RuntimeError(f"write to {name!r} during commit(): submit it before or after")
            token = object()
            self._under_way[token] = kind, entry, start
        try:
            if checksums is None:
                transfer = self._submit_range(kind, entry, flat, start, priority)
            else:
                if kind == "write":
                    if isinstance(checksums, BlockDigests):
                        for at, to in checksums.cut(start, stop):
                            checksums.split(at, to, start, stop, lambda at, to: self._read_whole(entry, at, to))
                    checksums.mark(start, stop)
                transfer = self._submit_sections(kind, entry, flat, start, priority, checksums)
        except BaseException as error:
            self._ended(token, name, start, stop, error)
            raise
        transfer.add_done_callback(lambda done: self._ended(token, name, start, stop, done.failure()))
        return transfer

    def _submit_sections(
        self, kind: Kind, entry: Entry, flat: Any, start: int, priority: int, checksums: Checksums | BlockDigests
    ) -> Transfer:
        stop = start + flat.nbytes
        before = checksums.seen(start, stop) if isinstance(checksums, BlockDigests) else None
        after: Callable[..., object] = checksums.written if kind == "write" else checksums.verify
        if kind == "read" and before is not None:
            after = functools.partial(after, before=before)
        sections: list[Transfer] = []
        steps: list[Callable[[], object] | None] = []
        done = 0
        try:
            while done < flat.nbytes:
                at = start + done
                take = min(SECTION_BYTES - at % SECTION_BYTES, flat.nbytes - done)
                view = flat[done : done + take]
                sections.append(self._submit_range(kind, entry, view, at, priority))
                is_taken = checksums.takes(at // SECTION_BYTES)
                steps.append((lambda view=view, at=at: after(_on_host(view), at)) if is_taken else None)
                done += take
            whole = gather(sections, f"{kind} of {entry.spec.name!r}", steps)
            if kind == "read" and isinstance(checksums, BlockDigests) and (cut := checksums.cut(start, stop)):
                assert before is not None
                return self._with_cut(whole, entry, flat, start, priority, checksums, cut, before)
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
        self.read_now(entry, buffer, at)
        return buffer

    def read_now(self, entry: Entry, flat: np.ndarray, start: int) -> None:
        """Blocking and unverified, for the store's own use. Raises StorageError."""
        self._submit_range("read", entry, flat, start, priority=0).wait(TIMEOUT_S)

    def _ended(self, token: object, name: str, start: int, stop: int, error: BaseException | None) -> None:
        with self._idle:
            kind = self._under_way.pop(token)[0]
            if kind == "write":
                if error is not None:
                    self._failed[name, start, stop] = error
                else:  # a repeated write heals a failed one that it covers
                    for key in [key for key in self._failed if key[0] == name and start <= key[1] and key[2] <= stop]:
                        del self._failed[key]
            if not self._under_way:
                self._idle.notify_all()

    def hold_writes(self, timeout_s: float = TIMEOUT_S) -> None:
        """Refuse new writes until `allow_writes`, and wait for what is under way. RuntimeError when held already,
        TimeoutError (writes are then allowed again)."""
        with self._idle:
            if self._closed:
                raise RuntimeError("the tensor store is closed")
            if self._writes_held:
                raise RuntimeError("commit() is already running on another thread")
            self._writes_held = True
            try:
                self._wait_idle("commit()", timeout_s)
            except BaseException:
                self._writes_held = False
                raise

    def allow_writes(self) -> None:
        with self._idle:
            self._writes_held = False

    def failed_writes(self) -> dict[tuple[str, int, int], BaseException]:
        """(tensor, first byte, end byte) -> what went wrong, of writes that no later write has made good."""
        with self._idle:
            return dict(self._failed)

    def close(self, timeout_s: float = TIMEOUT_S) -> bool:
        """Refuse new requests and wait for those under way; False when that has been done before.

        TimeoutError when some do not end: files and buffers must stay, and a later call waits again."""
        with self._idle:
            self._closed = True
            self._wait_idle("close()", timeout_s)
            was_open, self._ended_once = not self._ended_once, True
            return was_open

    def _wait_idle(self, what: str, timeout_s: float) -> None:
        if self._idle.wait_for(lambda: not self._under_way, timeout_s):
            return
        kind, entry, start = next(iter(self._under_way.values()))
        number, offset, _ = next(self.layout.pieces(entry.start + start, 1))
        raise TimeoutError(
            f"{what} of a tensor store: {len(self._under_way)} transfers did not end within {format_s(timeout_s)}, the "
            f"first a {kind} of {entry.spec.name!r} at offset {offset} of {self.files[number].path}: the drive hangs, "
            "or is far slower than this run needs"
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

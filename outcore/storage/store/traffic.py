"""`StoreTraffic`: the reads and writes of a tensor store under way.

A request for a tensor becomes one engine request per stripe (one in all with one drive and no digests). With digests
it is cut into sections of 8 MiB, so that several threads sum one tensor. Every wait here has a limit: a drive that
hangs ends in a TimeoutError that names what is under way, and whoever is told must leave its buffers alone."""

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
from outcore.storage.store.digests import BlockDigests, Seen
from outcore.storage.store.stripe_layout import StripeLayout
from outcore.storage.store.tensor_spec import Entry
from outcore.storage.transfer import Transfer, gather

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
            if digests is None:
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

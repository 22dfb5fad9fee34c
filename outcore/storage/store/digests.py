"""`BlockDigests`: what every block of a tensor must be when the drive gives it back. Kept in RAM, for scratch.

A block is 64 KiB of the tensor; a fresh store's are zeros, so also what was never written is verified. A write of a
whole block replaces its digest; one of a part is remembered as that part, because two neighbours may write their halves
of a block at the same time, and each is verified with reads that cover it. Digests are taken from memory on the thread
that moved the bytes. RAM: 9 bytes for each block, 0.015 % of what is on the drive.

A read that cuts a block, or a part written alone, in two brings the whole of it as well (`cut`, `check_cut`); a write
that does so first has the rest read, verified and remembered alone (`split`). What no digest covers, because neighbours
were written at the same time, is counted in `unchecked_bytes`; tests hold the count at zero."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from outcore.common.quantities import KIB
from outcore.storage.errors import ChangedBytes

BLOCK_BYTES = 64 * KIB


@dataclass(frozen=True)
class DigestRule:
    """Rule by which a store's blocks are verified."""

    digest: Callable[[np.ndarray, int], np.ndarray]
    """(data, block bytes) -> uint64 of each block."""
    one_in: int = 1
    """Verify one section of 8 MiB in this many; 1: every section."""


@dataclass(frozen=True)
class Seen:
    """Digests as they were when a read began."""

    first: int
    """Number of the first block."""
    is_known: np.ndarray
    sums: np.ndarray
    parts: frozenset[tuple[int, int, int]]
    """(first byte, end, digest) of parts that were written alone."""


class BlockDigests:
    """Digests of one tensor of `n_bytes`. `locate(byte)`: its place on the drives. Safe from several threads."""

    def __init__(self, name: str, n_bytes: int, rule: DigestRule, locate: Callable[[int], tuple[Path, int]]) -> None:
        self.name = name
        self.n_bytes = n_bytes
        self._rule = rule
        self._locate = locate
        self._lock = threading.Lock()
        count = -(-n_bytes // BLOCK_BYTES)
        self._sums = np.zeros(count, dtype=np.uint64)
        self._is_known = np.ones(count, dtype=bool)
        self._parts: dict[int, list[tuple[int, int, int]]] = {}
        """Block -> (first byte, end, digest) of parts that were written alone."""
        self.unchecked_bytes = 0
        """Bytes of reads so far that nothing could verify."""
        if count:
            self._sums[:] = self._one(np.zeros(BLOCK_BYTES, dtype=np.uint8))
            self._sums[-1] = self._one(np.zeros(n_bytes - (count - 1) * BLOCK_BYTES, dtype=np.uint8))

    def takes(self, section: int) -> bool:
        """Tell whether this section of 8 MiB is among those that are verified."""
        return (section + len(self.name)) % self._rule.one_in == 0

    def mark(self, start: int, stop: int) -> None:
        """A write of [start, stop) begins: what was known about it no longer holds."""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        with self._lock:
            self._is_known[first:last] = False
            for block in [b for b in self._parts if first <= b < last]:
                kept = [part for part in self._parts[block] if part[1] <= start or part[0] >= stop]
                if kept:
                    self._parts[block] = kept
                else:
                    del self._parts[block]

    def split(self, at: int, to: int, start: int, stop: int, read: Callable[[int, int], np.ndarray]) -> None:
        """A write of [start, stop) will overwrite a part of [at, to), which has one digest: give the rest its own.

        `read(first byte, end)` brings it from the drive; a block that was never written needs no read. StorageError."""
        whole = self._zeros_of(at, to)
        if whole is None:
            before = self.seen(at, to)
            whole = read(at, to)
            if self._check(whole, at, before):
                return  # overwritten meanwhile by another thread
        rest = [(first, last) for first, last in ((at, min(to, start)), (max(at, stop), to)) if first < last]
        parts = [(first, last, self._one(whole[first - at : last - at])) for first, last in rest]
        block = at // BLOCK_BYTES
        with self._lock:
            mine = [part for part in self._parts.get(block, []) if part[:2] != (at, to)]
            self._is_known[block] = False
            self._parts[block] = mine + parts

    def _zeros_of(self, at: int, to: int) -> np.ndarray | None:
        """The content of a block that was never written."""
        block = at // BLOCK_BYTES
        zeros = np.zeros(to - at, dtype=np.uint8)
        with self._lock:
            is_zero = self._is_known[block] and to - at == self._size(block)
            return zeros if is_zero and int(self._sums[block]) == self._one(zeros) else None

    def written(self, data: np.ndarray, start: int) -> None:
        """`data` now lies at byte `start` of the tensor."""
        stop = start + data.nbytes
        first, last = self._whole(start, stop)
        edges = [(at, to, self._one(data[at - start : to - start])) for at, to in self._edges(start, stop)]
        sums = self._of(data, start, first, last)
        with self._lock:
            self._sums[first:last] = sums
            self._is_known[first:last] = True
            for at, to, value in edges:
                self._parts.setdefault(at // BLOCK_BYTES, []).append((at, to, value))

    def seen(self, start: int, stop: int) -> Seen:
        """Facts about the blocks of [start, stop) before they are read. A neighbour of what is read may be
        overwritten before the bytes are checked: its new digest says nothing of the old bytes."""
        first, last = start // BLOCK_BYTES, -(-stop // BLOCK_BYTES)
        with self._lock:
            parts = frozenset(part for block in range(first, last) for part in self._parts.get(block, ()))
            return Seen(first, self._is_known[first:last].copy(), self._sums[first:last].copy(), parts)

    def verify(self, data: np.ndarray, start: int, before: Seen | None = None) -> None:
        """Check `data` read from byte `start`. StorageError naming tensor, file and offset. `before`: what was known
        when the read began; None: nothing was written since."""
        unchecked = self._check(data, start, before or self.seen(start, start + data.nbytes))
        if unchecked:
            with self._lock:
                self.unchecked_bytes += unchecked

    def _check(self, data: np.ndarray, start: int, before: Seen) -> int:
        """Bytes that no digest covers, or one that came after they were read."""
        stop = start + data.nbytes
        first, last = self._whole(start, stop)
        found = self._of(data, start, first, last)
        with self._lock:
            known = self._is_known[first:last].copy()
            is_wrong = known & (self._sums[first:last] != found)
            mine = slice(first - before.first, last - before.first)
            known &= ~is_wrong | (before.is_known[mine] & (before.sums[mine] == self._sums[first:last]))
            wrong = np.flatnonzero(known & is_wrong)
            parts = [part for block in self._cut_or_unknown(start, stop, first, known) for part in self._in(block)]
            unchecked = data.nbytes - sum(self._size(first + int(i)) for i in np.flatnonzero(known))
        if len(wrong):
            block = first + int(wrong[0])
            self._refuse(block * BLOCK_BYTES, block * BLOCK_BYTES + self._size(block), len(wrong))
        for at, to, value in parts:
            if start <= at and to <= stop:
                is_right = self._one(data[at - start : to - start]) == value
                if not is_right and (at, to, value) in before.parts:
                    self._refuse(at, to, 1)
                unchecked -= to - at if is_right else 0
        return unchecked

    def cut(self, start: int, stop: int) -> list[tuple[int, int]]:
        """[first byte, end) of what has one digest and lies in [start, stop) in part only: at most two or three."""
        found = set()
        with self._lock:
            for block in {at // BLOCK_BYTES for at, _ in self._edges(start, stop)}:
                if self._is_known[block]:
                    found.add((block * BLOCK_BYTES, block * BLOCK_BYTES + self._size(block)))
                found |= {(at, to) for at, to, _ in self._in(block) if at < stop and start < to}
        return sorted(one for one in found if one[0] < start or one[1] > stop)

    def check_cut(self, whole: np.ndarray, at: int, data: np.ndarray, start: int, before: Seen) -> None:
        """Check what `cut` named: `whole`, read from byte `at`, against its digest, and the part of `data` (from byte
        `start`) that lies in it against `whole`. StorageError."""
        to = at + whole.nbytes
        unchecked = self._check(whole, at, before)
        first, last = max(at, start), min(to, start + data.nbytes)
        if not np.array_equal(whole[first - at : last - at], data[first - start : last - start]):
            self._refuse(first, last, 1)
        if not unchecked:  # else somebody overwrote it meanwhile
            with self._lock:
                self.unchecked_bytes -= last - first  # counted with the read that cut it

    def _cut_or_unknown(self, start: int, stop: int, first: int, known: np.ndarray) -> list[int]:
        """Blocks of which only parts can be verified."""
        cut = {at // BLOCK_BYTES for at, _ in self._edges(start, stop)}
        return sorted(cut | {first + int(i) for i in np.flatnonzero(~known)})

    def _in(self, block: int) -> list[tuple[int, int, int]]:
        return list(self._parts.get(block, ()))

    def _refuse(self, at: int, to: int, count: int) -> None:
        path, offset = self._locate(at)
        more = f" (and {count - 1} more blocks)" if count > 1 else ""
        reason = (
            f"bytes {at} to {to} of {self.name!r}{more} came back other than they were written: a write was lost or "
            "torn, or bits changed on the drive or on the way. Do not trust this drive (look at `dmesg` and "
            "`smartctl -a`); nothing was trained on these bytes, and the last checkpoint is whole"
        )
        raise ChangedBytes(f"verification of {self.name!r}", path=path, offset=offset, reason=reason)

    def _size(self, block: int) -> int:
        return min(BLOCK_BYTES, self.n_bytes - block * BLOCK_BYTES)

    def _whole(self, start: int, stop: int) -> tuple[int, int]:
        """First and end block of those wholly in [start, stop)."""
        first = -(-start // BLOCK_BYTES)
        last = -(-stop // BLOCK_BYTES) if stop == self.n_bytes else stop // BLOCK_BYTES
        return first, max(first, last)

    def _edges(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Parts of [start, stop) that are no whole blocks: at most two."""
        first, last = self._whole(start, stop)
        if first == last:
            middle = first * BLOCK_BYTES
            pieces = [(start, min(middle, stop)), (max(start, middle), stop)]
        else:
            pieces = [(start, first * BLOCK_BYTES), (min(stop, last * BLOCK_BYTES), stop)]
        return [(at, to) for at, to in pieces if at < to]

    def _of(self, data: np.ndarray, start: int, first: int, last: int) -> np.ndarray:
        begin = first * BLOCK_BYTES - start
        end = min(last * BLOCK_BYTES, self.n_bytes) - start
        return self._rule.digest(data[begin:end], BLOCK_BYTES) if last > first else self._sums[:0]

    def _one(self, data: np.ndarray) -> int:
        return int(self._rule.digest(data, BLOCK_BYTES)[0])

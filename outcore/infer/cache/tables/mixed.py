"""Tables of a pass of prompts' chunks and single tokens together, at addresses that stay for a CUDA graph.

Everything has one size. What a pass does not fill is empty: tiles of no tokens, and rows that store nothing and see
nothing, whose results nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from outcore.infer.cache.kv_cache import SequencePages
from outcore.infer.cache.tables.rows import FACTS
from outcore.staging.pool import SmallCopies

NO_SLOT = -1
"""Slot of a row whose key and value are not stored."""


@dataclass(frozen=True)
class MixedSize:
    """Room of such tables."""

    rows: int
    wanted: int
    """Single tokens, and rows whose logits are wanted."""
    single_keys: int
    """Keys that a single token sees at most."""
    tiles: int
    """Tiles of prompts."""
    pages: int
    """Pages of all sequences together."""
    tile_tokens: int
    """Tokens of a prompt's tile at most."""
    most_single: int | None
    """Tokens that a running answer adds up to which each is a tile of its own; None: all of an answer are."""


class LaidOut(Protocol):
    """Tokens of one sequence in the pass (`schedule.Work`)."""

    @property
    def start(self) -> int: ...
    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def num_wanted(self) -> int: ...
    @property
    def pages(self) -> SequencePages: ...
    def is_continued(self, most: int | None) -> bool: ...


class MixedTables:
    """Tables of one size, for each group of attentions with one window."""

    def __init__(self, size: MixedSize, windows: Sequence[int | None], page_tokens: int, copies: SmallCopies) -> None:
        self.size, self.num_rows = size, size.rows
        self._windows, self._page_tokens, self._copies = tuple(windows), page_tokens, copies
        of_group = (size.rows, FACTS * size.wanted, FACTS * size.tiles, size.pages)
        widths = [size.rows, size.rows, size.rows, size.wanted, *(of_group * len(self._windows))]
        self._device = torch.zeros(sum(widths), dtype=torch.long, device=copies.device)
        self._host = np.zeros(sum(widths), dtype=np.int64)
        ids, self._places, self.adapters, self.wanted, *rest = self._device.split(widths)
        self.ids, self.positions = ids.view(1, -1), self._places.view(1, -1).clone()
        self.slots, self.pages = rest[0::4], rest[3::4]
        """For each group: the slot of each row's key and value; page numbers of all sequences, one behind the other."""
        self.singles = [facts.view(FACTS, -1) for facts in rest[1::4]]
        self.tiles = [facts.view(FACTS, -1) for facts in rest[2::4]]
        """For each group, tiles as the kernel takes them (`attention.tiles`)."""
        self._parts = np.split(self._host, np.cumsum(widths)[:-1])

    def fill(self, chunks: Sequence[LaidOut]) -> None:
        """Put a pass that has room into the tables: on a GPU queued on the current stream."""
        ids, places, adapters, wanted = self._parts[:4]
        counts = np.array([len(chunk.tokens) for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        ends = counts.cumsum()
        used = ends[-1]
        ids[:used] = [token for chunk in chunks for token in chunk.tokens]
        ids[used:] = places[used:] = adapters[used:] = 0
        adapters[:used] = np.repeat([chunk.pages.adapter for chunk in chunks], counts)
        places[:used] = np.repeat(starts - (ends - counts), counts) + np.arange(used)
        logits = [at for chunk, end in zip(chunks, ends, strict=True) for at in range(end - chunk.num_wanted, end)]
        wanted[: len(logits)], wanted[len(logits) :] = logits, 0
        single = np.array([chunk.is_continued(self.size.most_single) for chunk in chunks])
        for group in range(len(self._windows)):
            self._fill_group(group, chunks, starts, counts, single)
        self._copies.into(torch.from_numpy(self._host), self._device)

    def _fill_group(
        self, group: int, chunks: Sequence[LaidOut], starts: np.ndarray, counts: np.ndarray, single: np.ndarray
    ) -> None:
        size, window = self._page_tokens, self._windows[group]
        slots, singles, tiles, pages = self._parts[4 + 4 * group : 8 + 4 * group]
        ends, places = counts.cumsum(), self._parts[1]
        used = ends[-1]
        firsts = np.zeros_like(starts) if window is None else np.maximum(starts - window + 1, 0) // size
        tables = [
            chunk.pages.tables[group][first:last]
            for chunk, first, last in zip(chunks, firsts, -(-(starts + counts) // size), strict=True)
        ]
        lengths = np.array([len(table) for table in tables])
        begins = lengths.cumsum() - lengths
        pages[: lengths.sum()] = [max(page, 0) for table in tables for page in table]  # passed ones are masked
        of_row = np.repeat(np.arange(len(chunks)), counts)
        page = pages[begins[of_row] + places[:used] // size - firsts[of_row]]
        slots[:used], slots[used:] = page * size + places[:used] % size, NO_SLOT
        for into, mine, step in ((singles, single, 1), (tiles, ~single, self.size.tile_tokens)):
            steps = -(-counts * mine // step)
            chunk = np.repeat(np.arange(len(chunks)), steps)
            at = (np.arange(steps.sum()) - (steps.cumsum() - steps)[chunk]) * step
            facts = into.reshape(FACTS, -1)
            facts[:, len(chunk) :] = 0  # tiles of no tokens, at a place before which there is nothing to read either
            facts[:, : len(chunk)] = (
                (ends - counts)[chunk] + at,
                np.minimum(step, counts[chunk] - at),
                starts[chunk] + at,
                firsts[chunk] * size,
                begins[chunk],
            )

    def work_out(self) -> None:
        """Make what follows from the tables, on the device."""
        self.positions.copy_(self._places.view(1, -1))

"""Tables of a pass of prompts' chunks and single tokens together, at addresses that stay for a CUDA graph.

Everything has one size: rows, wanted logits, tiles, pages. What a pass does not fill is empty: tiles of no tokens, and
rows that repeat the first one, whose results nobody reads.
Legend: N rows, S single tokens, L tiles of prompts, P pages of all tables, W rows whose logits are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outcore.infer.cache.kv_cache import SequencePages
from outcore.infer.cache.tables.rows import FACTS, first_page
from outcore.staging.pool import SmallCopies


@dataclass(frozen=True)
class MixedSize:
    """Room of such tables."""

    rows: int
    singles: int
    tiles: int
    pages: int
    wanted: int
    single_keys: int
    """Keys that a single token sees at most."""


@dataclass(frozen=True)
class ChunkOfPass:
    """Tokens of one sequence in the pass."""

    pages: SequencePages
    start: int
    tokens: Sequence[int]
    num_wanted: int
    """Number of its last tokens whose logits are wanted."""
    is_single: bool
    """Whether each token is a tile of its own."""


class MixedTables:
    """Tables of one size. `tile_tokens`: tokens of a prompt's tile at most."""

    def __init__(
        self,
        size: MixedSize,
        windows: Sequence[int | None],
        page_tokens: int,
        tile_tokens: int,
        copies: SmallCopies,
    ) -> None:
        self.size, self.num_rows, self.tile_tokens = size, size.rows, tile_tokens
        self._windows, self._page_tokens, self._copies = tuple(windows), page_tokens, copies
        of_group = (size.rows, FACTS * size.singles, FACTS * size.tiles, size.pages)
        widths = [size.rows, size.rows, size.wanted, *(of_group * len(self._windows))]
        self._device = torch.zeros(sum(widths), dtype=torch.long, device=copies.device)
        self._host = np.zeros(sum(widths), dtype=np.int64)
        ids, self._places, self.wanted, *rest = self._device.split(widths)
        self.ids, self.positions = ids.view(1, -1), self._places.view(1, -1).clone()
        self.slots, self.pages = rest[0::4], rest[3::4]
        """For each group: the slot of each row's key and value; page numbers of all tables."""
        self.singles = [facts.view(FACTS, -1) for facts in rest[1::4]]
        self.tiles = [facts.view(FACTS, -1) for facts in rest[2::4]]
        """For each group, tiles as the kernel takes them (`attention.tiles`)."""
        self._parts = np.split(self._host, np.cumsum(widths)[:-1])

    def takes(self, chunks: Sequence[ChunkOfPass]) -> bool:
        """Whether these have room."""
        size, page = self.size, self._page_tokens
        singles = [chunk for chunk in chunks if chunk.is_single]
        tiles = sum(-(-len(chunk.tokens) // self.tile_tokens) for chunk in chunks if not chunk.is_single)
        return (
            sum(len(chunk.tokens) for chunk in chunks) <= size.rows
            and sum(len(chunk.tokens) for chunk in singles) <= size.singles
            and max((chunk.start + len(chunk.tokens) for chunk in singles), default=0) <= size.single_keys
            and tiles <= size.tiles
            and sum(-(-(chunk.start + len(chunk.tokens)) // page) for chunk in chunks) <= size.pages
            and sum(chunk.num_wanted for chunk in chunks) <= size.wanted
        )

    def fill(self, chunks: Sequence[ChunkOfPass]) -> None:
        """Put a pass into the tables: on a GPU queued on the current stream."""
        host, ends = self._parts, np.cumsum([len(chunk.tokens) for chunk in chunks])
        host[0][: ends[-1]] = [token for chunk in chunks for token in chunk.tokens]
        positions = [np.arange(chunk.start, chunk.start + len(chunk.tokens)) for chunk in chunks]
        host[1][: ends[-1]] = np.concatenate(positions)
        wanted = [np.arange(end - chunk.num_wanted, end) for chunk, end in zip(chunks, ends, strict=True)]
        host[2][:] = 0
        host[2][: sum(map(len, wanted))] = np.concatenate(wanted)
        for group in range(len(self._windows)):
            self._fill_group(group, chunks, positions)
        for whole in (host[0], host[1], *host[3::4]):  # ids, positions and slots of rows that nobody reads
            whole[ends[-1] :] = whole[0]
        self._copies.into(torch.from_numpy(self._host), self._device)

    def _fill_group(self, group: int, chunks: Sequence[ChunkOfPass], positions: Sequence[np.ndarray]) -> None:
        page_tokens, window = self._page_tokens, self._windows[group]
        slots, singles, tiles, pages = self._parts[3 + 4 * group : 7 + 4 * group]
        facts: dict[bool, list[tuple[int, int, int, int, int]]] = {True: [], False: []}
        row = at = 0
        for chunk, places in zip(chunks, positions, strict=True):
            count, first = len(places), first_page(chunk.start, window, page_tokens)
            table = np.maximum(chunk.pages.tables[group][first : -(-(chunk.start + count) // page_tokens)], 0)
            pages[at : at + len(table)] = table
            slots[row : row + count] = table[places // page_tokens - first] * page_tokens + places % page_tokens
            step = 1 if chunk.is_single else self.tile_tokens
            facts[chunk.is_single] += [
                (row + i, min(step, count - i), chunk.start + i, first * page_tokens, at) for i in range(0, count, step)
            ]
            row, at = row + count, at + len(table)
        for into, found in ((singles, facts[True]), (tiles, facts[False])):
            into[:] = 0  # tiles of no tokens
            if found:
                into.reshape(FACTS, -1)[:, : len(found)] = np.array(found).T

    def work_out(self) -> None:
        """Make what follows from the tables, on the device."""
        self.positions.copy_(self._places.view(1, -1))

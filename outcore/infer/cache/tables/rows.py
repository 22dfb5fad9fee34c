"""Places where the rows of a small pass are stored and what they see, at addresses that stay: a CUDA graph reads
them there.

One small copy to the device fills all tables. Rows beyond those of the pass repeat its first row: they write what it
writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from outcore.infer.cache.kv_cache import SequencePages
from outcore.staging.pool import SmallCopies

FACTS = 5
"""Numbers of a tile: first row, tokens, position of the first, position of its table's first key, the table's start."""


class RowMasks:
    """Masks of the keys that rows see, in memory that tables share: `most_keys` keys of all rows together."""

    def __init__(self, most_keys: int, device: torch.device) -> None:
        self.counted = torch.arange(most_keys, device=device)
        self._kept: dict[tuple, torch.Tensor] = {}

    def take(self, name: tuple, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor [rows, 1, shares, keys] at the one address that this name has."""
        if name not in self._kept:
            self._kept[name] = torch.zeros(len(self.counted) * shape[2], dtype=dtype, device=self.counted.device)
        return self._kept[name][: math.prod(shape)].view(shape)


class RowTables:
    """Tables of `num_rows` rows, each with `num_pages[group]` pages. `windows`: of each group; `masks` None: nobody
    asks what rows see, because a kernel knows by itself."""

    def __init__(
        self,
        num_rows: int,
        num_pages: Sequence[int],
        windows: Sequence[int | None],
        page_tokens: int,
        copies: SmallCopies,
        masks: RowMasks | None,
    ) -> None:
        self._copies, self._masks = copies, masks
        self.num_rows, self.num_pages, self._windows = num_rows, tuple(num_pages), tuple(windows)
        self._page_tokens = page_tokens
        widths = [1, 1, 1, *(width for count in num_pages for width in (1, FACTS, count))]
        sizes = [width * num_rows for width in widths]
        self._device = torch.zeros(sum(sizes), dtype=torch.long, device=copies.device)
        self._host = np.zeros(sum(sizes), dtype=np.int64)
        ids, self._places, self.adapters, *rest = self._device.split(sizes)
        self.ids, self.positions = ids.view(1, -1), self._places.view(1, -1).clone()
        self.wanted = torch.arange(num_rows, device=copies.device)
        """Rows whose logits are wanted: all."""
        self.slots = rest[0::3]
        """For each group, the slot that each row's key and value go to."""
        self.facts = [facts.view(FACTS, num_rows) for facts in rest[1::3]]
        """For each group, every row's tile for the kernel that reads pages (`attention.tiles`)."""
        self.pages = [pages.view(num_rows, -1) for pages in rest[2::3]]
        _, _, _, *of_groups = np.split(self._host, np.cumsum(sizes)[:-1])
        self._host_slots, self._host_pages = of_groups[0::3], [p.reshape(num_rows, -1) for p in of_groups[2::3]]
        self._host_facts = [facts.reshape(FACTS, num_rows) for facts in of_groups[1::3]]
        for facts, count in zip(self._host_facts, num_pages, strict=True):
            facts[0], facts[1], facts[4] = np.arange(num_rows), 1, np.arange(num_rows) * count
        self._known: list[list[tuple[SequencePages | None, int, int]]] = [[(None, 0, 0)] * num_rows for _ in num_pages]
        """For each group, whose pages stand in a row of the table: the sequence's, from and up to which."""
        self.seen: list[torch.Tensor] = []
        """For each group, which keys of its pages each row sees; made, like `positions`, by `work_out`."""
        if masks is not None:
            shapes = [(num_rows, 1, 1, count * page_tokens) for count in num_pages]
            self.seen = [masks.take(("seen", group), shape, torch.bool) for group, shape in enumerate(shapes)]
        self._biases: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def fill(self, rows: Sequence[tuple[SequencePages, int, int]]) -> None:
        """Put rows (pages, position, token) into the tables: on a GPU queued on the current stream."""
        size, num_rows = self._page_tokens, self.num_rows
        whole = [*rows, *[rows[0]] * (num_rows - len(rows))]
        places = np.array([position for _, position, _ in whole])
        self._host[:num_rows] = [token for _, _, token in whole]
        self._host[num_rows : 2 * num_rows] = places
        self._host[2 * num_rows : 3 * num_rows] = [pages.adapter for pages, _, _ in whole]
        for group, window in enumerate(self._windows):
            known, table = self._known[group], self._host_pages[group]
            firsts = np.zeros_like(places) if window is None else np.maximum(places - window + 1, 0) // size
            lasts = places // size
            for at, (pages, first, last) in enumerate(zip((row[0] for row in whole), firsts, lasts, strict=True)):
                if known[at][0] is pages and known[at][1:] == (first, last):
                    continue  # pages are added, never exchanged
                seen = pages.tables[group][first : last + 1]
                table[at] = 0
                table[at, : len(seen)] = np.maximum(seen, 0)  # passed ones are masked
                known[at] = (pages, first, last)
            facts = self._host_facts[group]
            facts[2], facts[3] = places, firsts * size
            self._host_slots[group][:] = table[np.arange(num_rows), lasts - firsts] * size + places % size
        self._copies.into(torch.from_numpy(self._host), self._device)

    def work_out(self) -> None:
        """Make what follows from the tables, on the device."""
        self.positions.copy_(self._places.view(1, -1))
        if self._masks is None:
            return
        at = self._places.view(-1, 1)
        for window, facts, seen in zip(self._windows, self.facts, self.seen, strict=True):
            first = facts[3].view(-1, 1)
            keys, visible = first + self._masks.counted[: seen.shape[-1]], seen.view(self.num_rows, -1)
            torch.le(keys, at, out=visible)
            if window is not None:
                visible &= keys > at - window
        for (group, _, _), bias in self._biases.items():
            self._fill(bias, group)

    def bias(self, group: int, shares: int, dtype: torch.dtype) -> torch.Tensor:
        """[rows, 1, shares, keys]: 0 where a row sees a key, else -inf, the same for the `shares` query heads of a key
        head. Made once a pass: torch's attention would make it of a bool mask again in every layer."""
        key = group, shares, dtype
        assert self._masks is not None
        if key not in self._biases:  # by the slot's first pass, which no graph captures: the address stays
            shape = (self.num_rows, 1, shares, self.seen[group].shape[-1])
            self._biases[key] = self._masks.take(("bias", *key), shape, dtype)
            self._fill(self._biases[key], group)
        return self._biases[key]

    def _fill(self, bias: torch.Tensor, group: int) -> None:
        # The logarithm of 1 and 0: one kernel, where filling and masking would be three.
        torch.log(self.seen[group].expand(bias.shape), out=bias)


def first_page(position: int, window: int | None, page_tokens: int) -> int:
    """Number of the first page that a token at this position sees."""
    return 0 if window is None else max(0, position - window + 1) // page_tokens

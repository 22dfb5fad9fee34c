"""Places where the rows of a small pass are stored and what they see, at addresses that stay: a CUDA graph reads
them there.

One small copy to the device fills all tables. Rows beyond those of the pass repeat its first row: they write what it
writes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from outcore.infer.cache.kv_cache import SequencePages
from outcore.staging.pool import SmallCopies


class RowMasks:
    """What rows see, of tables of all sizes in turn: memory for the largest, `most_keys` keys of all rows together."""

    def __init__(self, most_keys: int, device: torch.device) -> None:
        self.counted = torch.arange(most_keys, device=device)
        self._kept: dict[tuple, torch.Tensor] = {}

    def take(self, name: tuple, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor [rows, 1, shares, keys] at the one address that this name has."""
        if name not in self._kept:
            self._kept[name] = torch.zeros(len(self.counted) * shape[2], dtype=dtype, device=self.counted.device)
        return self._kept[name][: math.prod(shape)].view(shape)


class RowTables:
    """Tables of `num_rows` rows, each with `num_pages[group]` pages. `windows`: of each group."""

    def __init__(
        self,
        num_rows: int,
        num_pages: Sequence[int],
        windows: Sequence[int | None],
        page_tokens: int,
        copies: SmallCopies,
        masks: RowMasks,
    ) -> None:
        self._copies, self._masks = copies, masks
        self.num_rows, self.num_pages, self._windows = num_rows, tuple(num_pages), tuple(windows)
        self._page_tokens = page_tokens
        widths = [1, 1, *(width for count in num_pages for width in (1, 1, count))]
        self._device = torch.zeros(sum(widths) * num_rows, dtype=torch.long, device=copies.device)
        parts = self._device.split([width * num_rows for width in widths])
        ids, self._places, *rest = (part.view(num_rows, -1) for part in parts)
        self.ids, self.positions = ids.view(1, -1), self._places.view(1, -1).clone()
        self.slots = [column.view(-1) for column in rest[0::3]]
        """For each group, the slot that each row's key and value go to."""
        self._firsts, self.pages = rest[1::3], rest[2::3]
        self.seen = [
            masks.take(("seen", group), (num_rows, 1, 1, count * page_tokens), torch.bool)
            for group, count in enumerate(num_pages)
        ]
        """For each group, which keys of its pages each row sees; made, like `positions`, by `work_out`."""
        self._biases: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def fill(self, rows: Sequence[tuple[SequencePages, int, int]]) -> None:
        """Put rows (pages, position, token) into the tables: on a GPU queued on the current stream."""
        size = self._page_tokens
        whole = [*rows, *[rows[0]] * (self.num_rows - len(rows))]
        values = [token for _, _, token in whole] + [position for _, position, _ in whole]
        for group, (window, count) in enumerate(zip(self._windows, self.num_pages, strict=True)):
            firsts, of_rows = [], []
            for pages, position, _ in whole:
                table = pages.tables[group]
                first = first_page(position, window, size)
                seen = table[first : position // size + 1]
                values.append(seen[-1] * size + position % size)
                firsts.append(first * size)
                of_rows += [max(page, 0) for page in seen] + [0] * (count - len(seen))  # passed ones are masked
            values += firsts + of_rows
        self._copies.into(torch.tensor(values), self._device)

    def work_out(self) -> None:
        """Make what follows from the tables, on the device."""
        at = self._places
        self.positions.copy_(at.view(1, -1))
        for window, first, seen in zip(self._windows, self._firsts, self.seen, strict=True):
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

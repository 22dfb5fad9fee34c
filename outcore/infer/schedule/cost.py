"""Seconds of a pass by how many rows it has, as measured, and how many guesses pay by them.

The curve has any shape: flat while weights travel, steps where the CPU computes layers in small passes only, a slope on
a CPU. So it is kept by sizes of passes, and in between in straight lines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection

from outcore.sizing.inference import GRAPH_ROWS

SIZES = GRAPH_ROWS
"""Rows that passes are told apart by; larger ones read prompts."""
LAST_PASSES = 4
"""Passes of a size of which the quickest counts: anything may slow one down."""
FORGOTTEN_AFTER = 512
"""Passes after which a size that did not come again is unknown: a machine throttles, contexts grow."""
ASSUMED_SHARE = 0.05
"""Cost of a row, as a share of a pass of few rows, where nothing larger was measured or measured costs must not
decide."""


LEAST_GAIN = 1.05
"""Gain that guesses must promise: chances and seconds are known roughly."""


class PassCost:
    """Seconds that passes took, each size by the quickest of its last few."""

    def __init__(self) -> None:
        self._by_size: dict[int, deque[tuple[float, int]]] = {}
        """(seconds, rows) of the last passes of a size."""
        self._came: dict[int, int] = {}
        """Number of the last pass of a size."""
        self._passes = 0
        self._rows: list[int] = []
        self._seconds: list[float] = []
        """The curve: its corners."""
        self._told: dict[int, float] = {}

    def add(self, rows: int, seconds: float) -> None:
        """One pass."""
        at = bisect_left(SIZES, rows)
        if at == len(SIZES):
            return
        self._passes += 1
        self._by_size.setdefault(at, deque(maxlen=LAST_PASSES)).append((seconds, rows))
        self._came[at] = self._passes
        for size in [size for size, came in self._came.items() if came < self._passes - FORGOTTEN_AFTER]:
            del self._by_size[size], self._came[size]
        self._told.clear()
        corners = [min(self._by_size[size]) for size in sorted(self._by_size)]
        self._rows, self._seconds = [rows for _, rows in corners], [seconds for seconds, _ in corners]

    def seconds_of(self, rows: int) -> float | None:
        """Seconds of a pass of so many rows; None while nothing is known."""
        if not self._rows:
            return None
        at = bisect_left(self._rows, rows)
        if at == 0:
            return self._seconds[0]
        first, last = (0, at - 1) if at == len(self._rows) else (at - 1, at)
        begun, spread = self._seconds[first], self._rows[last] - self._rows[first]
        slope = (self._seconds[last] - begun) / spread if spread else ASSUMED_SHARE * begun
        if at == len(self._rows):
            return self._seconds[last] + max(0.0, slope) * (rows - self._rows[last])
        return begun + slope * (rows - self._rows[first])

    def worth(self, chances: Collection[float], rows: int = 1) -> int:
        """Choose how many guesses give most tokens a second in a pass that has `rows` rows without them, each for a
        token of an answer. `chances`: of each that it and all before it are right. 0 while it is unknown what that pass
        takes without any, once others were measured: the next one tells."""
        if self._by_size and bisect_left(SIZES, rows) not in self._by_size:
            return 0
        best, best_rate, tokens, most = 0, LEAST_GAIN * rows / self._relative(rows), float(rows), len(chances)
        for count, chance in enumerate(chances, 1):
            tokens += chance
            relative = self._relative(rows + count)
            if (rate := tokens / relative) > best_rate:
                best, best_rate = count, rate
            elif (tokens + chance * (most - count)) / relative <= best_rate:
                break  # later ones are no likelier, and passes get no cheaper
        return best

    def _relative(self, rows: int) -> float:
        if rows not in self._told:  # every answer of a pass asks for the same sizes
            seconds = self.seconds_of(rows)
            self._told[rows] = 1 + ASSUMED_SHARE * (rows - 1) if seconds is None else seconds
        return self._told[rows]

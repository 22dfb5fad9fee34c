"""Passes of answers' next tokens, padded to few sizes: where all layers stay on a GPU, CUDA graphs run them.

A size follows from the pass alone, and a pass is padded whether a graph runs it or not: what finds room on the device
changes no bit. The first pass of a size runs by ordinary launches, which makes what has to be; the second is captured.
Where that fails, which is said, passes go on by ordinary launches."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from outcore.common.errors import line_of
from outcore.flow.layers import GraphPool
from outcore.infer.attention import has_kernel
from outcore.infer.cache import KvCache
from outcore.infer.cache.tables import RowMasks, RowTables
from outcore.infer.passes.graphs import rows_of, table_pages
from outcore.infer.passes.runner import Found
from outcore.infer.schedule import Work
from outcore.sizing.inference import GRAPH_KEYS, GRAPH_ROWS
from outcore.staging.pool import SmallCopies

logger = logging.getLogger(__name__)


@dataclass
class _Size:
    """Passes of one size: their tables, and once captured the graph with its logits."""

    tables: RowTables
    runs: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    logits: torch.Tensor | None = None


class AnswerPasses:
    """Runs passes in which every answer adds one token. `compute`: logits [rows, V] of a pass over these tables, by
    ordinary launches. Use under no_grad, outside of inference mode; `close` when no pass follows."""

    def __init__(
        self, compute: Callable[[RowTables], torch.Tensor], cache: KvCache, copies: SmallCopies, *, is_captured: bool
    ) -> None:
        self._compute, self._cache, self._copies = compute, cache, copies
        self._reads_in_place = has_kernel(copies.device)
        self._masks = None if self._reads_in_place else RowMasks(GRAPH_KEYS, copies.device)
        self._pool = GraphPool(copies.device, gives_back=False) if is_captured else None
        self._sizes = dict[tuple[int, ...], _Size]()

    def run(self, works: Sequence[Work]) -> Found | None:
        """Logits, good until the next pass; None where this is another pass, or too large a one."""
        num_rows = next((rows for rows in GRAPH_ROWS if rows >= len(works)), None)
        if num_rows is None or any(work.count > 1 or not work.start for work in works):
            return None
        pages = table_pages(works, self._cache, reads_in_place=self._reads_in_place)
        settings, key = self._cache.settings, (num_rows, *pages)
        if not self._reads_in_place and num_rows * max(pages) * settings.page_tokens > GRAPH_KEYS:
            return None
        if key not in self._sizes:
            tables = RowTables(num_rows, pages, self._cache.windows, settings.page_tokens, self._copies, self._masks)
            self._sizes[key] = _Size(tables)
        size = self._sizes[key]
        size.tables.fill(rows_of(works))
        if size.runs == 1 and self._pool is not None:
            self._capture(size, self._pool)
        if size.graph is not None:
            size.graph.replay()
        else:
            size.logits = self._compute(size.tables)
        size.runs += 1
        assert size.logits is not None
        return list(zip(works, size.logits.split(1), strict=False))

    def _capture(self, size: _Size, pool: GraphPool) -> None:
        try:
            with pool.capture() as size.graph:
                size.logits = self._compute(size.tables)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            size.graph, self._pool = None, None
            _say_why_not(line_of(error))

    def close(self) -> None:
        """Let graphs and their memory go."""
        had_graphs = any(size.graph is not None for size in self._sizes.values())
        self._sizes.clear()
        if had_graphs:  # torch keeps the memory of a pool for graphs of that pool alone
            self._pool = None
            torch.cuda.empty_cache()


@cache
def _say_why_not(reason: str) -> None:
    logger.warning("rollouts run without CUDA graphs: %s", reason)

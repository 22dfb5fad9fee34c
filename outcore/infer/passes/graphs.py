"""Small passes at fixed addresses: from the second of one size on, CUDA graphs run them, with no Python between layers.

A pass of few tokens (answers being written, guesses, short prompts) is padded to a *slot*: so many rows, each over so
many pages. The first pass of a slot runs by ordinary launches, which compiles what has to be; the second is captured as
it runs, in segments: parts that stay on the device make one graph together, one that travels a graph of its own, bound
to the arrival buffer that it comes to. All graphs share one pool of memory, since they never run at the same time.
Where nothing can be captured (a CPU, pages out of the GPU's reach, a model whose code asks the device) passes run as
before, and `why_not` says so.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from outcore.common.deadline import after
from outcore.common.errors import line_of
from outcore.flow import Flow, HeadInput, Part
from outcore.flow.experts import FewTokens
from outcore.flow.layers import GraphPool
from outcore.infer.attention import (
    LONG_ROWS,
    SINGLE_TOKENS,
    SPLIT_KEYS,
    PagedAttention,
    has_kernel,
)
from outcore.infer.cache import KvCache, SequencePages
from outcore.infer.cache.tables import MixedSize, MixedTables, RowMasks, RowTables, first_page
from outcore.infer.passes.rows import PROMPTS, RowCall, lay_out
from outcore.infer.schedule import Work
from outcore.sizing.inference import GRAPH_KEYS, GRAPH_ROWS
from outcore.staging.pool import SmallCopies

logger = logging.getLogger(__name__)

MAX_SLOTS = 64
"""The least recently used goes: its tables and graphs (about 0.1 MB a layer) do."""
LEAST_PAGES = 16
"""Pages of each row's table where a kernel reads pages in place; then 64, 256 and so on, a graph for each."""
LEAST_READ = 32
"""Tokens of prompts from which on a pass is no pass of single tokens, each of which reads its own context."""
MIXED_ROWS = (*range(128, 1025, 128), 1280, 1536, 1792, 2048, 2560, 3072, 4096)
"""Tokens of a pass of prompts' chunks and single tokens for which graphs are made."""
MIXED_SINGLES, MIXED_KEYS = (64, 128, 384), (1024, 8192, 65536)
"""Single tokens, or rows whose logits are wanted, of such a pass; and keys that a single token may see."""
MIXED_PROMPTS, MIXED_PAGES = PROMPTS, 8192
"""Prompts of such a pass, and pages of all its tables."""
MIXED_STRETCHES = 1 << 14
"""Stretches of context (`SPLIT_KEYS`) of all its single tokens: each keeps sums in fp32 for every head."""
SPAN_KEYS = 1 << 15
"""Keys that all rows may see together (`GRAPH_KEYS`) where a sequence has several, each of which reads its own copy of
the same pages."""


@dataclass
class _Segment:
    """Parts of the pass that run as one."""

    uses: range
    has_code: bool = False
    """Whether it runs by its own code always, because no graph can hold it."""
    addresses: tuple[int, ...] = ()
    graph: torch.cuda.CUDAGraph | None = None


class Handed:
    """Tensors of up to so many rows that outlive a graph: one set for all slots, which never run at the same time. They
    are made by a slot's first pass, which no graph captures, so their addresses stay."""

    def __init__(self, most_rows: int) -> None:
        self.most_rows, self._kept = most_rows, dict[str, torch.Tensor]()

    def keep(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The value [..., rows, width] where the next segment, or who asked for the pass, finds it."""
        rows = value.reshape(-1, value.shape[-1])
        if name not in self._kept:
            self._kept[name] = rows.new_zeros((self.most_rows, rows.shape[1]))
        return self._kept[name][: len(rows)].copy_(rows).view(value.shape)


class SlotPass:
    """A pass of one slot."""

    def __init__(
        self,
        flow: Flow,
        attention: PagedAttention,
        tables: RowTables | MixedTables,
        parts: Sequence[Part],
        handed: Handed,
        has_code: Callable[[Part], bool] = lambda part: False,
    ) -> None:
        self.flow, self.attention, self.tables, self._handed = flow, attention, tables, handed
        self._parts = list(parts)
        self.segments = self._cut(_resident(flow), has_code)
        self._batch = {"input_ids": tables.ids, "position_ids": tables.positions}
        self._log: Any = None
        self._hidden: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None
        self.runs = 0

    @property
    def is_captured(self) -> bool:
        """Whether graphs run all of it."""
        return all(segment.graph is not None or segment.has_code for segment in self.segments)

    def run(self, capture: Callable[[Callable[[], None]], torch.cuda.CUDAGraph] | None) -> torch.Tensor:
        """[rows, V] as the head gives them, good until the next pass. `capture`: makes a graph of a function without
        running it; None: by ordinary launches, unless there are graphs already."""
        arrival = _resident(self.flow)
        replays = self.is_captured
        try:
            arrival.begin(self._parts)
            self.attention.begin([self.tables])
            for segment in self.segments:
                slabs = [arrival.acquire(at, expands=not arrival.stays(self._parts[at])) for at in segment.uses]
                addresses = tuple(slab.data_ptr() for slab in slabs)
                replays = replays and addresses == segment.addresses
                if not replays:
                    segment.graph, segment.addresses = None, addresses
                if capture is not None and segment.graph is None and not segment.has_code:
                    segment.graph = capture(lambda s=segment, w=slabs: self._compute(s, w))
                if segment.graph is not None:
                    segment.graph.replay()
                else:
                    self._compute(segment, slabs)
                for at in segment.uses:
                    arrival.release(at)
        except BaseException as error:
            arrival.abort(after(error))
            raise
        self.runs += 1
        assert self._logits is not None
        return self._logits

    def _compute(self, segment: _Segment, slabs: Sequence[torch.Tensor]) -> None:
        runner, arrival = self.flow.runner, _resident(self.flow)
        self.attention.moved(segment.uses.start - 2, 0)  # graphs before it have run without telling
        for at, slab in zip(segment.uses, slabs, strict=True):
            if arrival.stays(self._parts[at]):
                slab = arrival.expanded(self._parts[at], slab)
            if at == 0:
                self.tables.work_out()
                self._log = runner.embed(slab, self._batch)
                self._hidden, self._log.first = self._log.hidden, None
                self.attention.moved(-1, 0)
            elif at < len(self._parts) - 1:
                assert self._hidden is not None
                self._hidden, _ = runner.layer(at - 1, slab, self._hidden, self._log.call(at - 1))
                self.attention.moved(at - 1, 0)
            else:
                assert self._hidden is not None
                item = HeadInput(self._hidden, self._batch, self._log)
                self._logits = self._handed.keep(
                    "logits", self.flow.head.logits(slab, item, self.tables.wanted, as_made=True)
                )
        if segment is not self.segments[-1]:
            assert self._hidden is not None
            self._hidden = self._handed.keep("hidden", self._hidden)

    def _cut(self, arrival: Any, has_code: Callable[[Part], bool]) -> list[_Segment]:
        """Neighbours that stay go together."""
        segments: list[_Segment] = []
        joins = False
        for at, part in enumerate(self._parts):
            stays = arrival.stays(part)
            if joins and stays:
                segments[-1].uses = range(segments[-1].uses.start, at + 1)
            else:
                segments.append(_Segment(range(at, at + 1), has_code(part)))
            joins = stays
        return segments


def _resident(flow: Flow) -> Any:
    """The flow's arrival, which knows what stays (`ResidentWeights`)."""
    return flow.arrival


class SmallPasses:
    """Small passes of fixed sizes, of up to `most_rows` tokens, `most_mixed` where prompts are among them.
    `is_captured` False: passes of slots run by ordinary launches always (for tests). `experts`: those of a mixture that
    come as they are chosen; None: there are none. `fixed_rows`: all have one size, because rows of another could get
    other bits; None: as few as hold a pass."""

    FIXED_ROWS: ClassVar = 128
    """Rows of each then, in every engine, so that a job and a server agree. While weights are what a pass waits for,
    empty rows cost nothing."""

    def __init__(
        self,
        flow: Flow,
        attention: PagedAttention,
        cache: KvCache,
        device: torch.device,
        *,
        most_rows: int = GRAPH_ROWS[-1],
        most_mixed: int = 0,
        is_captured: bool = True,
        is_on_cpu: Callable[[Part], bool] = lambda part: False,
        experts: FewTokens | None = None,
        fixed_rows: int | None = None,
    ) -> None:
        self.flow, self.attention, self.cache, self.device = flow, attention, cache, device
        self.fixed_rows = fixed_rows
        self._copies = SmallCopies(device)
        self.why_not = ""
        self.capture_s = 0.0
        """Seconds that captures have taken."""
        self.is_first = False
        """Whether the last pass made something that later ones of its size find: its seconds tell nothing of theirs."""
        self._is_captured, self._is_on_cpu, self.experts = is_captured, is_on_cpu, experts
        self._slots: OrderedDict[tuple[int, ...], SlotPass] = OrderedDict()
        self._pool = GraphPool(device, gives_back=False)
        self._reads_in_place = has_kernel(device)
        self._handed, self._most_mixed = Handed(self.fixed_rows or most_rows), most_mixed
        self._masks = None if self._reads_in_place else RowMasks(GRAPH_KEYS, device)
        units = flow.units
        self._parts = [units.embed, *units.layer_units, units.head]
        if cache.memory.device != device:
            self.why_not = "keys and values live where the GPU cannot read them"

    def run(self, works: Sequence[Work]) -> list[tuple[Work, torch.Tensor]] | None:
        """Logits as `PassRunner.run`; None where this is no such pass."""
        self.is_first = False
        if self.why_not or not (self.experts is None or self.experts.is_on):
            return None
        read = sum(work.count for work in works if not work.is_continued(SINGLE_TOKENS))
        if not self._holds_prompts() or (self.fixed_rows is None and read <= LEAST_READ):
            slot = None
        elif self.fixed_rows is None:
            slot = self._mixed(works, MIXED_ROWS, MIXED_SINGLES)
        else:
            return self._run_calls(lay_out(works, self._most_mixed, self.fixed_rows, is_by_place=True))
        if slot is None:
            size = self._size(works) if all(work.is_last for work in works) else None
            if size is None:
                return None
            slot = self._slot(size)
        return self._run_slot(slot, works)

    def _run_calls(self, calls: Sequence[RowCall]) -> list[tuple[Work, torch.Tensor]] | None:
        """Logits of calls that each have one of two sizes, one after another: all weights are here."""
        found, is_first = [], False
        for call in calls:
            works = [work for work, _ in call.works]
            slot = self._mixed(works, (call.padded_rows,), (call.padded_wanted,))
            of_call = None if slot is None else self._run_slot(slot, works)
            if of_call is None:  # what has run is computed again, to the same
                return None
            is_first = is_first or self.is_first
            found += of_call if call is calls[-1] else [(work, logits.clone()) for work, logits in of_call]
        self.is_first = is_first
        return found

    def _run_slot(self, slot: SlotPass, works: Sequence[Work]) -> list[tuple[Work, torch.Tensor]] | None:
        has_all = isinstance(slot.tables, RowTables)
        if isinstance(slot.tables, RowTables):
            slot.tables.fill(rows_of(works))
        else:
            slot.tables.fill(works)
        self.is_first, captured_s = not slot.runs, self.capture_s
        if self.experts is not None:
            self.experts.begin(slot.tables.num_rows)
        try:
            logits = slot.run(self._capture if self._is_captured and slot.runs else None)
        except _CaptureFailed as error:
            self._give_up(str(error))
            return None
        finally:
            if self.experts is not None:
                self.experts.end()
        self.is_first = self.is_first or self.capture_s > captured_s
        found, at = [], 0
        for work in works:
            at += work.count if has_all else work.num_wanted
            if work.is_last:
                found.append((work, logits[at - work.num_wanted : at]))
        return found

    def _holds_prompts(self) -> bool:
        """Whether passes with prompts gain by graphs: where all weights stay and pages are on the device. Elsewhere
        such a pass waits for these, not for launches."""
        cache, arrival = self.cache, _resident(self.flow)
        is_here = self._reads_in_place and not cache.memory.crosses_link and cache.settings.kv_format == "same"
        return (
            is_here and self.attention.most_shares > 0 and self.experts is None and all(map(arrival.stays, self._parts))
        )

    def _mixed(self, works: Sequence[Work], rows: Sequence[int], wanted: Sequence[int]) -> SlotPass | None:
        """The slot, of these sizes, that holds chunks of prompts beside single tokens; None: none does."""
        cache, tile_tokens = self.cache, max(1, LONG_ROWS // self.attention.most_shares)
        most_single = SINGLE_TOKENS if self.fixed_rows is None else None
        size = mixed_size(works, tile_tokens, cache.settings.page_tokens, most_single, rows, wanted)
        if size is None or size.rows > self._most_mixed or size.wanted > self._handed.most_rows:
            return None
        key = (-size.rows, size.wanted, size.single_keys, 0)  # no part is on the CPU
        if key not in self._slots:
            self._keep(key, MixedTables(size, cache.windows, cache.settings.page_tokens, self._copies))
        self._slots.move_to_end(key)
        return self._slots[key]

    def _keep(self, key: tuple[int, ...], tables: RowTables | MixedTables) -> None:
        if len(self._slots) >= MAX_SLOTS:
            self._slots.popitem(last=False)
        self._slots[key] = SlotPass(self.flow, self.attention, tables, self._parts, self._handed, self._has_code)

    def _size(self, works: Sequence[Work]) -> tuple[int, ...] | None:
        """(rows, pages of each group) of the slot that holds these; None: none does."""
        total, sizes = sum(work.count for work in works), GRAPH_ROWS
        if self.fixed_rows is not None:
            sizes = (self.fixed_rows,)
            if not all(work.is_continued(None) for work in works):
                return None  # its attention is another in a pass with prompts
        num_rows = next((count for count in sizes if count >= total), None)
        if num_rows is None or num_rows > self._handed.most_rows:
            return None
        pages = table_pages(works, self.cache, reads_in_place=self._reads_in_place)
        if self._reads_in_place:
            return (num_rows, *pages)
        limit = GRAPH_KEYS if total == len(works) else SPAN_KEYS
        return (num_rows, *pages) if num_rows * max(pages) * self.cache.settings.page_tokens <= limit else None

    def _slot(self, size: tuple[int, ...]) -> SlotPass:
        key = (*size, sum(map(self._is_on_cpu, self._parts)))
        if key not in self._slots:
            settings = self.cache.settings
            tables = RowTables(size[0], size[1:], self.cache.windows, settings.page_tokens, self._copies, self._masks)
            self._keep(key, tables)
        self._slots.move_to_end(key)
        return self._slots[key]

    def _has_code(self, part: Part) -> bool:
        """Whether the CPU computes it in a way that asks the device between."""
        products = self.flow.runner.weights.in_place
        return self._is_on_cpu(part) and not (products is not None and products.takes_all(part))

    def _capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        began = time.perf_counter()
        try:
            with self._pool.capture() as graph:
                function()
        except (RuntimeError, torch.OutOfMemoryError) as error:
            raise _CaptureFailed(line_of(error)) from error
        self.capture_s += time.perf_counter() - began
        return graph

    def forget(self, keeps: Callable[[int, int], bool] = lambda rows, on_cpu: False) -> None:
        """Make passes anew: what they run has changed. `keeps`: by rows and number of parts on the CPU, those that go
        on as they are."""
        for key in [key for key in self._slots if not keeps(key[0], key[-1])]:
            del self._slots[key]
        if not self._slots:  # a pool whose graphs have all gone takes no others
            self._pool = GraphPool(self.device, gives_back=False)

    def _give_up(self, reason: str) -> None:
        self.why_not = reason
        self._slots.clear()
        logger.warning("passes run without CUDA graphs: %s", reason)


class _CaptureFailed(RuntimeError):
    """No graph could be made."""


def rows_of(works: Sequence[Work]) -> list[tuple[SequencePages, int, int]]:
    """(pages, position, token) of every token."""
    rows = []
    for work in works:
        pages = work.sequence.pages
        assert pages is not None
        rows += [(pages, work.start + place, token) for place, token in enumerate(work.tokens)]
    return rows


def table_pages(works: Sequence[Work], cache: KvCache, *, reads_in_place: bool) -> list[int]:
    """Pages of each row, for each group, in the tables of a slot that holds these."""
    page_tokens, found = cache.settings.page_tokens, []
    for window in cache.windows:
        most = max(
            (work.start + place) // page_tokens + 1 - first_page(work.start + place, window, page_tokens)
            for work in works
            for place in {0, work.count - 1}
        )
        if reads_in_place:  # pages that nobody needs are not read
            found.append(max(LEAST_PAGES, 1 << 2 * -(-(most - 1).bit_length() // 2)))
        else:
            found.append(rounded_up(most + (window is not None), fine=cache.memory.crosses_link))
    return found


def mixed_size(
    works: Sequence[Work],
    tile_tokens: int,
    page_tokens: int,
    most_single: int | None = SINGLE_TOKENS,
    rows: Sequence[int] = MIXED_ROWS,
    wanted: Sequence[int] = MIXED_SINGLES,
) -> MixedSize | None:
    """The least size of tables that holds chunks of prompts beside single tokens; None: there is none."""
    singles = [work for work in works if work.is_continued(most_single)]
    counts = (
        (sum(work.count for work in works), rows),
        (max(sum(work.count for work in singles), sum(work.num_wanted for work in works)), wanted),
        (max((work.start + work.count for work in singles), default=1), MIXED_KEYS),
    )
    found = [next((size for size in sizes if size >= count), None) for count, sizes in counts]
    pages = sum(-(-(work.start + work.count) // page_tokens) for work in works)
    if None in found or len(works) - len(singles) > MIXED_PROMPTS or pages > MIXED_PAGES:
        return None
    num_rows, num_wanted, keys = (count or 0 for count in found)
    if num_wanted * keys > MIXED_STRETCHES * SPLIT_KEYS:
        return None
    tiles = num_rows // tile_tokens + MIXED_PROMPTS
    return MixedSize(num_rows, num_wanted, keys, tiles, MIXED_PAGES, tile_tokens, most_single)


def rounded_up(count: int, *, fine: bool = False) -> int:
    """The smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24 ... that is not below; `fine`: of 1 to 16, 18, 20 ... 32, 36 ...,
    where pages that nobody needs would cross the link."""
    power = 1 << max(0, count - 1).bit_length()
    step = max(1, power // (16 if fine else 4))
    return -(-count // step) * step

"""The attention that a model's own layers call: it puts the pass's keys and values into pages and reads all before.

transformers lets an attention function be registered by name. A model whose tokens meet nowhere else runs with all
sequences of a pass in one row, chunks of prompts and single tokens side by side: every other operation looks at one
token. The row is cut into spans here, each with its own pages. Sequences that add the same number of tokens are
attended together; `is_deterministic`: only those padded to the same length, which each one's own length gives, so that
no result depends on what else is in the pass.
Legend: N tokens of the row, H query heads, K key heads, D, E widths of keys and values.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

from outcore.infer.attention.exact import (
    IN_ORDER,
    AttentionRule,
    Piece,
    attend_at_once,
    attend_in_pieces,
    causal_mask,
    is_fused,
)
from outcore.infer.attention.operation import opened, paged_attention
from outcore.infer.attention.rows import attend_rows, read_like
from outcore.infer.attention.tiles import (
    SINGLE_TOKENS,
    attend_mixed,
    attend_tiles,
    cut_in_tiles,
    has_kernel,
    store_rows,
)
from outcore.infer.cache import KvCache, KvShape, KvStore, PassTables, Span, rounded
from outcore.infer.cache.tables import MixedTables, RowTables, first_page
from outcore.model.packed import by_kernel
from outcore.sizing.inference import AttentionLimits, AttentionSize

_numbers = itertools.count()

Site = tuple[int, int]
"""(layer, which of its attentions)."""


@dataclass(frozen=True)
class _Together:
    """Spans of one count that are attended in one product; without a mask a single one, in pieces."""

    spans: list[Span]
    count: int
    rows: torch.Tensor | None = None
    """Rows of the call, on the device."""
    pages: torch.Tensor | None = None
    """[spans, pages], where the pages live."""
    mask: torch.Tensor | None = None


class UnknownAttention(ValueError):
    """The model asks something of its attention that is not known here."""


@dataclass
class _Place:
    """Place that the pass has reached."""

    layer: int = -1
    call: int = 0
    ordinal: int = 0


class PagedAttention:
    """Attention over pages. One thread; `begin` a pass, `moved` after each layer and call, `close` for good."""

    def __init__(
        self,
        cache: KvCache | None,
        *,
        is_deterministic: bool = False,
        limits: AttentionLimits | None = None,
    ) -> None:
        self.number = next(_numbers)
        self.name = f"outcore_paged_{self.number}"
        self.cache, self._is_deterministic, self._limits = cache, is_deterministic, limits or AttentionLimits()
        self._calls: Sequence[PassTables | RowTables | MixedTables] = ()
        self.most_shares = 0
        """Query heads of a key head at most, in attentions that have run."""
        self._place = _Place()
        AttentionInterface.register(self.name, self)
        opened[self.number] = self

    def close(self) -> None:
        """Take the name back from transformers."""
        AttentionInterface._global_mapping.pop(self.name, None)
        opened.pop(self.number, None)

    def begin(self, calls: Sequence[PassTables | RowTables | MixedTables]) -> None:
        """A pass over these rows starts; layer 0 of the first row comes next."""
        self._calls, self._place = calls, _Place(0, 0, 0)

    def moved(self, layer: int, call: int) -> None:
        """Layer `layer` has run on row `call`; -1 for the embedding."""
        place = self._place
        place.ordinal = 0
        place.layer, place.call = (layer, call + 1) if call + 1 < len(self._calls) else (layer + 1, 0)
        if layer < 0:
            place.layer, place.call = 0, 0

    def adapters(self) -> torch.Tensor | None:
        """Adapter of each row of the call that a layer runs on; None: no row has one."""
        return self._calls[self._place.call].adapters if self._calls else None

    def seen(self, size: AttentionSize) -> None:
        """An attention of this size is about to be computed; for who only looks."""

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [B, H, N, D], key [B, K, N, D], value [B, K, N, E] -> [B, N, H, E]; all rows are one here."""
        rule = _rule_of(module, query, scaling, more)
        if len(query) > 1:
            flat = [x.transpose(0, 1).flatten(1, 2) for x in (query, key, value)]
            return self.attend(rule, *flat).unflatten(0, (len(query), -1)), None
        if torch.compiler.is_compiling():  # where the pass is, is looked up when the code runs
            cut = (rule.scaling, rule.window, rule.softcap, rule.sinks_H)
            return paged_attention(query[0], key[0], value[0], self.number, *cut)[None], None
        return self.attend(rule, query[0], key[0], value[0])[None], None

    def attend(
        self, rule: AttentionRule, query_HND: torch.Tensor, key_KND: torch.Tensor, value_KNE: torch.Tensor
    ) -> torch.Tensor:
        """[N, H, E]: the next attention of the layer that is run."""
        site = (self._place.layer, self._place.ordinal)
        self._place.ordinal += 1
        shape = KvShape(key_KND.shape[0], key_KND.shape[2], value_KNE.shape[2])
        is_fused = rule.is_plain and shape.key_width == shape.value_width
        sizes = shape.heads, shape.key_width, shape.value_width
        self.seen(AttentionSize(len(query_HND), *sizes, rule.window, rule.is_plain, is_fused))
        tables = self._calls[self._place.call]
        self.most_shares = max(self.most_shares, len(query_HND) // shape.heads)
        if isinstance(tables, MixedTables):
            assert self.cache is not None
            group = self.cache.group_of(rule.window)
            store = self.cache.store(site, shape, group)
            return attend_mixed(store, group, rule, tables, query_HND, key_KND, value_KNE)
        if isinstance(tables, RowTables):
            assert self.cache is not None
            group = self.cache.group_of(rule.window)
            store = self.cache.store(site, shape, group)
            return attend_rows(store, group, rule, tables, query_HND, key_KND, value_KNE, self._limits)
        return self._attend(site, shape, rule, tables, query_HND, key_KND, value_KNE)

    def _attend(
        self,
        site: Site,
        shape: KvShape,
        rule: AttentionRule,
        tables: PassTables,
        query_HND: torch.Tensor,
        key_KND: torch.Tensor,
        value_KNE: torch.Tensor,
    ) -> torch.Tensor:
        heads, rows, _ = query_HND.shape
        if self.cache is not None and self._reads_in_place(query_HND.device):
            return self._attend_in_place(site, shape, rule, tables, query_HND, key_KND, value_KNE)
        stored = [span for span in tables.spans if span.start > 0]
        output = query_HND.new_zeros((rows, heads, shape.value_width)) if stored else None
        if self.cache is not None:
            group = self.cache.group_of(rule.window)
            store = self.cache.store(site, shape, group)
            used = sum(span.count for span in tables.spans)
            store.write(
                key_KND[:, :used].transpose(0, 1),
                value_KNE[:, :used].transpose(0, 1),
                tables.slots_of(group, store.home),
            )
            if store.is_packed and self._is_deterministic:  # as whoever finds these pages later reads them
                key_KND, value_KNE = rounded(key_KND), rounded(value_KNE)
            for together in self._together(stored, store, group, rule, tables, query_HND):
                assert output is not None
                if together.mask is None:
                    pieces = self._pieces(together.spans[0], store, group, rule, tables, query_HND, key_KND, value_KNE)
                    here = slice(together.spans[0].row, together.spans[0].row + together.count)
                    output[here] = attend_in_pieces(query_HND[:, here], pieces, rule).transpose(0, 1)
                else:
                    self._attend_stored(together, store, rule, query_HND, output)
                    after = self.cache.store_after(site)
                    if after is not None and together.pages is not None:
                        after.read_ahead(together.pages)
        for here, part in self._fresh(tables, rule, query_HND, key_KND, value_KNE):
            if len(part) == rows:
                return part
            if output is None:
                output = query_HND.new_zeros((rows, heads, shape.value_width))  # rows that pad the call stay zero
            output[here] = part
        assert output is not None, "a call without tokens"
        return output

    def _reads_in_place(self, device: torch.device) -> bool:
        """Whether the kernel reads pages where they are. Over the link it would read them again for every few tokens of
        a prompt."""
        assert self.cache is not None
        memory = self.cache.memory
        return memory.device == device and not memory.crosses_link and has_kernel(device)

    def _attend_in_place(
        self,
        site: Site,
        shape: KvShape,
        rule: AttentionRule,
        tables: PassTables,
        query_HND: torch.Tensor,
        key_KND: torch.Tensor,
        value_KNE: torch.Tensor,
    ) -> torch.Tensor:
        """[N, H, E] by the kernel: at most two launches, one for prompts and one for single tokens."""
        assert self.cache is not None
        group, device = self.cache.group_of(rule.window), query_HND.device
        store = self.cache.store(site, shape, group)
        slots = tables.slots_of(group, device)
        used = len(slots)
        store_rows(store, key_KND[:, :used], value_KNE[:, :used], slots)
        heads, rows, _ = query_HND.shape
        output = query_HND.new_empty((rows, heads, shape.value_width))
        output[used:] = 0  # rows that pad the call
        key = "tiles", group, heads // shape.heads
        if key not in tables.plans:
            single = None if self._is_deterministic else SINGLE_TOKENS
            tables.plans[key] = cut_in_tiles(tables, group, rule.window, heads // shape.heads, single, device)
        for tiles in tables.plans[key]:
            attend_tiles(store, rule, tiles, query_HND, output)
        return output

    def _fresh(
        self,
        tables: PassTables,
        rule: AttentionRule,
        query_HND: torch.Tensor,
        key_KND: torch.Tensor,
        value_KNE: torch.Tensor,
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Rows of sequences that begin in this pass, and [n, H, E] of them: neighbours at once where a kernel tells
        them apart, else one after another."""
        if query_HND.is_cuda and is_fused(query_HND, value_KNE.shape[2], rule):
            for here, borders in self._stretches(tables, query_HND.device):
                query, key, value = (x[None, :, here] for x in (query_HND, key_KND, value_KNE))
                yield here, by_kernel(query, key, value, borders, rule.scaling, rule.window)[0]
            return
        for span in tables.spans:
            if span.start == 0:
                here = slice(span.row, span.row + span.count)
                yield here, self._attend_fresh(here, rule, query_HND, key_KND, value_KNE)

    def _stretches(self, tables: PassTables, device: torch.device) -> list[tuple[slice, torch.Tensor]]:
        """Rows of neighbours that begin in this pass, and where each of them ends; made once for all layers."""
        if "fresh" not in tables.plans:
            tables.plans["fresh"] = found = []
            for begins, spans in itertools.groupby(tables.spans, key=lambda span: span.start == 0):
                whole = list(spans)
                ends = [0, *itertools.accumulate(span.count for span in whole)]
                if begins:
                    borders = tables.at(torch.tensor(ends, dtype=torch.int32), device)
                    found.append((slice(whole[0].row, whole[0].row + ends[-1]), borders))
        return tables.plans["fresh"]

    def _attend_fresh(
        self,
        here: slice,
        rule: AttentionRule,
        query_HND: torch.Tensor,
        key_KND: torch.Tensor,
        value_KNE: torch.Tensor,
    ) -> torch.Tensor:
        """[n, H, E] of a sequence that begins in this pass: its keys and values are at hand."""
        query, key, value = query_HND[:, here], key_KND[:, here], value_KNE[:, here]
        count = query.shape[1]

        def whole_mask() -> torch.Tensor:
            zero = torch.zeros(1, dtype=torch.long, device=query.device)
            return causal_mask(zero, count, zero, count, rule.window)

        if not rule.is_plain and query.shape[0] * count * count > self._limits.scores:
            whole = whole_mask()[0, 0]
            step = max(1, self._limits.scores // (query.shape[0] * count))
            cuts = [slice(at, at + step) for at in range(0, count, step)]
            pieces = ((key[:, c].transpose(0, 1), value[:, c].transpose(0, 1), whole[:, c]) for c in cuts)
            return attend_in_pieces(query, pieces, rule).transpose(0, 1)
        mask = whole_mask() if rule.window is not None and rule.window < count else None
        return attend_at_once(query[None], key[None], value[None], mask, rule)[0].transpose(0, 1)

    def _batches(self, spans: list[Span], store: KvStore, rule: AttentionRule, heads: int) -> Iterator[list[Span]]:
        """Spans to be attended together: of one count, of similar length, not too many."""
        limits, width = self._limits, store.shape.width

        def kind(span: Span) -> tuple[int, int]:
            return span.count, self._pages_padded(span, store, rule) if self._is_deterministic else 0

        for _, same in itertools.groupby(sorted(spans, key=lambda s: (*kind(s), s.length)), key=kind):
            batch: list[Span] = []
            for span in same:
                padded = self._pages_padded(span, store, rule) * store.page_tokens * (len(batch) + 1)
                short = batch and self._seen(batch[0], store, rule) * 2 < self._seen(span, store, rule) - 512
                scores = padded * heads * span.count
                if batch and (short or padded * width > limits.gathered or scores > limits.scores):
                    yield batch
                    batch = []
                batch.append(span)
            yield batch

    def _pages_padded(self, span: Span, store: KvStore, rule: AttentionRule) -> int:
        """Pages that a span is attended over: its own, or where results must not depend on others, a size that its own
        length gives."""
        first = first_page(span.start, rule.window, store.page_tokens)
        own = -(-span.length // store.page_tokens) - first
        if not self._is_deterministic or own <= 4:
            return own
        step = 1 << (own.bit_length() - 3)  # a quarter of the largest power of two within
        return -(-own // step) * step

    def _seen(self, span: Span, store: KvStore, rule: AttentionRule) -> int:
        first = first_page(span.start, rule.window, store.page_tokens)
        return span.length - first * store.page_tokens

    def _together(
        self,
        stored: list[Span],
        store: KvStore,
        group: int,
        rule: AttentionRule,
        tables: PassTables,
        query_HND: torch.Tensor,
    ) -> list[_Together]:
        """Which spans are attended together, and where their rows and pages are: the same for all layers of a group,
        so it is worked out and sent to the device once a pass."""
        heads, device = query_HND.shape[0], query_HND.device
        key = (group, heads, store.shape)
        if key not in tables.plans:
            tables.plans[key] = [
                self._indexed(batch, store, group, rule, tables, heads, device)
                for batch in self._batches(stored, store, rule, heads)
            ]
        return tables.plans[key]

    def _indexed(
        self,
        batch: list[Span],
        store: KvStore,
        group: int,
        rule: AttentionRule,
        tables: PassTables,
        heads: int,
        device: torch.device,
    ) -> _Together:
        size, count = store.page_tokens, batch[0].count
        firsts = [first_page(span.start, rule.window, size) for span in batch]
        lasts = [-(-span.length // size) for span in batch]
        most = max(self._pages_padded(span, store, rule) for span in batch)
        limits, keys = self._limits, most * size
        if len(batch) == 1 and (keys * count * heads > limits.scores or keys * store.shape.width > limits.gathered):
            return _Together(batch, count)
        rows = tables.at(torch.tensor([span.row + i for span in batch for i in range(count)]), device)
        pages = [
            tables.pages_of(span, group, first, last, store.home)
            for span, first, last in zip(batch, firsts, lasts, strict=True)
        ]
        starts = tables.at(torch.tensor([span.start for span in batch]), device)
        begins = tables.at(torch.tensor([first * size for first in firsts]), device)
        mask = causal_mask(starts, count, begins, most * size, rule.window)  # hides page 0, which pads short tables
        padded = nn.utils.rnn.pad_sequence(pages, batch_first=True)
        padded = nn.functional.pad(padded, (0, most - padded.shape[1]))
        return _Together(batch, count, rows, padded, mask)

    def _attend_stored(
        self,
        together: _Together,
        store: KvStore,
        rule: AttentionRule,
        query_HND: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Sequences that go on: all their keys and values are in pages now."""
        assert together.rows is not None and together.pages is not None
        heads, batch = query_HND.shape[0], len(together.spans)
        keys, values = read_like(query_HND, store, together.pages)
        query = query_HND[:, together.rows].view(heads, batch, together.count, -1).transpose(0, 1)
        found = attend_at_once(query, keys.transpose(1, 2), values.transpose(1, 2), together.mask, rule)
        output.index_copy_(0, together.rows, found.transpose(1, 2).flatten(0, 1))

    def _pieces(
        self,
        span: Span,
        store: KvStore,
        group: int,
        rule: AttentionRule,
        tables: PassTables,
        query_HND: torch.Tensor,
        key_KND: torch.Tensor,
        value_KNE: torch.Tensor,
    ) -> Iterator[Piece]:
        """Yield in pieces what a sequence sees that is too long for one product. Where no scores have to be kept:
        what stands before the chunk, then the chunk's own keys and values, which are at hand."""
        size, device = store.page_tokens, query_HND.device

        def read(at: int, end: int, most: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            keys, values = read_like(query_HND, store, tables.pages_of(span, group, at, end, store.home))
            return keys[:most], values[:most]

        wide = self._limits.gathered_pages(size * store.shape.width)
        if rule.window is None and is_fused(query_HND, store.shape.value_width, rule):
            last = -(-span.start // size)
            for at in range(0, last, wide):
                yield (*read(at, min(at + wide, last), span.start - at * size), None)
            here = slice(span.row, span.row + span.count)
            yield key_KND[:, here].transpose(0, 1), value_KNE[:, here].transpose(0, 1), IN_ORDER
            return
        first, last = first_page(span.start, rule.window, size), -(-span.length // size)
        start = torch.full((1,), span.start, device=device)
        step = min(wide, max(1, self._limits.scores // (query_HND.shape[0] * span.count * size)))
        for at in range(first, last, step):
            begin, end = torch.full((1,), at * size, device=device), min(at + step, last)
            mask = causal_mask(start, span.count, begin, (end - at) * size, rule.window)[0, 0]
            yield (*read(at, end), mask)


_IGNORED = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_router_logits", "cache_position", "is_causal"}
)
"""Keywords that layers call their attention with and that change nothing here: flags and positions."""


def _rule_of(module: nn.Module, query: torch.Tensor, scaling: float | None, more: dict[str, Any]) -> AttentionRule:
    known = {"sliding_window", "softcap", "s_aux"}
    unknown = [name for name, value in more.items() if name not in known | _IGNORED and value is not None]
    if unknown:
        raise UnknownAttention(f"its attention is called with {', '.join(sorted(unknown))}")
    if more.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnknownAttention("its attention looks ahead")
    window = more.get("sliding_window")
    return AttentionRule(
        query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window if isinstance(window, int) and window > 0 else None,
        more.get("softcap"),
        more.get("s_aux"),
    )

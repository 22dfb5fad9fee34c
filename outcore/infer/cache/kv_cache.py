"""Keys and values of all running sequences, in pages; a sequence has one table of pages for each group of layers.

Layers with the same window are one group: a page number means the same tokens in all of them. Groups with a window give
pages back as soon as no later token can see them. Prompts share full pages with earlier ones (`prefix`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from outcore.infer.cache.kept import KeptPrefixes, KeptStates
from outcore.infer.cache.memory import KvMemory
from outcore.infer.cache.pages import OutOfPages, PageLedger
from outcore.infer.cache.prefix import ROOT, PrefixIndex, PrefixPage, is_root, key_of
from outcore.infer.cache.states import SequenceStates, Snapshots
from outcore.infer.cache.store import KvFormat, KvShape, KvStore
from outcore.staging.pool import SmallCopies

UNLIMITED = 2**31
GONE = -1
"""In a table: a page that the window has passed."""


@dataclass(frozen=True)
class GroupPlan:
    """Room for one group of layers."""

    window: int | None
    """Tokens that a token sees, itself included; None: all before it."""
    num_pages: int


@dataclass
class SequencePages:
    """Pages of one sequence."""

    tables: list[list[int]]
    """For each group, pages in order."""
    adapter: int = 0
    """Number of the adapter that its tokens are computed with; 0: none."""
    num_cached: int = 0
    """Tokens taken from the prefix index when it was opened."""
    parent: bytes = ROOT
    """Key of the last page that was offered to the index."""
    num_offered: int = 0
    states: Any = None
    """State that the model itself keeps of the sequence, beside pages or in place of them."""
    beginning: SequenceStates | None = None
    """States after the tokens that were found when it was opened, where the model has such; whoever runs it copies."""
    cuts: frozenset[int] = frozenset()
    """Page ends at which its states are wanted: where it leaves what is known, and its last one."""
    taken: dict[int, SequenceStates] = field(default_factory=dict)
    """Copies of its states at such places, until their pages are offered to the index."""
    num_read: int = 0
    """Pages that came from the drive when it was opened."""
    is_minor: bool = False
    """Whether what it leaves in the prefix index makes room first."""
    most_shared: int | None = None
    """Tokens whose pages are offered to the index; None: all."""

    def next_cut(self, start: int, end: int) -> int:
        """The next place behind `start` where a chunk ends: a page end at which states are wanted, or `end`."""
        return min((cut for cut in self.cuts if start < cut < end), default=end)

    @property
    def num_pages(self) -> int:
        """Pages that it holds, of all groups."""
        return sum(len(table) - table.count(GONE) for table in self.tables)


@dataclass(frozen=True)
class CacheSettings:
    """Sizes and formats of a cache."""

    groups: tuple[GroupPlan, ...]
    page_tokens: int
    dtype: torch.dtype
    kv_format: KvFormat = "same"
    shares_prefixes: bool = True
    most_snapshots: int | None = None
    """Copies of states that are kept for prompts that begin alike; None: the model has no states."""
    roots: tuple[bytes, ...] = (ROOT,)
    """Key before a prompt's first page, for the base and each adapter: what one has computed is no other's."""


@dataclass
class PrefixCounts:
    """Counts of prompts' tokens, asked for and found in the prefix index, and of its pages."""

    asked_tokens: int = 0
    found_tokens: int = 0
    evicted_pages: int = 0
    read_pages: int = 0
    """Brought back from the drive."""


Site = tuple[int, int]
"""An attention: number of its layer, and which of the layer's it is."""


class KvCache:
    """Keys and values in pages. Stores of single attentions are made when they are first written to. `kept`: where
    shared beginnings go that memory forgets; None: nowhere. `kept_states`: where their states go, if the model has
    some."""

    def __init__(
        self,
        settings: CacheSettings,
        memory: KvMemory | None = None,
        kept: KeptPrefixes | None = None,
        kept_states: KeptStates | None = None,
    ) -> None:
        self.settings, self.memory = settings, memory or KvMemory(torch.device("cpu"))
        self.ledgers = [PageLedger(group.num_pages) for group in settings.groups]
        self.windows = [group.window for group in settings.groups]
        self.index = PrefixIndex(settings.page_tokens) if settings.shares_prefixes else None
        self.snapshots = None if settings.most_snapshots is None else Snapshots(settings.most_snapshots)
        self.counts = PrefixCounts()
        self.stores: dict[Site, KvStore] = {}
        self.group_of_site: dict[Site, int] = {}
        self.kept, self.kept_states, self._is_sealed = kept, kept_states, False

    @property
    def size_bytes(self) -> int:
        return sum(store.size_bytes for store in self.stores.values())

    @property
    def used_pages(self) -> list[int]:
        """Pages in use, for each group; those that only the prefix index holds included."""
        return [ledger.num_pages - ledger.num_free for ledger in self.ledgers]

    def group_of(self, window: int | None) -> int:
        """Number of the group with this window."""
        return self.windows.index(window)

    def store(self, site: Site, shape: KvShape, group: int) -> KvStore:
        """Pages of one attention."""
        if site not in self.stores:
            settings = self.settings
            num_pages = settings.groups[group].num_pages
            self.stores[site] = self.memory.store(
                shape, num_pages, settings.page_tokens, settings.dtype, settings.kv_format
            )
            self.group_of_site[site] = group
            if self._is_sealed and self.kept is not None:
                self.kept.give_up(f"layer {site[0]} has more attentions than were found when the model was opened")
        return self.stores[site]

    def make_stores(self, shapes: Mapping[int | None, Mapping[int, KvShape]]) -> None:
        """Make all layers' pages now. `shapes`: window -> layer -> widths; more must not come where pages are kept."""
        layers = [(layer, shape, window) for window, of in shapes.items() for layer, shape in of.items()]
        for layer, shape, window in sorted(layers, key=lambda found: found[0]):
            self.store((layer, 0), shape, self.group_of(window))
        self._is_sealed = True

    def store_after(self, site: Site) -> KvStore | None:
        """The next attention's of the same group; None behind the last one."""
        sites = [other for other, group in self.group_of_site.items() if group == self.group_of_site[site]]
        at = sites.index(site) + 1
        return self.stores[sites[at]] if at < len(sites) else None

    def most_tokens(self) -> int:
        """Tokens that one sequence could have if it were alone; windows alone set no limit."""
        whole = [ledger for ledger, window in zip(self.ledgers, self.windows, strict=True) if window is None]
        return min((ledger.num_pages * self.settings.page_tokens for ledger in whole), default=UNLIMITED)

    def open(self, tokens: Sequence[int], adapter: int = 0) -> SequencePages:
        """Pages for a new sequence: those that hold its beginning already."""
        root = self.settings.roots[adapter]
        known = self._known(tokens, root)
        while True:
            sequence = SequencePages([[] for _ in self.ledgers], adapter, parent=root)
            if self.index is None:
                return sequence
            try:
                most = self._begun(sequence, tokens, known)
            except BaseException:
                self.close(sequence)  # or its pages would be in use for good
                raise
            if self.snapshots is None or sequence.num_offered == most:
                break
            # A page of the drive's is damaged, or memory has no room for it: its states are of more tokens than that.
            known = known[: sequence.num_offered]
            self.close(sequence)
        sequence.num_cached = sequence.num_offered * self.settings.page_tokens
        self._give_all_passed(sequence, sequence.num_cached)
        self.counts.asked_tokens += len(tokens)
        self.counts.found_tokens += sequence.num_cached
        return sequence

    def _begun(
        self, sequence: SequencePages, tokens: Sequence[int], known: Sequence[tuple[bytes, Sequence[int]]]
    ) -> int:
        """Give a sequence the pages that are known of its beginning; how many it may have at most."""
        assert self.index is not None
        most = len(known) if self.snapshots is None else self._with_states(sequence, tokens, known)
        for page in self.index.find(tokens, sequence.parent)[:most]:
            self._use(sequence, page)
            if self.kept is not None:
                self._keep(page)  # a beginning that came twice may come again
        while sequence.num_offered < most and (page := self._brought(sequence, tokens)) is not None:
            self._use(sequence, page)
            sequence.num_read += 1
            self.counts.read_pages += 1
        return most

    def known_tokens(self, tokens: Sequence[int], adapter: int = 0) -> int:
        """Tokens of the beginning that are kept, in memory or on the drive; nothing counts as used."""
        return len(self._known(tokens, self.settings.roots[adapter])) * self.settings.page_tokens

    def _known(self, tokens: Sequence[int], root: bytes) -> list[tuple[bytes, Sequence[int]]]:
        """Pages of the beginning that memory or the drive has, each as the key of the one before and its tokens."""
        parent, size = root, self.settings.page_tokens
        known: list[tuple[bytes, Sequence[int]]] = []
        if self.index is None:
            return known
        for start in range(0, len(tokens) - size, size):
            own = tokens[start : start + size]
            if self.index.get(parent, own) is None and (self.kept is None or not self.kept.has(parent, own)):
                break
            known.append((parent, own))
            parent = key_of(parent, own)
        return known

    def _with_states(
        self, sequence: SequencePages, tokens: Sequence[int], known: Sequence[tuple[bytes, Sequence[int]]]
    ) -> int:
        """Begin at the last of these pages at whose end states are kept; how many pages that is."""
        assert self.snapshots is not None
        size, count = self.settings.page_tokens, len(known)
        while count and sequence.beginning is None:
            parent, own = known[count - 1]
            key = key_of(parent, own)
            if key not in self.snapshots and self.kept_states is not None:
                states = self.kept_states.read(parent, own, count * size)
                if states is not None:
                    self.snapshots.put(key, states)
            if key in self.snapshots:
                sequence.beginning = self.snapshots.get(key)
            else:
                count -= 1
        ends = {len(known) * size, (len(tokens) - 1) // size * size} if self.snapshots.most else set()
        sequence.cuts = frozenset(end for end in ends if end > count * size)
        return count

    def _use(self, sequence: SequencePages, page: PrefixPage) -> None:
        """Let a sequence have a shared page as its next."""
        for group, ledger in enumerate(self.ledgers):
            ledger.share([page.pages[group]])
            sequence.tables[group].append(page.pages[group])
        sequence.parent = page.key
        sequence.num_offered += 1

    def _brought(self, sequence: SequencePages, tokens: Sequence[int]) -> PrefixPage | None:
        """The sequence's next page from the drive, now in memory and shared; None where it is not to be had."""
        assert self.index is not None and self.kept is not None
        size = self.settings.page_tokens
        start = sequence.num_offered * size
        own = tokens[start : start + size]
        if start + size >= len(tokens) or not self.kept.has(sequence.parent, own):
            return None
        try:
            for group in range(len(self.ledgers)):
                if not self.ledgers[group].num_free:
                    self._evict(group, 1)
        except OutOfPages:
            return None
        contents = self.kept.read(sequence.parent, own, self._page_shapes())
        if contents is None:
            return None
        pages = tuple(ledger.take(1)[0] for ledger in self.ledgers)
        for (site, store), of_store in zip(self.stores.items(), contents, strict=True):
            store.put_page(pages[self.group_of_site[site]], of_store)
        key, is_new = self.index.add(sequence.parent, own, pages)
        if not is_new:  # a collision of hashes
            for ledger, page in zip(self.ledgers, pages, strict=True):
                ledger.give_back([page])
            return None
        return PrefixPage(key, sequence.parent, tuple(own), pages)

    def _page_shapes(self) -> list[list[torch.Tensor]]:
        """For each attention, empty tensors like those of a page."""
        return [store.page_like() for store in self.stores.values()]

    def _keep(self, page: PrefixPage) -> None:
        """Bring a page to the drive, those before it first."""
        assert self.kept is not None and self.index is not None
        chain: list[PrefixPage] = []
        last: PrefixPage | None = page
        while last is not None and not self.kept.has(last.parent, last.tokens):
            chain.append(last)
            last = self.index.by_key(last.parent)
        for page in reversed(chain):
            contents = [
                store.page_contents(page.pages[self.group_of_site[site]]) for site, store in self.stores.items()
            ]
            self.kept.put(page.parent, page.tokens, contents)
        if self.kept_states is not None and self.snapshots is not None and page.key in self.snapshots:
            self.kept_states.put(page.parent, page.tokens, self.snapshots.get(page.key))

    def close_kept(self) -> None:
        """Bring all shared beginnings to the drive, those used last in the end so that they stay longest."""
        if self.kept is not None:
            for page in () if self.index is None else self.index.all():
                self._keep(page)
            self.kept.close()
        if self.kept_states is not None:
            self.kept_states.records.close()

    def extend(self, sequence: SequencePages, length: int) -> None:
        """Have pages for `length` tokens. OutOfPages, and nothing changed, when there are not enough."""
        wanted = -(-length // self.settings.page_tokens)
        missing = [max(0, wanted - len(table)) for table in sequence.tables]
        for group, count in enumerate(missing):
            if count > self.ledgers[group].num_free:
                self._evict(group, count)
        for group, count in enumerate(missing):
            sequence.tables[group] += self.ledgers[group].take(count)

    def settle(self, sequence: SequencePages, tokens: Sequence[int], computed: int) -> None:
        """The first `computed` of `tokens` are stored: full pages may be shared, passed ones go."""
        size = self.settings.page_tokens
        most = computed if sequence.most_shared is None else min(computed, sequence.most_shared)
        while self.index is not None and (sequence.num_offered + 1) * size <= most:
            number = sequence.num_offered
            pages = tuple(table[number] for table in sequence.tables)
            own = tokens[number * size : (number + 1) * size]
            sequence.num_offered += 1
            if GONE in pages or not (is_root(sequence.parent) or sequence.parent in self.index):
                sequence.most_shared = 0  # the window went faster than the pages filled, or room was needed: for good,
                break  # since another may bring the parent back, behind which later pages do not stand
            before = sequence.parent
            sequence.parent, is_new = self.index.add(before, own, pages, is_minor=sequence.is_minor)
            if is_new:
                for ledger, page in zip(self.ledgers, pages, strict=True):
                    ledger.share([page])
            states = sequence.taken.pop(sequence.num_offered * size, None)
            if states is not None and self.snapshots is not None and self.index.get(before, own) is not None:
                going = self.index.by_key(self.snapshots.next_to_go() or ROOT)
                if going is not None and self.kept is not None:
                    self._keep(going)
                self.snapshots.put(sequence.parent, states)
        self._give_all_passed(sequence, computed)

    def close(self, sequence: SequencePages) -> None:
        """Give back all pages of a sequence."""
        for group, table in enumerate(sequence.tables):
            self.ledgers[group].give_back(page for page in table if page != GONE)
        sequence.tables = [[] for _ in self.ledgers]

    def clear_prefixes(self, *, keeps: bool = False) -> None:
        """Forget all shared beginnings. `keeps`: bring them to the drive first, where there is one for them."""
        while self.index is not None and (page := self.index.oldest(lambda page: True)) is not None:
            if keeps and self.kept is not None:
                self._keep(page)
            self._forget(page)

    def _give_all_passed(self, sequence: SequencePages, computed: int) -> None:
        for group, window in enumerate(self.windows):
            if window is not None:
                self._give_passed(sequence, group, (computed - window + 1) // self.settings.page_tokens)

    def _give_passed(self, sequence: SequencePages, group: int, num_passed: int) -> None:
        table = sequence.tables[group]
        for number in range(min(num_passed, len(table)) - 1, -1, -1):
            if table[number] == GONE:
                return
            self.ledgers[group].give_back([table[number]])
            table[number] = GONE

    def _evict(self, group: int, count: int) -> None:
        ledger = self.ledgers[group]
        while ledger.num_free < count and self.index is not None:
            page = self.index.oldest(self._is_idle)
            # A long text alone may fill a window's pages with what has left it, kept for who begins alike.
            going = [page] if page else self.index.deepest(lambda page: ledger.users(page.pages[group]) == 1)
            if not going:
                break
            for page in going:
                if self.kept is not None:
                    self._keep(page)
                self._forget(page)
                self.counts.evicted_pages += 1
        if ledger.num_free < count:
            raise OutOfPages(f"{count} pages wanted, {ledger.num_free} of {ledger.num_pages} free")

    def _is_idle(self, page: PrefixPage) -> bool:
        """Whether only the index holds it."""
        return all(ledger.users(page.pages[group]) == 1 for group, ledger in enumerate(self.ledgers))

    def _forget(self, page: PrefixPage) -> None:
        assert self.index is not None
        self.index.remove(page)
        if self.snapshots is not None:
            self.snapshots.forget(page.key)
        for group, ledger in enumerate(self.ledgers):
            ledger.give_back([page.pages[group]])


@dataclass(frozen=True)
class Span:
    """Tokens of one sequence that go through a pass together."""

    pages: SequencePages
    start: int
    """Tokens of the sequence that are stored already."""
    count: int
    row: int
    """Position at which they begin in the pass's row."""
    is_answer: bool = False
    """Whether they stand behind the prompt."""

    @property
    def length(self) -> int:
        """Tokens stored once they are through."""
        return self.start + self.count


@dataclass
class PassTables:
    """Places where a pass reads and writes, made once for all layers of a group."""

    spans: list[Span]
    page_tokens: int
    copies: SmallCopies
    slots: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict)
    tables: dict[tuple[int, int, int, torch.device], torch.Tensor] = field(default_factory=dict)
    plans: dict[Any, list[Any]] = field(default_factory=dict)
    """Results that attention works out once for all layers of a group."""
    num_rows: int | None = None
    """Rows of the call, those that nobody reads included; None: those of the spans."""

    @cached_property
    def adapters(self) -> torch.Tensor | None:
        """Adapter of each row; None: none has one."""
        if not any(span.pages.adapter for span in self.spans):
            return None
        rows = [span.pages.adapter for span in self.spans for _ in range(span.start, span.length)]
        return self.copies.to(torch.tensor(rows + [0] * ((self.num_rows or 0) - len(rows)), dtype=torch.long))

    def slots_of(self, group: int, home: torch.device) -> torch.Tensor:
        """For every row of the pass, the slot that its key and value go to."""
        key = (group, home)
        if key not in self.slots:
            size, slots = self.page_tokens, []
            for span in self.spans:
                table = span.pages.tables[group]
                slots += [table[p // size] * size + p % size for p in range(span.start, span.length)]
            self.slots[key] = self.at(torch.tensor(slots, dtype=torch.long), home)
        return self.slots[key]

    def pages_of(self, span: Span, group: int, first: int, last: int, home: torch.device) -> torch.Tensor:
        """Pages `first` to `last` - 1 of a span's sequence."""
        key = (span.row, group, first, home)
        if key not in self.tables or len(self.tables[key]) != last - first:
            pages = [max(page, 0) for page in span.pages.tables[group][first:last]]  # passed ones are masked
            self.tables[key] = self.at(torch.tensor(pages, dtype=torch.long), home)
        return self.tables[key]

    def at(self, values: torch.Tensor, home: torch.device) -> torch.Tensor:
        """Numbers of the CPU's, where they are used."""
        return values if home.type == "cpu" else self.copies.to(values)

"""Full pages by the tokens that led to them, so that prompts with the same beginning are computed once.

A page is found by a chain of hashes over all tokens up to its end, and its own tokens are compared before it is used: a
collision costs a miss, never a wrong answer. The index is one more user of each page; pages that nobody else uses go
when room is needed: first those that came once only, as a title's or a summary's do, then those that were asked for
again, as a conversation's are; of either the least recently used first."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

ROOT, ROOT_BYTES = b"", 8
"""Before the first page; with an adapter a key of so many bytes (`root_of`)."""
MOST_AGAIN = 0.8
"""Share of pages that are held as asked for again; beyond it they go first: a conversation that is over makes room
for a new one."""


@dataclass(frozen=True)
class PrefixPage:
    """One full page in every group of layers."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    """Page in each group."""


class PrefixIndex:
    """Pages by the tokens that they hold; use counts are the caller's (`KvCache`)."""

    def __init__(self, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self._pages: dict[bytes, PrefixPage] = {}
        self._once: OrderedDict[bytes, None] = OrderedDict()
        self._again: OrderedDict[bytes, None] = OrderedDict()
        """Pages by how often they were asked for, least recently used first."""
        self._followers: dict[bytes, dict[bytes, None]] = {}
        """Pages right behind each."""

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, key: object) -> bool:
        return key in self._pages

    def by_key(self, key: bytes) -> PrefixPage | None:
        """The page of this name."""
        return self._pages.get(key)

    def all(self) -> list[PrefixPage]:
        """Every page, in the order in which they go."""
        return [self._pages[key] for key in (*self._once, *self._again)]

    def get(self, parent: bytes, tokens: Sequence[int]) -> PrefixPage | None:
        """The page with these tokens behind `parent`."""
        own = tuple(tokens)
        page = self._pages.get(key_of(parent, own))
        return page if page is not None and page.tokens == own and page.parent == parent else None

    def used(self, page: PrefixPage) -> None:
        """Note that a page was asked for again just now."""
        self._once.pop(page.key, None)
        self._again[page.key] = None
        self._again.move_to_end(page.key)

    def find(self, tokens: Sequence[int], root: bytes = ROOT) -> list[PrefixPage]:
        """The longest chain of pages that hold the beginning of `tokens`, and never all of them: the last token must
        be computed to know what follows."""
        found: list[PrefixPage] = []
        parent, size = root, self.page_tokens
        for start in range(0, len(tokens) - size, size):
            page = self.get(parent, tokens[start : start + size])
            if page is None:
                break
            found.append(page)
            parent = page.key
        for page in reversed(found):  # a chain goes from its end
            self.used(page)
        return found

    def add(
        self, parent: bytes, tokens: Sequence[int], pages: tuple[int, ...], *, is_minor: bool = False
    ) -> tuple[bytes, bool]:
        """(key of this page, whether it is new here). `is_minor`: it goes before all others."""
        own = tuple(tokens)
        key = key_of(parent, own)
        known = self._pages.get(key)
        if known is not None and (known.tokens != own or known.parent != parent):
            return key, False  # a collision: the first one stays
        if known is None:
            self._pages[key], self._once[key] = PrefixPage(key, parent, own, pages), None
            self._once.move_to_end(key, last=not is_minor)
            self._followers.setdefault(parent, {})[key] = None
        return key, known is None

    def oldest(self, is_idle: Callable[[PrefixPage], bool]) -> PrefixPage | None:
        """The first page to go, with nothing behind it and that is idle: a chain goes from its end."""
        first, then = self._once, self._again
        if len(then) > MOST_AGAIN * len(self._pages):
            first, then = then, first
        ends = (self._pages[key] for keys in (first, then) for key in keys if key not in self._followers)
        return next(filter(is_idle, ends), None)

    def deepest(self, truth: Callable[[PrefixPage], bool]) -> list[PrefixPage]:
        """A page of which this is true, late in its chain, behind all that stand behind it; none: it is of none."""
        late_first = (self._pages[key] for key in chain(reversed(self._once), self._again))
        found = list(islice(filter(truth, late_first), 1))
        for one in found:
            found += (self._pages[key] for key in self._followers.get(one.key, ()))
        return found[::-1]

    def remove(self, page: PrefixPage) -> None:
        """Forget a page."""
        del self._pages[page.key]
        (self._once if page.key in self._once else self._again).pop(page.key)
        del self._followers[page.parent][page.key]
        if not self._followers[page.parent]:
            del self._followers[page.parent]


def root_of(adapter: str) -> bytes:
    """Key before the first page of prompts that this adapter reads: shorter than any page's key."""
    return hashlib.blake2b(adapter.encode(), digest_size=ROOT_BYTES).digest()


def is_root(key: bytes) -> bool:
    """Whether no page is called so: a prompt begins behind it."""
    return len(key) <= ROOT_BYTES


def key_of(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Name of the page with these tokens behind the page `parent`."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()

"""Ledger of pages of keys and values, and of their users: pages have one size, so no free one is too small to use.

A page may have several users (answers that share a prompt, the prefix index); it is free again when the last one gives
it back. Shared pages are full and never written to again, so no user sees another."""

from __future__ import annotations

from collections.abc import Iterable


class OutOfPages(RuntimeError):
    """No page is free. The scheduler makes room or waits; never a user's error by itself."""


class PageLedger:
    """Pages 0 to `num_pages` - 1 of one group of layers."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._users = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def users(self, page: int) -> int:
        """Count the users of this page."""
        return self._users[page]

    def take(self, count: int) -> list[int]:
        """Pages with one user, contents undefined. OutOfPages, and none taken, when fewer are free."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add a user to each of these pages."""
        for page in pages:
            assert self._users[page] > 0, "a free page cannot be shared"
            self._users[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """Take a user from each of these pages."""
        for page in pages:
            assert self._users[page] > 0, "a free page was given back"
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)

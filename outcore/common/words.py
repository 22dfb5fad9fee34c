"""The nearest of the spellings that are known, for messages about one that is not."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.5) -> list[str]:
    """The closest known spellings, best first, whatever their case; none below `cutoff` (0: anything, 1: equal)."""
    by_lower = {name.lower(): name for name in known}
    return [by_lower[name] for name in difflib.get_close_matches(word.lower(), by_lower, n=count, cutoff=cutoff)]


def did_you_mean(word: str, known: Iterable[str], count: int = 3) -> str:
    """' Did you mean ...?', or '' when nothing is close."""
    close = nearest(word, known, count)
    return f" Did you mean {', '.join(map(repr, close))}?" if close else ""

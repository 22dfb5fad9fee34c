"""What can be wrong with data, in words: every message says what happened, where, why, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outcore.common import words


class DataError(ValueError):
    """The data, or a setting that describes it, cannot be used; the message names the file and the way out."""


class TemplateError(DataError):
    """The chat template cannot tell which tokens the assistant wrote; a fault of the tokenizer, not of one row."""


class CacheError(DataError):
    """The token cache cannot be written, read or locked (read-only folder, full drive, another process stuck)."""


def nearest(name: str, candidates: Iterable[str]) -> str:
    """' (nearest: X)' when one of the candidates looks like a misspelling of `name`, else ''."""
    found = words.nearest(name, candidates)
    return f" (nearest: {found[0]!r})" if found else ""


def common_beginning(texts: Sequence[str]) -> str:
    """The longest text that all of them begin with; "" of none."""
    shortest, longest = (min(texts), max(texts)) if texts else ("", "")  # in alphabetical order: others lie between
    same = next((i for i, (a, b) in enumerate(zip(shortest, longest)) if a != b), min(len(shortest), len(longest)))
    return shortest[:same]


def shorten(text: str, limit: int = 120) -> str:
    """One line of at most `limit` characters, for quoting bad input in a message."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."

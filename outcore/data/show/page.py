"""Rows as one HTML page without scripts: tokens that bear loss are coloured, each tells its number when pointed at.

One sample with its loss mask, as text for people: what is between ⟦ and ⟧ is what the model learns to write."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from outcore.common.output import printable
from outcore.data.layout import IGNORE_INDEX

_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
:root {{ color-scheme: light dark; --loss: #b7e4c7; --line: #8886; }}
@media (prefers-color-scheme: dark) {{ :root {{ --loss: #1b5e3b; }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; }} td {{ padding: .1rem 1rem .1rem 0; vertical-align: top; }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); padding: .8rem; }}
pre span {{ border-right: 1px solid var(--line); }} .l {{ background: var(--loss); }} h2 {{ font-size: 1rem; }}
</style>
<h1>{title}</h1>
<p>Coloured tokens bear loss: the model learns to write them. All others it is given.</p>
"""


def write_page(
    path: Path, title: str, lines: Sequence[str], rows: Sequence[tuple[str, Any, Any]], tokenizer: Any
) -> None:
    """The page of some rows: (heading, token ids [n], bears loss bool [n]) each, below lines of text."""
    parts = [_HEAD.format(title=html.escape(title)), "<ul>"]
    parts += [f"<li>{html.escape(line)}</li>" for line in lines]
    parts.append("</ul>")
    for heading, ids, has_loss in rows:
        spans = "".join(_span(*piece) for piece in pieces_of(tokenizer, np.asarray(ids), np.asarray(has_loss, bool)))
        parts.append(f"<h2>{html.escape(heading)}</h2>\n<pre>{spans}</pre>")
    page = "\n".join([*parts, "</html>\n"])
    path.write_text(page, encoding="utf-8", errors="backslashreplace")  # a file's name may be no UTF-8


def pieces_of(tokenizer: Any, ids: np.ndarray, has_loss: np.ndarray) -> Iterator[tuple[str, list[int], bool]]:
    """(text, token ids, bears loss) a token; tokens that only together make a character share one.

    `ids`: token ids [n]; `has_loss`: bool [n]."""
    start = 0
    for end in range(1, len(ids) + 1):
        text = str(tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=False))
        if text.endswith("\ufffd") and end < len(ids) and end - start < 8 and has_loss[end] == has_loss[start]:
            continue
        yield text, ids[start:end].tolist(), bool(has_loss[start])
        start = end


def _span(text: str, ids: Sequence[int], bears_loss: bool) -> str:
    name = ' class="l"' if bears_loss else ""
    return f'<span{name} title="{" ".join(map(str, ids))}">{html.escape(text)}</span>'


MAX_RUN_CHARS = 600


def render_sample(
    tokenizer: Any,
    input_ids: Any,
    labels: Any,
    *,
    max_run_chars: int = MAX_RUN_CHARS,
    brackets: tuple[str, str] = ("⟦", "⟧"),
) -> str:
    """The tokens of one row or document decoded, runs that carry loss in brackets, long runs shortened in the middle.

    `input_ids`, `labels`: 1-D, of one length, labels not shifted, -100 = no loss."""
    ids, has_loss = np.asarray(input_ids), np.asarray(labels) != IGNORE_INDEX
    if ids.shape != has_loss.shape or ids.ndim != 1:
        raise ValueError(f"input_ids and labels must be 1-D and of one length, got {ids.shape} and {has_loss.shape}")
    if len(ids) == 0:
        return ""
    borders = [0, *(np.flatnonzero(np.diff(has_loss)) + 1).tolist(), len(ids)]
    parts = []
    for start, end in pairwise(borders):
        decoded = str(tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=False))
        text = printable(_shortened(decoded, max_run_chars))
        parts.append(f"{brackets[0]}{text}{brackets[1]}" if has_loss[start] else text)
    return "".join(parts)


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"

"""Rows as one HTML page without scripts: tokens that bear loss are coloured, each tells its number when pointed at."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

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
    path.write_text("\n".join([*parts, "</html>\n"]), encoding="utf-8")


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

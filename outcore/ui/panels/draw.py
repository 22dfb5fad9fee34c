"""HTML of what the routes tell: tables, bars, graphs. Text is escaped here; numbers get their units here."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from markdown_it import MarkdownIt

from outcore.common.quantities import GB, format_gb, format_gib, format_s

COLORS = tuple(f"var(--oc-{number})" for number in range(1, 8))
TIER_NAMES = {"vram": "VRAM", "ram": "RAM", "nvme": "Drive"}
LARGEST_PARTS = 6
MARKDOWN_CHARS, TABLE_CELLS = 1 << 15, 4000
"""Longer answers are shown as plain text, and what may become a larger table as its lines: drawing would take seconds,
again and again while the answer is written."""
LINKS_TO = ("http://", "https://", "mailto:")


def page(*parts: str) -> str:
    """Parts of a panel's HTML."""
    return f'<div class="oc">{"".join(parts)}</div>'


def text(value: Any) -> str:
    """Escaped."""
    return html.escape(str(value))


@lru_cache(maxsize=64)
def markdown(words: str) -> str:
    """Turn a model's words into HTML: only what Markdown itself can say. HTML in them is text, pictures are links."""
    if len(words) > MARKDOWN_CHARS:
        return f'<div class="text">{text(words)}</div>'
    lines = [line.count("|") for line in words.splitlines()]
    most_cells = max(lines, default=0) * sum(map(bool, lines))  # a short row is filled up to its table's width
    return _markdown(most_cells <= TABLE_CELLS).render(words)


@lru_cache
def _markdown(with_tables: bool) -> MarkdownIt:
    reader = MarkdownIt("commonmark", {"html": False, "breaks": True}).enable("strikethrough")
    if with_tables:
        reader.enable("table")
    reader.disable("image")  # a browser fetches pictures unasked
    reader.validateLink = lambda url: url.lower().startswith(LINKS_TO)
    reader.add_render_rule("link_open", _link_open)
    reader.add_render_rule("fence", _fence)
    return reader


def _link_open(renderer: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
    return f'<a href="{text(tokens[index].attrGet("href"))}" target="_blank" rel="noopener noreferrer">'


def _fence(renderer: Any, tokens: Any, index: int, options: Any, env: Any) -> str:
    code = tokens[index].content
    return f'<div class="code">{copy_button(code)}<pre tabindex="0"><code>{text(code)}</code></pre></div>'


def copy_button(words: str) -> str:
    """A button that puts these words into the clipboard; the page's own script listens."""
    return f'<button type="button" class="oc-copy" data-text="{text(words)}">Copy</button>'


def paragraph(words: str, kind: str = "") -> str:
    """A sentence; kind: '', dim, note, bad, good, big."""
    role = ' role="alert"' if kind == "bad" else ""
    return f'<p class="{kind}"{role}>{text(words)}</p>' if words else ""


def refused(words: str) -> str:
    """Draw a route's refusal, with a button that dismisses it."""
    return (
        f'<div class="oc" role="alert"><p>{text(words)}</p><button type="button" aria-label="Dismiss">✕</button></div>'
    )


def command(label: str, words: str) -> str:
    """Lines to copy into a terminal or a file."""
    return page(
        f'<div class="code">{copy_button(words)}<b>{text(label)}</b><pre tabindex="0">{text(words)}</pre></div>'
    )


def said(words: str, kind: str = "") -> str:
    """A panel's HTML that is one sentence."""
    return page(paragraph(words, kind))


def heading(words: str) -> str:
    return f"<h3>{text(words)}</h3>"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], numbers: Sequence[int] = ()) -> str:
    """Columns in `numbers` are set to the right."""

    def cells(row: Sequence[Any], tag: str) -> str:
        return "".join(
            f"<{tag}{' class=n' if i in numbers else ''}>{text('' if cell is None else cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    top = f"<thead><tr>{cells(head, 'th')}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def console(lines: Sequence[str]) -> str:
    """Draw the lines that a command printed, scrolled to their end."""
    return (
        f'<pre class="newest" tabindex="0">{text(chr(10).join(lines))}</pre>'
        if lines
        else paragraph("Nothing yet.", "dim")
    )


def amount(tier: str, num_bytes: float) -> str:
    """Drives count in GB, memory in GiB."""
    return format_gb(int(num_bytes)) if tier == "nvme" else format_gib(int(num_bytes))


def number(value: Any, digits: int = 3) -> str:
    """A figure, '-' for none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    return f"{value:.{digits}g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:,.0f}"


def seconds(value: float | None) -> str:
    return "-" if value is None or not math.isfinite(value) else format_s(value)


def rate(gb_per_s: float) -> str:
    """Speed of a link or drive."""
    return f"{format_gb(gb_per_s * GB)}/s"


def in_unit(unit: str) -> Callable[[float], str]:
    """Make the function that writes a figure with this unit."""
    return lambda value: f"{number(value)}{unit}"


def tier_bar(tier: str, parts: Mapping[str, float], used: float, capacity: float) -> str:
    """One tier's parts, stacked against what it can hold."""
    largest = sorted(((size, name) for name, size in parts.items() if size > 0), reverse=True)
    shown = largest[:LARGEST_PARTS]
    rest = used - sum(size for size, _ in shown)
    if rest > 0.005 * max(used, 1):
        shown.append((rest, "all else and reserves" if tier != "nvme" else "all else and safety factor"))
    whole = max(used, capacity, 1)
    pieces = "".join(
        f'<i style="width:{100 * size / whole:.2f}%;background:{color}" title="{text(name)}"></i>'
        for (size, name), color in zip(shown, COLORS)
    )
    limit = f'<b style="left:{100 * capacity / whole:.2f}%"></b>' if capacity and used > capacity else ""
    keys = "".join(
        f'<span><i style="background:{color}"></i>{text(name)} {amount(tier, size)}</span>'
        for (size, name), color in zip(shown, COLORS)
    )
    over = f", {amount(tier, used - capacity)} short" if used > capacity else ""
    title = f"{TIER_NAMES[tier]}: {amount(tier, used)} of {amount(tier, capacity)}{over}"
    kind = "bad" if over else ""
    return (
        f'<p class="{kind}"><b>{text(title)}</b></p><div class="bar" role="img" aria-label="{text(title)}">'
        f'{pieces}{limit}</div><div class="keys">{keys}</div>'
    )


def fill_bar(share: float, words: str) -> str:
    """Draw a progress bar that is filled by `share` (0 to 1), with words beneath."""
    width = 100 * min(1.0, max(0.0, share))
    return (
        f'<div class="bar" role="progressbar" aria-valuenow="{width:.0f}" aria-valuemin="0" aria-valuemax="100" '
        f'aria-label="{text(words)}"><i style="width:{width:.1f}%;background:var(--oc-1)"></i></div>'
        f"<p class=dim>{text(words)}</p>"
    )


def chart(
    title: str,
    xs: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    told: Callable[[float], str] = number,
    axis: str = "step",
) -> str:
    """Lines over a common axis; the newest figures and both ends of the axes in words. Empty without two points.

    A line alone may be called ''."""
    lines = {name: [(x, y) for x, y in zip(xs, ys) if y is not None] for name, ys in series.items()}
    lines = {name: points for name, points in lines.items() if points}
    if not lines or max(len(points) for points in lines.values()) < 2:
        return ""
    ys = [y for points in lines.values() for _, y in points]
    low, high = min(ys), max(ys)
    left, right = min(p[0][0] for p in lines.values()), max(p[-1][0] for p in lines.values())
    paths = "".join(
        f'<path d="{_path(points, left, right, low, high)}" stroke="{color}"/>'
        for points, color in zip(lines.values(), COLORS)
    )
    latest = {name: told(points[-1][1]) for name, points in lines.items()}
    keys = "".join(
        f'<span><i style="background:{color}"></i>{text(f"{name} {value}")}</span>'
        for (name, value), color in zip(latest.items(), COLORS)
        if name
    )
    label = f"{title}: {', '.join(f'{n} {v}'.strip() for n, v in latest.items())} now, from {told(low)} to {told(high)}"
    return (
        f'<div class="chart"><div class="head"><b>{text(title)}</b><span>{text(latest.get("", ""))}</span></div>'
        f'<div class="plot"><span class="high">{text(told(high))}</span><span class="low">{text(told(low))}</span>'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img" aria-label="{text(label)}">{paths}</svg>'
        "</div>"
        f'<div class="ends"><span>{number(float(left))}</span><span>{text(axis)}</span>'
        f"<span>{number(float(right))}</span></div><div class=keys>{keys}</div></div>"
    )


def charts(*parts: str) -> str:
    """Graphs side by side."""
    return f'<div class="grid">{"".join(parts)}</div>' if any(parts) else ""


def _path(points: Sequence[tuple[float, float]], left: float, right: float, low: float, high: float) -> str:
    width, tall = (right - left) or 1, (high - low) or 1
    at = [f"{100 * (x - left) / width:.2f} {95 - 90 * (y - low) / tall:.2f}" for x, y in points]
    return "M" + "L".join(at)

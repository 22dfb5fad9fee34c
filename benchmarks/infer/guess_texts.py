"""Texts for guesses.py, in a form in which a model of 135 M does what is asked: what was there, then the head of what
it became. Asked in words it talks about the file, or repeats itself, which says nothing of edits.

Edits change a name, two values, a date; summaries keep the article's sentences; a list becomes a table. Stories are
drawn at temperature 1: the likeliest story of a small model goes in circles, which is easy to guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CODE = (Path(__file__).resolve().parents[2] / "outcore" / "common" / "words.py").read_text()
SHOP = """[server]
host = "127.0.0.1"
port = 8080
workers = 4
timeout_seconds = 30

[database]
address = "postgres://localhost/shop"
pool_size = 12
retries = 3

[logging]
level = "info"
folder = "/var/log/shop"
keep_days = 14

[mail]
sender = "orders@example.com"
smtp_host = "mail.example.com"
smtp_port = 587

[payment]
provider = "stripe"
currency = "EUR"
sandbox = true
"""
ARTICLE = (
    "The lighthouse at Cape Verity was built in 1871 by the harbour commission of Port Almeida. Its first keeper, "
    "Thomas Hale, lived there for thirty-one years and wrote down the weather every morning and every evening. His "
    "notebooks, forty-four in number, were found in 1998 behind a wall of the boiler room. Researchers of the "
    "University of Almeida have compared his entries with modern records. They found that the sea near the cape has "
    "become warmer by one and a half degrees since 1880. They also found that heavy storms come two weeks earlier "
    "in the year than they did in his time. The notebooks are now kept in the museum of the harbour, where visitors "
    "may read copies of every page. Next year the museum will publish all of them on its web site."
)
ITEMS = (
    "apples, 3 kg, 4.50",
    "bread, 2 loaves, 5.20",
    "milk, 4 bottles, 6.00",
    "olive oil, 1 bottle, 9.80",
    "tomatoes, 2 kg, 5.60",
    "cheese, 500 g, 7.90",
    "rice, 3 kg, 6.30",
    "coffee, 1 kg, 14.00",
    "oranges, 5 kg, 8.75",
    "butter, 3 packs, 6.60",
    "flour, 2 kg, 2.40",
    "sugar, 1 kg, 1.50",
)


@dataclass(frozen=True)
class Asked:
    """A text to go on with; `is_chat`: a question instead."""

    text: str
    is_chat: bool = False
    temperature: float = 0.0


def _edit(before: str, change: str, head: str, kind: str) -> str:
    return f"File before the change:\n```{kind}\n{before}```\n\nFile after the change ({change}):\n```{kind}\n{head}"


def texts() -> dict[str, Asked]:
    """Each by its name."""
    renamed = CODE.replace("did_you_mean", "suggestion")
    changed = SHOP.replace("timeout_seconds = 30", "timeout_seconds = 60")
    rows = [f"| {item.replace(', ', ' | ')} |" for item in ITEMS]
    listed = (
        "Shopping list:\n"
        + "\n".join(ITEMS)
        + "\n\nThe same list as a table:\n\n| item | amount | price |\n|---|---|---|\n"
    )
    dates = "The same text with British dates (in the year 1871 instead of in 1871)"
    return {
        "edit: code": Asked(
            _edit(CODE, "did_you_mean is called suggestion now", renamed[: renamed.index("def nearest")], "python")
        ),
        "edit: settings": Asked(
            _edit(
                SHOP,
                "timeout_seconds is 60 now, keep_days is 30",
                changed[: changed.index("pool_size")],
                "toml",
            )
        ),
        "edit: text": Asked(
            f"Original text:\n{ARTICLE}\n\n{dates}:\nThe lighthouse at Cape Verity was built in the year 1871 by the "
            "harbour commission"
        ),
        "edit: list": Asked("Shopping list:\n" + listed + "\n".join(rows[:4]) + "\n"),
        "summary: in its words": Asked(
            f"{ARTICLE}\n\nA summary that keeps the words of the article: {ARTICLE[: ARTICLE.index(' lived')]}"
        ),
        "summary: asked for": Asked(f"Summarise this article in four sentences:\n\n{ARTICLE}", is_chat=True),
        "story: lighthouse": Asked(
            "Write a story about a lighthouse keeper who finds a strange machine on the beach.", True, 1.0
        ),
        "story: brothers": Asked("Write a short tale about two brothers who sail to an island in a storm.", True, 1.0),
    }

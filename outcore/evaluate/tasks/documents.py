"""Documents of our own tasks, made from what every Python brings: the same on every machine with the same Python.

Endings: sentences of the standard library's docstrings, each cut in two; the wrong endings are those of other sentences
of similar length. Files: source of the library, cut to a size that a small machine scores in seconds. Sums: drawn from
a fixed seed."""

from __future__ import annotations

import hashlib
import json
import random
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from outcore.common.quantities import MB
from outcore.data.sources import EmbeddedSource, Record

DOCSTRING = re.compile(r'"""(.{60,4000}?)"""', re.DOTALL)
SENTENCE = re.compile(r"[A-Z][^.!?\n<>`|\\{}=_*]{60,200}[.!?]")
NUM_ENDINGS, NUM_FILES, NUM_SUMS = 1000, 40, 500
MAX_FILE_LETTERS = 6000
SEED = 20261124
Document = dict[str, Any]


@lru_cache(maxsize=1)
def _files() -> tuple[tuple[str, str], ...]:
    """(name, text) of the library's source files."""
    source = EmbeddedSource(total_bytes=8 * MB)
    return tuple((str(record.where), record.row["text"]) for record in source.records() if isinstance(record, Record))


def endings() -> list[Document]:
    """{"begins", "endings" [4], "right"}."""
    draws = random.Random(SEED)
    sentences = sorted({sentence for _, text in _files() for sentence in _sentences(text)})
    draws.shuffle(sentences)
    halves = [_cut(sentence.split()) for sentence in sentences]
    found = []
    for number, (begins, ending) in enumerate(halves[:NUM_ENDINGS]):
        others = [other for _, other in halves[number + 1 : number + 400] if abs(len(other) - len(ending)) <= 12]
        wrong = list(dict.fromkeys(other for other in others if other != ending))[:3]
        if len(wrong) < 3:
            continue
        right = draws.randrange(4)
        found.append({"begins": begins, "endings": [*wrong[:right], ending, *wrong[right:]], "right": right})
    return found


def files() -> list[Document]:
    """{"page"}: the beginnings of some source files, up to the end of a line."""
    draws = random.Random(SEED)
    chosen = [text for _, text in _files() if len(text) > 2000]
    draws.shuffle(chosen)
    return [{"page": text[: text.rfind("\n", 0, MAX_FILE_LETTERS) + 1] or text} for text in chosen[:NUM_FILES]]


def sums() -> list[Document]:
    """{"question", "answer"}."""
    draws = random.Random(SEED)
    found: dict[str, str] = {}
    while len(found) < NUM_SUMS + 50:
        a, b = draws.randrange(2, 100), draws.randrange(2, 100)
        minus = draws.random() < 0.4 and a > b
        found[f"{a} {'-' if minus else '+'} {b} ="] = str(a - b if minus else a + b)
    return [{"question": question, "answer": answer} for question, answer in found.items()]


def version_of(documents: list[Document]) -> str:
    """Name of these documents, with the Python whose library they were made of."""
    digest = hashlib.blake2b(json.dumps(documents).encode(), digest_size=4).hexdigest()
    return f"1-py{sys.version_info[0]}.{sys.version_info[1]}-{digest}"


def _sentences(text: str) -> Iterator[str]:
    for told in DOCSTRING.findall(text):
        for paragraph in told.split("\n\n"):
            yield from SENTENCE.findall(" ".join(paragraph.split()))


def _cut(words: list[str]) -> tuple[str, str]:
    middle = (len(words) + 1) // 2
    return " ".join(words[:middle]), " ".join(words[middle:])

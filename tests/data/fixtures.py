"""What the tests of the data room share: a small tokenizer made on the spot, and writers of small data files."""

import copy
import functools
import json
from pathlib import Path

from outcore.data import train_byte_bpe

SAYING = "the quick brown fox jumps over a lazy dog while seven wizards quietly boil jars of hazelnut cream"
WORDS = SAYING.split()


def sentence(number: int, words: int = 12) -> str:
    return " ".join(WORDS[(number * 7 + k * k + k) % len(WORDS)] for k in range(words)) + f" {number}."


@functools.cache
def _trained():
    return train_byte_bpe([sentence(n) for n in range(400)], vocab_size=600)


def tiny_tokenizer(chat_template: str | None = "keep"):
    """A fresh copy of a 600-token byte-level BPE; another `chat_template` replaces the ChatML one."""
    tokenizer = copy.deepcopy(_trained())
    if chat_template != "keep":
        tokenizer.chat_template = chat_template
    return tokenizer


def write_jsonl(path: Path, rows: list) -> Path:
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def text_rows(count: int, words: int = 12) -> list[dict[str, str]]:
    return [{"text": sentence(n, words + n % 17)} for n in range(count)]

"""Rows of a data set with the tokens that bear loss: what `outcore data` prints and panels draw."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from outcore.data.basis import DataSettings
from outcore.data.cache import TokenCache, carries_loss, token_ids
from outcore.data.prepare import PreparedData, prepare_data
from outcore.data.rows import KINDS


@dataclass(frozen=True)
class Look:
    """Some rows of a data set."""

    lines: list[str]
    """Lines for people: how rows are read, what was counted."""
    rows: list[tuple[str, np.ndarray, np.ndarray]]
    """(heading, token ids [n], bears loss bool [n]) each."""


def look_at(settings: DataSettings, tokenizer: Any, num_rows: int, say: Callable[[str], None]) -> Look:
    """Read the data and pick rows, one of each shape first. Raises DataError where they cannot be read."""
    data = prepare_data(settings, tokenizer, say=say)
    rows = [
        (heading, token_ids(tokens), carries_loss(tokens) & (np.arange(len(tokens)) > 0))
        for heading, tokens in _rows(data.cache, num_rows, settings.seq_length)
    ]
    return Look([*_read_as(data), *data.summary.lines()], rows)


def _read_as(data: PreparedData) -> list[str]:
    """For every shape in the data what is asked and what bears loss."""
    named = [shape.partition(" ")[0] for shape in data.summary.shape.split("; ")]
    kinds = [(name, KINDS[name].loss, KINDS[name].asked) for name in dict.fromkeys(named)]
    return [f"{name}: loss on {loss}" + f"; no loss on {asked}" * (asked != "nothing") for name, loss, asked in kinds]


def _rows(cache: TokenCache, wanted: int, seq_length: int) -> list[tuple[str, np.ndarray]]:
    """(heading, tokens with loss bits) of the first document of every shape, then of others all over the data."""
    firsts: dict[str, int] = cache.meta["shape_firsts"]
    chosen = {document: shape for shape, document in firsts.items()}
    for document in np.linspace(0, cache.documents - 1, num=min(cache.documents, 4 * wanted)).astype(int).tolist():
        if len(chosen) >= wanted:
            break
        chosen.setdefault(document, "")
    found = []
    for document, shape in chosen.items():
        start, end = int(cache.offsets[document]), int(cache.offsets[document + 1])
        tokens = np.asarray(cache.tokens[start:end])
        learned = int(carries_loss(tokens)[1:].sum())
        cut = f", {end - start - seq_length:,} of them beyond seq_length" if end - start > seq_length else ""
        kind = f", {shape}" if shape else ""
        found.append((f"document {document + 1}{kind}: {end - start:,} tokens, {learned:,} bear loss{cut}", tokens))
    return found

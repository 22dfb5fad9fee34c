"""One sample with its loss mask, as text for people: what is between ⟦ and ⟧ is what the model learns to write."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from outcore.data.layout import IGNORE_INDEX

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

    `input_ids`, `labels`: 1-D, of one length, labels not shifted, -100 = no loss.
    """
    ids, has_loss = np.asarray(input_ids), np.asarray(labels) != IGNORE_INDEX
    if ids.shape != has_loss.shape or ids.ndim != 1:
        raise ValueError(f"input_ids and labels must be 1-D and of one length, got {ids.shape} and {has_loss.shape}")
    if len(ids) == 0:
        return ""
    borders = [0, *(np.flatnonzero(np.diff(has_loss)) + 1).tolist(), len(ids)]
    parts = []
    for start, end in pairwise(borders):
        text = _shortened(str(tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=False)), max_run_chars)
        parts.append(f"{brackets[0]}{text}{brackets[1]}" if has_loss[start] else text)
    return "".join(parts)


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"

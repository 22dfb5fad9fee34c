"""Do the data's token ids fit the model's embedding table? Asked before training: a GPU answers by aborting."""

from __future__ import annotations

from typing import Any

from torch import nn


def embedding_rows(model: nn.Module | None, config: Any | None) -> int | None:
    """Entries of the largest table that token ids can index, or None when the model tells nothing of it.

    A transformers config says it. Of an own module nothing is known but its matrices: whichever holds the tokens,
    it has no more rows than the tallest of them."""
    if config is not None:
        rows = getattr(config.get_text_config(decoder=True), "vocab_size", None)
        if isinstance(rows, int):
            return rows
    if model is None:
        return None
    return max((p.shape[0] for p in model.parameters() if p.ndim == 2), default=None)


def check_token_ids(max_token_id: int, rows: int | None) -> None:
    """ValueError when a token id of the data has no row in the embedding table."""
    if rows is None or max_token_id < rows:
        return
    raise ValueError(
        f"the data has token id {max_token_id}, but the model's embedding table has {rows} rows (ids 0 to {rows - 1}): "
        "the tokenizer and the model do not belong together. Use the tokenizer that comes with the model "
        "(--tokenizer_name_or_path), or make your own model's table as large as len(tokenizer)."
    )

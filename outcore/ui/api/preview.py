"""Rows of a data set with their loss mask, as the run would read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outcore.data import load_or_train_tokenizer, weighted_source
from outcore.data.chat import read_template
from outcore.data.look import data_settings_of, look_at
from outcore.data.show import pieces_of
from outcore.serve.additions import bad
from outcore.train.run import default_seq_length
from outcore.ui.api.form import checked, said

MOST_ROWS = 20
READ_DOCUMENTS = 400
"""Documents of a large data set, for a look at it."""
MOST_TOKENS = 1500
"""Tokens of a row that are sent."""


def preview(fields: Mapping[str, Any], num_rows: Any = 3) -> dict[str, Any]:
    """Some rows: heading, and pieces of text with whether they bear loss. ApiError with the data room's words."""
    if not isinstance(num_rows, int) or not 1 <= num_rows <= MOST_ROWS:
        raise bad(f"rows must be from 1 to {MOST_ROWS}.", "rows")
    config = checked(said(fields))
    name = config.tokenizer_name_or_path or config.model_name_or_path
    try:
        settings = replace(
            data_settings_of(config, config.seq_length or default_seq_length(config, "fp32"), config.packing),
            dataset=weighted_source(config.dataset[0]).name,
            eval_fraction=0.0,
            eval_dataset=None,
            on_bad_row="skip",
            max_train_samples=min(config.max_train_samples or READ_DOCUMENTS, READ_DOCUMENTS),
        )
        tokenizer = load_or_train_tokenizer(settings, name, trust_remote_code=config.trust_remote_code)
        if config.chat_template is not None:
            tokenizer.chat_template = read_template(config.chat_template)
        look = look_at(settings, tokenizer, num_rows, say=lambda words: None)
    except (ValueError, OSError) as error:  # DataError is one
        raise bad(str(error), "dataset") from error
    rows = [
        {
            "heading": heading,
            "pieces": [
                {"text": text, "loss": bears} for text, _, bears in pieces_of(tokenizer, ids[:MOST_TOKENS], has_loss)
            ],
            "cut_tokens": max(0, len(ids) - MOST_TOKENS),
        }
        for heading, ids, has_loss in look.rows
    ]
    return {"lines": look.lines, "rows": rows}

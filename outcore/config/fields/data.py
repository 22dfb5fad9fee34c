"""Data: fields of the settings; each docstring is the text of `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outcore.config.spec import setting


@dataclass(frozen=True)
class DataFields:
    """Data."""

    dataset: tuple[str, ...] = setting(("embedded",), common=True, aliases=("dataset_name", "data", "train_dataset"))
    """A .txt, .jsonl, .json, .csv or .parquet file, a folder, a hub id, or `embedded` (Python's own source). Several
    (the flag again, a list in YAML) are mixed; NAME:0.3 takes three tenths of its rows, NAME:2 each twice."""
    dataset_config: str | None = None
    """Configuration name of a hub dataset."""
    dataset_split: str = "train"
    """Split of a hub dataset."""
    eval_dataset: str | None = setting(None, common=True, aliases=("eval_file",))
    """Separate evaluation data; otherwise `eval_fraction` of the documents is held out."""
    eval_fraction: float = setting(0.05, least=0, below=1)
    """Share of documents held out for evaluation when there is no eval_dataset."""
    data_format: Literal[
        "auto", "text", "prompt_completion", "alpaca", "sharegpt", "messages", "preference", "tokens"
    ] = "auto"
    """Shape of the rows; auto tells them apart."""
    text_extensions: str | None = setting(None, names=True)
    """Comma-separated: which files are text. Default: .txt,.text,.md,.rst."""
    text_column: str | None = None
    """Column that holds the text."""
    prompt_column: str | None = None
    """Column that holds the prompt."""
    completion_column: str | None = None
    """Column that holds the completion."""
    messages_column: str | None = None
    """Column that holds the list of messages."""
    chat_template: str | None = None
    """File with the chat template (Jinja) to use instead of the tokenizer's own; it is exported with the model."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Pack several documents in a row, isolated from each other in attention and positions."""
    group_by_length: bool = False
    """Batches of rows of about the same length, for less padding; for rows that are not packed."""
    streaming: Literal["auto", "on", "off"] = "auto"
    """Read a hub dataset as it comes, without downloading it first; auto: one larger than a quarter of the free RAM."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A malformed row stops the run, or is skipped and counted."""
    long_rows: Literal["keep_start", "keep_end", "split", "drop"] = "keep_start"
    """Treatment of a conversation or completion longer than a row; plain text is always split."""
    as_chat: bool = False
    """Put prompts and completions through the chat template, as a user's question and the answer."""
    train_on_prompt: bool = False
    """Take the loss on prompt tokens as well."""
    train_on_last_turn: bool = False
    """Train of a conversation the last assistant turn only."""
    max_train_samples: int | None = setting(None, above=0, aliases=("max_samples",))
    """Use at most this many training rows; a packed row holds several documents."""
    max_eval_samples: int | None = setting(None, above=0)
    """Use at most this many evaluation rows."""
    data_cache_dir: str = ".cache/data"
    """Folder in which tokenized data is kept between runs."""

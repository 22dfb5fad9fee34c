"""`DataSettings`: which data, read how, cut to what length. Wrong values fail here, before any file is opened.

What can be wrong with data, in words: every message says what happened, where, why, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outcore.common import words


class DataError(ValueError):
    """The data, or a setting that describes it, cannot be used; the message names the file and the way out."""


class TemplateError(DataError):
    """The chat template cannot tell which tokens the assistant wrote; a fault of the tokenizer, not of one row."""


class CacheError(DataError):
    """The token cache cannot be written, read or locked (read-only folder, full drive, another process stuck)."""


def nearest(name: str, candidates: Iterable[str]) -> str:
    """' (nearest: X)' when one of the candidates looks like a misspelling of `name`, else ''."""
    found = words.nearest(name, candidates)
    return f" (nearest: {found[0]!r})" if found else ""


def common_beginning(texts: Sequence[str]) -> str:
    """The longest text that all of them begin with; "" of none."""
    shortest, longest = (min(texts), max(texts)) if texts else ("", "")  # in alphabetical order: others lie between
    same = next((i for i, (a, b) in enumerate(zip(shortest, longest)) if a != b), min(len(shortest), len(longest)))
    return shortest[:same]


def shorten(text: str, limit: int = 120) -> str:
    """One line of at most `limit` characters, for quoting bad input in a message."""
    line = " ".join(str(text).split())
    return line if len(line) <= limit else line[: limit - 3] + "..."


EMBEDDED = "embedded"
FORMATS = ("auto", "text", "prompt_completion", "alpaca", "sharegpt", "messages", "preference", "tokens")
SWITCHES = ("auto", "on", "off")
BAD_ROW_POLICIES = ("error", "skip")
LONG_ROWS = ("keep_start", "keep_end", "split", "drop")
DEFAULT_TEXT_EXTENSIONS = (".txt", ".text", ".md", ".rst")
DEFAULT_CACHE_DIR = ".cache/outcore"
"""Beside the run, like checkpoints/ and logs/: token caches are large and belong on the drive the person chose."""

MIN_SEQ_LENGTH = 8
MAX_SEQ_LENGTH = 1 << 24


@dataclass(frozen=True)
class DataSettings:
    """Every field is checked on construction; `DataError` names the field, its value and what is allowed."""

    dataset: str = EMBEDDED
    """A file (.txt .jsonl .json .csv .tsv .parquet, also .gz or .zst of the text ones), a folder, a hub id, or
    "embedded"."""
    dataset_config: str | None = None
    """Configuration name of a hub data set."""
    dataset_split: str = "train"
    """Split of a hub data set to train on."""
    eval_dataset: str | None = None
    """Data for evaluation, given as `dataset`; without it a share of `dataset` is set aside."""
    eval_split: str | None = None
    """Split of a hub data set to evaluate on, e.g. "validation"."""
    eval_fraction: float = 0.05
    """Share of the documents set aside for evaluation when there is no evaluation set; 0 turns evaluation off."""
    text_column: str | None = None
    prompt_column: str | None = None
    completion_column: str | None = None
    messages_column: str | None = None
    format: str = "auto"
    """auto | text | prompt_completion | alpaca | sharegpt | messages | preference | tokens."""
    seq_length: int = 1024
    """Tokens in a row: long documents are cut into windows of this length, short ones packed or padded up to it."""
    packing: str = "auto"
    """auto | on | off: several documents to a row, isolated from each other. auto: on wherever the model allows it."""
    on_bad_row: str = "error"
    """error: stop at the first malformed row; skip: leave it out and count it."""
    streaming: str = "auto"
    """auto | on | off: a hub data set is read over the network instead of being downloaded first. Files are never
    held whole."""
    cache_dir: str = DEFAULT_CACHE_DIR
    """Folder of the token caches and of the embedded tokenizer."""
    seed: int = 42
    """Chooses the evaluation documents; the order of the batches has its own seed."""
    max_train_samples: int | None = None
    """At most this many training rows; reading stops when the first documents of the data suffice for them."""
    max_eval_samples: int | None = None
    """At most this many evaluation rows."""
    as_chat: bool = False
    """True: a prompt and its completion become a conversation of two messages, written by the chat template."""
    train_on_prompt: bool = False
    """True: the loss covers prompts and user turns too, not only completions and assistant turns."""
    train_on_last_turn: bool = False
    """True: of a conversation only the last assistant turn carries loss."""
    long_rows: str = "keep_start"
    """keep_start | keep_end | split | drop: what becomes of a conversation or completion longer than seq_length. Plain
    text is always split."""
    num_proc: int = 1
    """Processes that tokenise; 1 is right for fast tokenizers, which use every core by themselves."""
    text_extensions: tuple[str, ...] = DEFAULT_TEXT_EXTENSIONS
    """Endings of the files of a folder that are text."""
    lock_timeout_s: float = 7200.0
    """Seconds that a process waits for another one that is preparing the same data."""

    def __post_init__(self) -> None:
        for name in ("dataset", "dataset_split", "cache_dir"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name).strip():
                raise DataError(f"{name} must be a non-empty text, got {getattr(self, name)!r}")
        self._one_of("format", FORMATS)
        self._one_of("packing", SWITCHES)
        self._one_of("streaming", SWITCHES)
        self._one_of("on_bad_row", BAD_ROW_POLICIES)
        self._one_of("long_rows", LONG_ROWS)
        if self.train_on_prompt and self.train_on_last_turn:
            raise DataError(
                "train_on_prompt puts loss on every turn and train_on_last_turn on the last only: choose one of them"
            )
        self._whole("seq_length", MIN_SEQ_LENGTH, MAX_SEQ_LENGTH)
        self._whole("num_proc", 1, 1024)
        self._whole("seed", 0, 2**63 - 1)
        for name in ("max_train_samples", "max_eval_samples"):
            if getattr(self, name) is not None:
                self._whole(name, 1, 2**62)
        if not isinstance(self.eval_fraction, int | float) or not 0 <= self.eval_fraction <= 0.5:
            raise DataError(
                f"eval_fraction is the share of documents set aside for evaluation, from 0 (none) to 0.5; "
                f"got {self.eval_fraction!r}"
            )
        if not self.lock_timeout_s > 0:
            raise DataError(f"lock_timeout_s must be positive, got {self.lock_timeout_s!r}")
        self._check_columns()
        object.__setattr__(self, "text_extensions", _extensions(self.text_extensions))

    def _one_of(self, name: str, allowed: Sequence[str]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise DataError(f"{name} must be one of {', '.join(allowed)}; got {value!r}{nearest(str(value), allowed)}")

    def _whole(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise DataError(f"{name} must be a whole number from {low} to {high}, got {value!r}")

    def _check_columns(self) -> None:
        if (self.prompt_column is None) != (self.completion_column is None):
            raise DataError(
                "prompt_column and completion_column go together: name both, or neither and let the shape be detected"
            )
        chosen = {
            "text": self.text_column is not None,
            "prompt_completion": self.prompt_column is not None,
            "messages": self.messages_column is not None,
        }
        named = [shape for shape, is_chosen in chosen.items() if is_chosen]
        if len(named) > 1:
            raise DataError(f"columns of two shapes are named at once ({' and '.join(named)}): keep those of one")
        if named and self.format != "auto":
            allowed = {"messages": ("messages", "sharegpt")}.get(named[0], (named[0],))
            if self.format not in allowed:
                raise DataError(f"format is {self.format!r}, but the columns named are those of {named[0]!r}: drop one")


def _extensions(value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else list(value)
    cleaned = tuple("." + part.strip().lower().lstrip("*").lstrip(".") for part in parts if part.strip())
    if not cleaned or any(part == "." for part in cleaned):
        raise DataError(f'text_extensions must name at least one extension such as ".txt", got {value!r}')
    return cleaned

"""`outcore data`: how rows are read, and which of their tokens bear loss, before a run is spent on them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from outcore.common.classes import same_named
from outcore.common.output import printable, say, tell_error
from outcore.config.commands import data_flags
from outcore.data.basis import DataError, DataSettings
from outcore.data.chat import read_template
from outcore.data.look import Look, look_at
from outcore.data.show import render_sample, write_page
from outcore.data.sources import check_hub_settings
from outcore.data.tokenizer import load_or_train_tokenizer
from outcore.model import max_positions, named_config, named_model

GREEN = ("\x1b[32m⟦", "⟧\x1b[0m")
PLAIN = ("⟦", "⟧")
NOT_ASKED = (
    "eval_dataset", "eval_split", "eval_fraction", "format", "streaming", "cache_dir", "seed", "max_train_samples",
    "max_eval_samples", "num_proc", "text_extensions", "lock_timeout_s",
)  # fmt: skip
"""Settings that have another name here, or no flag."""


def main(argv: list[str] | None = None) -> int:
    """Show one data set and return the exit code."""
    args = data_flags().parse_args(argv)
    try:
        if args.rows < 1:
            raise DataError(f"--rows must be 1 or more, got {args.rows}")
        if args.model is not None:
            args.model = named_model(args.model)[1]
        settings = _settings(args)
        tokenizer = load_or_train_tokenizer(settings, args.model, trust_remote_code=args.trust_remote_code)
        if args.chat_template is not None:
            tokenizer.chat_template = read_template(args.chat_template)
        look = look_at(settings, tokenizer, args.rows, say=say)
        _show(look, tokenizer, args)
    except ValueError as error:
        return tell_error("data", error)
    return 0


def _settings(args: argparse.Namespace) -> DataSettings:
    said = {
        **same_named(DataSettings, args, *NOT_ASKED),
        "seq_length": _default_seq_length(args) if args.seq_length is None else args.seq_length,
        "eval_fraction": 0.0,
        "format": args.data_format,
        "as_chat": args.as_chat == "true",
        "train_on_prompt": args.train_on_prompt == "true",
        "train_on_last_turn": args.train_on_last_turn == "true",
        "max_train_samples": args.max_rows,
        "cache_dir": args.data_cache_dir,
    }
    settings = DataSettings(**said)
    check_hub_settings(settings, [settings.dataset])
    return settings


def _default_seq_length(args: argparse.Namespace) -> int:
    """Tokens of a row as in training when nobody says: fewer than the default where the model can take fewer."""
    if args.model is None:
        return DataSettings.seq_length
    try:
        limit = max_positions(named_config(args.model, args.trust_remote_code))
    except (ValueError, RuntimeError):  # a tokenizer alone is enough to look at rows
        words = "has no configuration that says how long its rows may be: --seq_length says it"
        print(f"note: {args.model} {words} ({DataSettings.seq_length})", file=sys.stderr)
        return DataSettings.seq_length
    return min(DataSettings.seq_length, limit or DataSettings.seq_length)


def _show(look: Look, tokenizer: Any, args: argparse.Namespace) -> None:
    for line in look.lines:
        print(printable(line))
    brackets = GREEN if sys.stdout.isatty() else PLAIN
    for heading, ids, has_loss in look.rows:
        print(f"\n{printable(heading)}")
        print(render_sample(tokenizer, ids, np.where(has_loss, ids, -100), brackets=brackets))
    if args.html != "none":
        page = Path(args.html)
        try:
            write_page(page, f"Loss tokens of {args.dataset}", look.lines, look.rows, tokenizer)
        except OSError as error:
            raise DataError(f"the page {page} cannot be written: {error.strerror or error}") from error
        print(f"\nwritten: {page.absolute()}")


if __name__ == "__main__":
    sys.exit(main())

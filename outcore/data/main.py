"""`outcore data`: how rows are read, and which of their tokens bear loss, before a run is spent on them.

    outcore data rows.jsonl --model ./Qwen3-4B
    outcore data rows.jsonl --model ./Qwen3-4B --rows 20 --html rows.html

Tokens between brackets (green in a terminal) bear loss. The same page of rows is written as HTML. Settings have the
names that train_model.py gives them. Exit code: 0 shown, 2 wrong usage or data that cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

from outcore.data.basis import FORMATS, LONG_ROWS, DataError, DataSettings
from outcore.data.cache import TokenCache, carries_loss, token_ids
from outcore.data.prepare import PreparedData, prepare_data
from outcore.data.rows import KINDS
from outcore.data.show import render_sample, write_page
from outcore.data.tokenizer import load_or_train_tokenizer

GREEN = ("\x1b[32m⟦", "⟧\x1b[0m")
PLAIN = ("⟦", "⟧")


def parser() -> argparse.ArgumentParser:
    """The subcommand's arguments; names are train_model.py's where it has them."""
    p = argparse.ArgumentParser(prog="outcore data", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("dataset", metavar="PATH", help="a file, a folder, a hub id, or `embedded`")
    p.add_argument("--model", help="folder or hub id of the model (its tokenizer and chat template only)")
    p.add_argument("--chat_template", help="file of a chat template to use instead of the tokenizer's")
    p.add_argument("--rows", type=int, default=5, help="how many rows to show, one of each shape first (5)")
    p.add_argument("--html", default="outcore_data.html", help="page to write, or none (outcore_data.html)")
    p.add_argument("--seq_length", type=int, default=1024)
    p.add_argument("--data_format", choices=FORMATS, default="auto")
    for column in ("text_column", "prompt_column", "completion_column", "messages_column"):
        p.add_argument(f"--{column}")
    p.add_argument("--dataset_config", help="configuration of a hub data set")
    p.add_argument("--dataset_split", default="train")
    p.add_argument("--long_rows", choices=LONG_ROWS, default="keep_start")
    p.add_argument("--on_bad_row", choices=("error", "skip"), default="skip", help="skip counts them (skip)")
    p.add_argument("--train_on_prompt", choices=("true", "false"), default="false")
    p.add_argument("--train_on_last_turn", choices=("true", "false"), default="false")
    p.add_argument("--max_rows", type=int, help="read no more than about this many rows")
    p.add_argument("--data_cache_dir", default=".cache/data")
    p.add_argument("--trust_remote_code", action="store_true")
    return p


def main(argv: list[str] | None = None) -> int:
    """Show one data set and return the exit code."""
    args = parser().parse_args(argv)
    try:
        if args.rows < 1:
            raise DataError(f"--rows must be 1 or more, got {args.rows}")
        settings = _settings(args)
        tokenizer = load_or_train_tokenizer(settings, args.model, trust_remote_code=args.trust_remote_code)
        if args.chat_template is not None:
            tokenizer.chat_template = _template(Path(args.chat_template))
        data = prepare_data(settings, tokenizer, say=lambda words: print(words, file=sys.stderr))
        _show(data, tokenizer, args)
    except DataError as error:
        print(f"outcore data: {error}", file=sys.stderr)
        return 2
    return 0


def _template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the chat template {file} cannot be read: {error}") from error


def _settings(args: argparse.Namespace) -> DataSettings:
    return DataSettings(
        dataset=args.dataset,
        dataset_config=args.dataset_config,
        dataset_split=args.dataset_split,
        eval_fraction=0.0,
        format=args.data_format,
        text_column=args.text_column,
        prompt_column=args.prompt_column,
        completion_column=args.completion_column,
        messages_column=args.messages_column,
        seq_length=args.seq_length,
        packing="off",
        on_bad_row=args.on_bad_row,
        long_rows=args.long_rows,
        train_on_prompt=args.train_on_prompt == "true",
        train_on_last_turn=args.train_on_last_turn == "true",
        max_train_samples=args.max_rows,
        cache_dir=args.data_cache_dir,
    )


def _show(data: PreparedData, tokenizer: Any, args: argparse.Namespace) -> None:
    lines = [*_read_as(data), *data.summary.lines()]
    for line in lines:
        print(line)
    shown = [
        (heading, token_ids(tokens), carries_loss(tokens) & (np.arange(len(tokens)) > 0))
        for heading, tokens in _rows(data.cache, args.rows, args.seq_length)
    ]
    brackets = GREEN if sys.stdout.isatty() else PLAIN
    for heading, ids, has_loss in shown:
        print(f"\n{heading}")
        print(render_sample(tokenizer, ids, np.where(has_loss, ids, -100), brackets=brackets))
    if args.html != "none":
        page = Path(args.html)
        try:
            write_page(page, f"Loss tokens of {args.dataset}", lines, shown, tokenizer)
        except OSError as error:
            raise DataError(f"the page {page} cannot be written: {error.strerror or error}") from error
        print(f"\nwritten: {page.absolute()}")


def _read_as(data: PreparedData) -> list[str]:
    """For every shape in the data what is asked and what bears loss."""
    named = [shape.partition(" ")[0] for shape in data.summary.shape.split("; ")]
    return [f"{name}: loss on {KINDS[name].loss}; no loss on {KINDS[name].asked}" for name in dict.fromkeys(named)]


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


if __name__ == "__main__":
    sys.exit(main())

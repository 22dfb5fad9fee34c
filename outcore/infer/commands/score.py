"""`outcore score MODEL --input texts.jsonl`: how likely texts are to the model, and its perplexity over all of them."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from outcore.common.files import json_of, replacing
from outcore.common.output import say, tell_error
from outcore.config.commands import score_flags
from outcore.infer.commands.options import check_output, settings_of, tell_plan
from outcore.infer.opening import against_plan, open_engine
from outcore.infer.requests import Prompts

GROUP_TOKENS = 1 << 18
"""Tokens that are read before they are scored: several passes' worth."""


def main(argv: list[str] | None = None) -> int:
    """The subcommand; returns its exit code."""
    args = score_flags().parse_args(argv)
    try:
        return _score(args)
    except (ValueError, RuntimeError, OSError) as error:
        return tell_error("score", error)


def _score(args: argparse.Namespace) -> int:
    if args.token_logprobs and args.output is None:
        raise ValueError("--token_logprobs does nothing without --output FILE.")
    if not args.input.is_file():
        raise ValueError(f"--input {args.input} is no file.")
    if args.output is not None:
        check_output(args.output, args.input)
    texts = list(_texts(args.input))
    if not texts:
        raise ValueError(f"--input {args.input} has no texts.")
    opened = open_engine(args.model, settings_of(args).for_scoring(), say)
    told = against_plan(opened)
    total, count = 0.0, 0
    try:
        prompts = Prompts(opened.found.tokenizer)
        ids = [prompts.of_text(text) for text in texts]
        opened.engine.check_texts(ids)  # all of them, before hours of work
        with nullcontext() if args.output is None else replacing(args.output) as file:
            for group in _groups(ids):
                began = time.perf_counter()
                scores = opened.engine.score(group)
                told.scored([len(ids) for ids in group], time.perf_counter() - began)
                for logprobs in scores:
                    total, count = total + sum(logprobs), count + len(logprobs)
                    if file is not None:
                        file.write(json.dumps(_line(logprobs, with_tokens=args.token_logprobs)).encode() + b"\n")
        tell_plan(told, "score")
    finally:
        opened.close()
    summary = {
        "texts": len(texts),
        "tokens": count,
        "logprob": total,
        "perplexity": math.exp(-total / count) if count else None,
    }
    print(json.dumps(summary))
    return 0


def _line(logprobs: list[float], *, with_tokens: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "tokens": len(logprobs),
        "logprob": sum(logprobs),
        "perplexity": math.exp(-sum(logprobs) / len(logprobs)) if logprobs else None,
    }
    return found | ({"token_logprobs": logprobs} if with_tokens else {})


def _texts(path: Path) -> Iterator[str]:
    is_json = path.suffix.lower() in (".jsonl", ".json", ".ndjson")
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if any("\ud800" <= letter <= "\udfff" for letter in line):
                raise ValueError(f"{path}, line {number}: is no UTF-8. Save the file as UTF-8.")
            if not is_json:
                yield line.rstrip("\n")
                continue
            try:
                entry = json_of(line)
                text = entry if isinstance(entry, str) else entry.get("text", entry.get("prompt"))
            except (ValueError, AttributeError):
                raise ValueError(f"{path}, line {number}: is no JSON object or text.") from None
            if not isinstance(text, str):
                raise ValueError(f'{path}, line {number}: has no "text".')
            yield text


def _groups(ids: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    group: list[tuple[int, ...]] = []
    tokens = 0
    for text in ids:
        if group and tokens + len(text) > GROUP_TOKENS:
            yield group
            group, tokens = [], 0
        group.append(text)
        tokens += len(text)
    yield group

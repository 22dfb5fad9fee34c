"""`outcore score MODEL --input texts.jsonl`: how likely texts are to the model, and its perplexity over all of them.

{"text": "..."}  or  {"prompt": "..."}      all of it
{"prompt": "...", "completion": "..."}      the completion behind the prompt; also answer, response, ... as in training
{"messages": [...]}, instruction + output   and training's other rows: what bears loss there, by the chat template
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import compress
from pathlib import Path
from typing import Any

from outcore.common.files import json_of, replacing
from outcore.common.output import say, tell_error
from outcore.common.quantities import counted
from outcore.config.commands import score_flags
from outcore.data.basis import DataSettings
from outcore.data.chat import ChatEncoder
from outcore.data.rows import COMPLETION_COLUMNS, ChatExample, TokensExample, as_text, detect_shape
from outcore.data.sources import RowError
from outcore.infer.commands.hidden_targets import check_targets, tell_targets
from outcore.infer.commands.options import check_output, settings_of, tell_plan
from outcore.infer.opening import against_plan, open_engine
from outcore.infer.requests import Prompts

Scored = tuple[str, str] | ChatExample
"""(what stands before it, the text that is scored), or a conversation."""
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
    if args.top_k is not None:
        check_targets(args)
    if args.output is not None:
        check_output(args.output, args.input)
    unread: Counter[str] = Counter()
    texts = list(_texts(args.input, unread))
    if not texts:
        raise ValueError(f"--input {args.input} has no texts.")
    if unread:
        named = [f"{name!r} ({counted(count, 'line')})" for name, count in unread.items()]
        say(f"fields that are not read: {', '.join(named)}")
    opened = open_engine(args.model, settings_of(args).for_scoring(), say)
    told = against_plan(opened)
    total, count = 0.0, 0
    try:
        prompts = Prompts(opened.found.tokenizer)
        if args.top_k is not None:
            return tell_targets(args, opened, texts)
        ids, counted_of = scored_tokens(texts, prompts)
        opened.engine.check_texts(ids)  # all of them, before hours of work
        counts = iter(counted_of)
        with nullcontext() if args.output is None else replacing(args.output) as file:
            for group in groups_of(ids):
                began = time.perf_counter()
                scores = opened.engine.score(group)
                told.scored([len(ids) for ids in group], time.perf_counter() - began)
                for of_text in scores:
                    logprobs = list(compress(of_text, next(counts)))
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


def scored_tokens(texts: Sequence[Scored], prompts: Prompts) -> tuple[list[tuple[int, ...]], list[list[bool]]]:
    """Tokens of each text or conversation, and whose score counts, from the second on: the first token has none."""
    ids, counted_of = [], []
    chats = ChatEncoder(prompts.tokenizer)
    for text in texts:
        if isinstance(text, ChatExample):
            encoded = chats.encode(text)
            ids.append(tuple(encoded.ids.tolist()))
            counted_of.append(encoded.has_loss[1:].tolist())
            continue
        asked, told = text
        before = prompts.of_text(asked) if asked else ()
        after = prompts.tokenizer(told, add_special_tokens=False)["input_ids"] if asked else prompts.of_text(told)
        ids.append((*before, *after))
        counted_of.append([number >= len(before) for number in range(1, len(ids[-1]))])
    return ids, counted_of


def _texts(path: Path, unread: Counter[str]) -> Iterator[Scored]:
    """(what stands before it, the text that is scored) of each line, or its conversation. `unread` counts fields that
    are not read."""
    is_json = path.suffix.lower() in (".jsonl", ".json", ".ndjson")
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            if any("\ud800" <= letter <= "\udfff" for letter in line):
                raise ValueError(f"{path}, line {number}: is no UTF-8. Save the file as UTF-8.")
            if not is_json:
                yield "", line.rstrip("\n")
                continue
            try:
                entry = json_of(line)
            except ValueError:
                entry = None
            if isinstance(entry, str):
                yield "", entry
            elif isinstance(entry, dict):
                yield _parts_of(entry, f"{path}, line {number}", unread)
            else:
                raise ValueError(f"{path}, line {number}: is no JSON object or text.")


def _parts_of(entry: dict[str, Any], where: str, unread: Counter[str]) -> Scored:
    """(prompt or '', text) of one line, or its conversation; ValueError for one of which a part would not count."""
    said = {name: as_text(value) for name, value in entry.items() if value is not None}
    asked = [name for name in ("text", "prompt") if name in said]
    told = [name for name in COMPLETION_COLUMNS if name in said and (asked == ["prompt"] or name == "completion")]
    if not asked:
        try:
            example = detect_shape([entry], DataSettings(), where).example(entry)
        except RowError as error:
            raise ValueError(f"{where}: {error}.") from None
        if isinstance(example, TokensExample):
            raise ValueError(f'{where}: has no "text", and tokens are not scored.')
        return example if isinstance(example, ChatExample) else (example.prompt or "", example.text)
    if len(asked) + len(told) > 2 or (told and asked == ["text"]) or len(asked) > 1:
        raise ValueError(
            f'{where}: has {" and ".join(asked + told)}, of which one would not count. A line has "text", or "prompt" '
            'with or without one "completion".'
        )
    for name in asked + told:
        if not isinstance(said[name], str):
            raise ValueError(f'{where}: "{name}" should be text, found {type(said[name]).__name__}.')
    if told and not said[told[0]]:
        raise ValueError(f'{where}: its "{told[0]}" is empty: there is nothing to score.')
    unread.update(name for name in said if name not in asked + told)
    return (said[asked[0]], said[told[0]]) if told else ("", said[asked[0]])


def groups_of(ids: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Texts in pieces of so many that tokens of several passes are read at a time."""
    group: list[tuple[int, ...]] = []
    tokens = 0
    for text in ids:
        if group and tokens + len(text) > GROUP_TOKENS:
            yield group
            group, tokens = [], 0
        group.append(text)
        tokens += len(text)
    yield group

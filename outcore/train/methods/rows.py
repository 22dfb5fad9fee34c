"""A run's rows as the methods' trainers want them, from the files and shapes that every run reads.

A pair is read by the reader of its shape twice, once with chosen and rejected exchanged: so prompts, conversations and
tools are understood as for training on the chosen answers alone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np

from outcore.common.quantities import counted
from outcore.config import TrainConfig
from outcore.data import DataError, weighted_source
from outcore.data.look import data_settings_of
from outcore.data.rows import NUMBERS, ChatExample, Shape, TextExample, shaped_records
from outcore.data.sources import BadRow, BadRows, Record, RowError, Where, half_a_pair, is_sound, open_source

Row = dict[str, Any]
Say = Callable[[str], None]
TEXTS = ("text", "sentence", "content", "query", "question")
ASKED = ("query", "anchor", "question", "prompt", "sentence1", "text")
PARTNERS = ("positive", "document", "passage", "answer", "completion", "sentence2")
LABELS = ("label", "labels", "class")
TAGS = ("labels", "tags", "ner_tags", "pos_tags", "label")
TEXT = Shape("text", ("text",))
QUESTIONS = ("prompt", "question", "problem", "messages")
TASK_ASKS = "\nSay the answer alone between <answer> and </answer>."
TASK, TASK_ROWS = "reasoning_gym:", 1000
"""Beginning of a source that is one of reasoning-gym's tasks, and its rows where nobody says."""


def split_rows(config: TrainConfig, found: Callable[[bool], list[Any]]) -> tuple[list[Any], list[Any]]:
    """(rows to train on, rows to evaluate on): those of `eval_dataset`, or a share of the others set aside by the seed.
    `found(is_evaluation)` reads them."""
    trained = found(False)
    if config.eval_strategy == "no":
        held = []
    elif config.eval_dataset is not None:
        held = found(True)
    else:
        count = round(config.eval_fraction * len(trained)) or int(config.eval_fraction > 0 and len(trained) > 1)
        aside = set(np.random.default_rng(config.seed).permutation(len(trained))[:count].tolist())
        held = [row for number, row in enumerate(trained) if number in aside]
        trained = [row for number, row in enumerate(trained) if number not in aside]
    if not trained:
        raise DataError(f"{', '.join(config.dataset)} leaves no row to train on.")
    return trained[: config.max_train_samples], held[: config.max_eval_samples]


def _read(
    config: TrainConfig,
    is_evaluation: bool,
    say: Say,
    take: Callable[[Row, Shape], list[Row]],
    *,
    has_shape: bool = False,
    has_tasks: bool = False,
) -> list[Row]:
    """Read the rows of all sources, by their weights, as `take` makes them; a RowError of it is a bad row. `has_shape`:
    `take` wants to know the shape of the row's file, which must be a known one; `has_tasks`: a source may be a task."""
    settings = data_settings_of(config, config.seq_length or 1024, "off")
    found: list[Row] = []
    for one in map(weighted_source, config.dataset[: 1 if is_evaluation else None]):
        bad, numbers, rows = BadRows(config.on_bad_row), Counter[str](), list[Row]()
        if has_tasks and one.name.startswith(TASK):
            records = _task_records(config, one.name.removeprefix(TASK))
        else:
            source = open_source(replace(settings, dataset=one.name), evaluation=is_evaluation)
            records = shaped_records(source, settings) if has_shape else ((record, TEXT) for record in source.records())
        for record, shape in records:
            if isinstance(record, BadRow):
                bad.add(record)
                continue
            try:
                made = take(record.row, shape)
                if not is_sound(text := json.dumps(made, ensure_ascii=False)):
                    raise RowError(half_a_pair(text))
            except RowError as error:
                bad.add(BadRow(record.where, str(error)))
                continue
            rows += made
            worse = ("rejected" for _ in shape.numbers({"chosen": record.row.get("rejected")}))
            numbers.update({*shape.numbers(record.row), *worse})
        for column, count in numbers.items():
            say(f"{one.name}: {NUMBERS.format(column=column)} ({counted(count, 'row')})")
        if bad.count:
            say(f"{one.name}: {bad.count} malformed rows left out, such as {bad.examples[0]}")
        if not is_evaluation and one.weight != 1:
            whole, part = divmod(one.weight, 1)
            rows = rows * int(whole) + rows[: round(part * len(rows))]
        found += rows
    return found


# ------------------------------------------------------------------ preferences


def _pair(row: Row, shape: Shape) -> list[Row]:
    if not {"chosen", "rejected"} <= row.keys():
        raise RowError("a preference is a row with chosen and rejected (and perhaps prompt)")
    other = {**row, "chosen": row["rejected"], "rejected": row["chosen"]}
    good, bad = shape.example(row), shape.example(other)
    if isinstance(good, TextExample) and isinstance(bad, TextExample):
        return [{"prompt": good.prompt or "", "chosen": good.text, "rejected": bad.text}]
    if not (isinstance(good, ChatExample) and isinstance(bad, ChatExample)):
        raise RowError("chosen and rejected are of two kinds: texts, or lists of messages, both")
    shared = len(list(takewhile(lambda both: both[0] == both[1], zip(good.messages, bad.messages))))
    both = good.messages[:shared], good.messages[shared:], bad.messages[shared:]
    if not all(both):
        raise RowError("chosen and rejected have no question in common, or one has no answer of its own")
    return [dict(zip(("prompt", "chosen", "rejected"), both, strict=True)) | _tools_of(good)]


def _judged(row: Row, shape: Shape) -> list[Row]:
    if {"chosen", "rejected"} <= row.keys():
        (pair,) = _pair(row, shape)
        rest = {key: pair[key] for key in pair.keys() - {"chosen", "rejected"}}
        return [
            {**rest, "completion": pair[name], "label": is_good}
            for name, is_good in (("chosen", True), ("rejected", False))
        ]
    label = row.get("label")
    if label not in (True, False, 0, 1):
        raise RowError(f"label must be true or false (was the answer good), found {label!r}")
    example = shape.example(row)
    if isinstance(example, TextExample):
        return [{"prompt": example.prompt or "", "completion": example.text, "label": bool(label)}]
    if not isinstance(example, ChatExample) or len(example.messages) < 2:
        raise RowError("a judged row has a prompt and its completion, or messages, and a label")
    ends = {"prompt": example.messages[:-1], "completion": example.messages[-1:], "label": bool(label)}
    return [ends | _tools_of(example)]


def _tools_of(example: ChatExample) -> Row:
    if example.variables:
        raise RowError("chat_template_kwargs are read by method sft alone")
    return {"tools": json.dumps(example.tools)} if example.tools else {}


def pairs(config: TrainConfig, is_evaluation: bool, say: Say) -> list[Row]:
    """prompt, chosen, rejected."""
    return _read(config, is_evaluation, say, _pair, has_shape=True)


def judged(config: TrainConfig, is_evaluation: bool, say: Say) -> list[Row]:
    """prompt, completion, label; a pair is two of them."""
    return _read(config, is_evaluation, say, _judged, has_shape=True)


# ------------------------------------------------------------------ prompts


def asked(config: TrainConfig, is_evaluation: bool, say: Say) -> list[Row]:
    """prompt, number (its place in the data, from 1), columns (the rest of the row, for who judges answers)."""

    def asked_row(row: Row, shape: Shape) -> list[Row]:
        prompt = _column(row, (config.prompt_column,) if config.prompt_column else QUESTIONS, "a prompt")
        if isinstance(prompt, list):
            if not all(isinstance(turn, dict) and isinstance(turn.get("content"), str) for turn in prompt):
                raise RowError("a prompt is a text, or a list of messages with role and content")
            if not prompt or prompt[-1].get("role") == "assistant":
                raise RowError("a prompt ends with a question, not with an answer")
        elif not isinstance(prompt, str) or not prompt.strip():
            raise RowError(f"a prompt is a text, or a list of messages, found {prompt!r}")
        columns = {name: value for name, value in row.items() if name != "prompt"}
        return [{"prompt": prompt, "columns": json.loads(json.dumps(columns, default=str))}]

    found = _read(config, is_evaluation, say, asked_row, has_tasks=True)
    every = sorted({name for row in found for name in row["columns"]})
    if len({isinstance(row["prompt"], str) for row in found}) > 1:
        raise DataError("some prompts are texts, others lists of messages. Give one kind alone.")
    return [  # columns as one text: a table of rows wants the same types in each
        {**row, "number": number, "columns": json.dumps(dict.fromkeys(every) | row["columns"], ensure_ascii=False)}
        for number, row in enumerate(found, start=1)
    ]


def without_gaps(prompt: Any) -> Any:
    """Give a prompt as its row has it: a table of rows gives each message the keys of all others, with None."""
    if isinstance(prompt, str):
        return prompt
    return [{name: value for name, value in turn.items() if value is not None} for turn in prompt]


def _task_records(config: TrainConfig, task: str) -> Iterator[tuple[Record | BadRow, Shape]]:
    """Rows of one of reasoning-gym's tasks, made from the run's seed. DataError where it is not to be had."""
    try:
        from reasoning_gym import create_dataset  # pyright: ignore[reportMissingImports]

        rows = create_dataset(task, size=config.max_train_samples or TASK_ROWS, seed=config.seed)
    except ImportError as error:
        raise DataError(f"dataset {TASK}{task}: {error}. pip install reasoning-gym") from error
    except ValueError as error:
        raise DataError(f"dataset {TASK}{task}: {error}") from error
    for index in range(len(rows)):
        talk = [{"role": "user", "content": rows[index]["question"] + TASK_ASKS}]
        origin = {"task": task, "size": len(rows), "seed": config.seed, "index": index}
        yield (
            Record(Where(f"{TASK}{task}", "row", index), {"prompt": talk, "answer": rows[index]["answer"], **origin}),
            TEXT,
        )


# ------------------------------------------------------------------ labels and partners


def labelled(config: TrainConfig, is_evaluation: bool, say: Say) -> list[Row]:
    """text, label; or query, document, label (whether the document answers the query); or words, label (one each)."""

    def labelled_row(row: Row, shape: Shape) -> list[Row]:
        if isinstance(words := row.get("tokens"), list):
            return [_tagged(words, _column(row, TAGS, "labels of the tokens"))]
        label = _column(row, LABELS, "a label")
        document = next((name for name in PARTNERS if isinstance(row.get(name), str)), None)
        if document is not None:
            if label not in (True, False, 0, 1):
                raise RowError(f"whether a document answers its query is 0 or 1, found {label!r}")
            return [{"text": _text(row, ASKED), "document": row[document], "label": float(label)}]
        if isinstance(label, bool) or not isinstance(label, (str, int)):
            raise RowError(f"a label is a text or a whole number, found {label!r}")
        names = (config.text_column,) if config.text_column else TEXTS
        return [{"text": _text(row, names), "label": label}]

    found = _read(config, is_evaluation, say, labelled_row)
    if len({frozenset(row) for row in found}) > 1:
        raise DataError("method classify: some rows label texts, others pairs of texts or words. Give one kind alone.")
    return found


def _tagged(words: list[Any], labels: Any) -> Row:
    """Words of a text with a label each."""
    if not words or not all(isinstance(word, str) and word.strip() for word in words):
        raise RowError("tokens must be a list of words")
    if not isinstance(labels, list) or len(labels) != len(words):
        raise RowError(f"there are {len(words)} tokens, and each must have one label; found {labels!r}")
    if not all(isinstance(label, (str, int)) and not isinstance(label, bool) for label in labels):
        raise RowError("labels of tokens are texts or whole numbers")
    return {"words": words, "label": labels}


def partners(config: TrainConfig, is_evaluation: bool, say: Say) -> list[Row]:
    """query, positive; and negative where all rows have one."""

    def partner_row(row: Row, shape: Shape) -> list[Row]:
        found = {"query": _text(row, ASKED), "positive": _text(row, PARTNERS)}
        if isinstance(row.get("negative"), str):
            found["negative"] = row["negative"]
        return [found]

    return _read(config, is_evaluation, say, partner_row)


def _column(row: Row, names: Sequence[str], what: str) -> Any:
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        raise RowError(f"no column with {what} ({', '.join(names)}); the row has: {', '.join(row) or 'none'}")
    return row[name]


def _text(row: Row, names: Sequence[str]) -> str:
    value = _column(row, names, "a text")
    if not isinstance(value, str) or not value.strip():
        raise RowError(f"a text was expected, found {value!r}")
    return value

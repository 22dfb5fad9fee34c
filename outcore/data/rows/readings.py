"""Readers of rows, one for each shape: what is asked, what is told, what carries loss."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from outcore.data.basis import common_beginning, shorten
from outcore.data.rows.examples import ChatExample, Example, TextExample, TokensExample
from outcore.data.rows.messages import as_text, message_list, read_messages, read_tools, read_variables, says_something
from outcore.data.sources import RowError

Row = Mapping[str, Any]
Columns = tuple[str, ...]
NO_LABEL = -100
"""The label without loss in transformers, TRL and axolotl."""


def text(row: Row, columns: Columns) -> TextExample:
    """Plain text."""
    return TextExample(_text(row, columns[0], takes_numbers=False))


def conversation(row: Row, columns: Columns) -> ChatExample:
    """Messages, in OpenAI's form or ShareGPT's, with the row's system prompt and tools."""
    messages, untrained = read_messages(row[columns[0]], columns[0])
    _check_answers(messages, f"column {columns[0]!r} has no assistant message")
    if (system := _system(row)) and messages[0]["role"] != "system":
        messages.insert(0, system)
        untrained = frozenset(number + 1 for number in untrained)
    return _chat(row, messages, untrained)


def alpaca(row: Row, columns: Columns) -> ChatExample:
    """An instruction with its input, the turns before it, and the output."""
    asked, told = _text(row, columns[0]), _text(row, columns[1])
    if not told.strip():
        raise RowError(f"column {columns[1]!r} is empty: nothing to learn from")
    for column in ("input", "context"):
        if row.get(column) is not None and (more := _text(row, column).strip()):
            asked = f"{asked}\n\n{more}"
    messages = [system] if (system := _system(row)) else []
    for question, answer in _history(row):
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": told}]
    return _chat(row, messages, frozenset())


def pair(row: Row, columns: Columns) -> Example:
    """A prompt and its completion: texts that are joined as they are, or messages."""
    prompt, completion = columns
    asked, told = message_list(row[prompt]), message_list(row[completion])
    if asked is None and told is None:
        question, answer = _text(row, prompt), _text(row, completion)
        if completion == "chosen" and question and answer.startswith(question):  # preference sets repeat the prompt
            answer = answer[len(question) :]
        if not answer.strip():
            raise RowError(f"column {completion!r} is empty: nothing to learn from")
        if row.get("context") is not None and (context := _text(row, "context").strip()):
            question = f"{context}\n\n{question}"
        return TextExample(answer, prompt=question)
    asked = [{"role": "user", "content": _text(row, prompt)}] if asked is None else asked
    told = [{"role": "assistant", "content": _text(row, completion)}] if told is None else told
    before, _ = read_messages(asked, prompt)
    after, untrained = read_messages(told, completion)
    repeated = _repeated(before, after, prompt, completion)
    if repeated:  # the prompt as the completion repeats it, with a system prompt that only stands there
        before, after = after[:repeated], after[repeated:]
        untrained = frozenset(number - repeated for number in untrained)
    _check_answers(after, f"column {completion!r} has no assistant message")
    if row.get("context") is not None and (context := _text(row, "context").strip()):
        before[-1] = {**before[-1], "content": f"{context}\n\n{before[-1]['content']}"}
    kept_out = {*range(len(before)), *(number + len(before) for number in untrained)}
    return _chat(row, [*before, *after], frozenset(kept_out))


def preference(row: Row, columns: Columns) -> Example:
    """The chosen answer; the prompt is what it has in common with the rejected one."""
    chosen, rejected = columns
    told, other = message_list(row[chosen]), message_list(row[rejected])
    if told is None or other is None:
        answer, worse = _text(row, chosen), _text(row, rejected)
        common = common_beginning([answer, worse])
        common = common[:-1] if common.endswith(" ") else common
        if not answer[len(common) :].strip():
            raise RowError(f"column {chosen!r} is no longer than what it shares with {rejected!r}: nothing to learn")
        return TextExample(answer[len(common) :], prompt=common)
    messages, untrained = read_messages(told, chosen)
    others, _ = read_messages(other, rejected)
    shared = len(list(takewhile(lambda both: both[0] == both[1], zip(messages, others))))
    _check_answers(messages[shared:], f"column {chosen!r} has no assistant message that {rejected!r} has not")
    return _chat(row, messages, untrained | frozenset(range(shared)))


def tokens(row: Row, columns: Columns) -> TokensExample:
    """Token ids, with labels or masks where the row has them."""
    ids = _whole_numbers(row, columns[0])
    kept = [True] * len(ids)
    loss = [True] * len(ids)
    for column in ("labels", "attention_mask", "assistant_masks", "completion_mask"):
        if row.get(column) is None:
            continue
        values = _whole_numbers(row, column, lowest=NO_LABEL)
        if len(values) != len(ids):
            raise RowError(f"column {column!r} has {len(values)} numbers for {len(ids)} tokens")
        if column == "attention_mask":
            kept = [value != 0 for value in values]
        elif column != "labels":
            loss = [has and value != 0 for has, value in zip(loss, values)]
        elif (wrong := _wrong_label(values, ids)) is not None:
            raise RowError(
                f"label {values[wrong]} at position {wrong} is neither {NO_LABEL} nor the token there ({ids[wrong]}): "
                "labels are not shifted, the model shifts them"
            )
        else:
            loss = [has and value != NO_LABEL for has, value in zip(loss, values)]
    chosen = [i for i, keep in enumerate(kept) if keep]
    return TokensExample([ids[i] for i in chosen], [loss[i] for i in chosen])


def _check_answers(messages: Sequence[Row], none: str) -> None:
    """RowError where there is no answer, with the words `none`, or where all of them are empty."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        raise RowError(f"{none}: nothing to learn from")
    if not any(says_something(message) for message in answers):
        raise RowError(f"{none} with words, reasoning or tool calls: nothing to learn from")


def _chat(row: Row, messages: list[dict[str, Any]], untrained: frozenset[int]) -> ChatExample:
    return ChatExample(messages, read_tools(row), untrained, read_variables(row))


def _system(row: Row) -> dict[str, Any] | None:
    words = "" if row.get("system") is None else _text(row, "system")
    return {"role": "system", "content": words} if words.strip() else None


def _history(row: Row) -> list[tuple[str, str]]:
    value = row.get("history")
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(f"column 'history' should hold pairs, found {shorten(value, 60)!r}") from error
    turns = []
    for turn in value or ():
        if not isinstance(turn, Sequence) or len(turn) != 2 or not all(isinstance(words, str) for words in turn):
            raise RowError(f"column 'history' should hold [question, answer] pairs, found {shorten(repr(turn), 60)}")
        turns.append((turn[0], turn[1]))
    return turns


def _repeated(before: Sequence[Row], after: Sequence[Row], prompt: str, completion: str) -> int:
    """Count the messages at the beginning of `after` that are the prompt again, as in sets of preferences."""
    leading = next((i for i, message in enumerate(after) if message["role"] == "assistant"), len(after))
    said = [(message["role"], message["content"].strip()) for message in before]
    told = [(message["role"], message["content"].strip()) for message in after]
    for length in (len(said), leading):
        if len(said) <= length <= len(told) and told[length - len(said) : length] == said:
            return length
    if any(role == "user" for role, _ in told[:leading]):
        raise RowError(
            f"column {completion!r} begins with a question of its own that is not the one in {prompt!r}: name the "
            f"column that holds the whole conversation with messages_column"
        )
    return 0


def _wrong_label(labels: Sequence[int], ids: Sequence[int]) -> int | None:
    """Position of the first label that is neither left out nor the token itself."""
    return next((i for i, (label, token) in enumerate(zip(labels, ids)) if label not in (NO_LABEL, token)), None)


def _text(row: Row, column: str, *, takes_numbers: bool = True) -> str:
    """A question, an answer or what belongs to one, which may be a number. RowError for what is no text."""
    value = as_text(row[column]) if takes_numbers else row[column]
    if not isinstance(value, str):
        found = "nothing (null)" if value is None else f"{type(value).__name__} {shorten(repr(value), 60)}"
        raise RowError(f"column {column!r} should hold text, found {found}")
    return value


def _whole_numbers(row: Row, column: str, lowest: int = 0) -> list[int]:
    value = row[column]
    if isinstance(value, str) and value.lstrip().startswith("["):  # a cell of a CSV
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RowError(f"column {column!r} should hold a list of numbers, found {shorten(value, 60)!r}") from error
    if not isinstance(value, list) or not all(isinstance(item, int) and item >= lowest for item in value):
        raise RowError(f"column {column!r} should hold a list of whole numbers, found {shorten(repr(value), 60)}")
    return [int(item) for item in value]

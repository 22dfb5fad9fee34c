"""A job: every line of a file answered once, whatever happens in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.common.quantities import counted
from outcore.infer.commands.journal import Journal
from outcore.infer.commands.lines import Line, numbered, read_line, result_of
from outcore.infer.opening import OpenedModel
from outcore.infer.requests import Answer, Grammars, Prompts, Sampling

AHEAD = 3
"""Requests under way at most: so many times the answers written at once."""
TELL_EVERY_S = 5.0


@dataclass
class JobCounts:
    """Counts of a job, and its seconds."""

    lines: int = 0
    from_journal: int = 0
    answer_tokens: int = 0
    seconds: float = 0.0


def run_job(
    opened: OpenedModel,
    source: Path,
    journal: Journal,
    defaults: Callable[[int], Sampling],
    model: str,
    progress: Callable[[str], None],
    wants: Callable[[int], bool] | None = None,
) -> JobCounts:
    """Answer all lines of `source` and write the output. `wants`: numbers of the lines that this process answers; the
    output is then left to who gathers the journals. ValueError."""
    began_s = last_s = time.monotonic()
    created = int(source.stat().st_mtime)
    prompts, engine = Prompts(opened.found.tokenizer), opened.engine
    grammars = Grammars(opened.found.tokenizer, engine.speech.end_tokens)
    counts = JobCounts(from_journal=len(journal.done))
    under_way: dict[str, tuple[Line, list[Answer]]] = {}
    ended: list[tuple[Line, list[Answer]]] = []
    most = AHEAD * opened.placement.max_sequences

    def answered(answer: Answer) -> None:
        line, answers = under_way[answer.request]
        answers.append(answer)
        assert line.request is not None
        if len(answers) == line.request.n:
            del under_way[answer.request]
            ended.append((line, answers))

    def note(line: Line, answers: list[Answer]) -> None:
        result = result_of(line, answers, prompts.tokenizer, model, created)
        counts.answer_tokens += sum(len(a.tokens) for a in answers)
        journal.add(line.number, result)

    lines = numbered(source)
    is_read = False
    while not is_read or under_way:
        while not is_read and len(under_way) < most:
            entry = next(lines, None)
            if entry is None:
                is_read = True
                break
            number, text = entry
            if wants is not None and not wants(number):
                continue
            counts.lines += 1
            if number in journal.done:
                continue
            line = read_line(number, text, prompts, grammars, defaults)
            if line.request is None:
                note(line, [])
                continue
            try:
                engine.check(line.request)
            except ValueError as error:
                note(Line(number, line.shape, line.name, None, str(error)), [])
                continue
            under_way[line.request.name] = (line, [])
            engine.submit(line.request, None, answered)
        engine.step()  # answers that a failed pass ended are not noted: the same command asks again
        for line, answers in ended:
            note(line, answers)
        ended.clear()
        if time.monotonic() - last_s > TELL_EVERY_S:
            last_s = time.monotonic()
            rate = counts.answer_tokens / max(1e-9, last_s - began_s)
            progress(f"{counted(len(journal.done), 'line')} done, {len(under_way):,} under way, {rate:.1f} tokens/s")
    if wants is None:
        journal.finish(counts.lines)
    counts.seconds = time.monotonic() - began_s
    return counts


def job_of(model: str, words: str, source: str, settings: Any, sampling: dict[str, Any]) -> dict[str, Any]:
    """Name everything that a job's results depend on."""
    return {"model": model, "found": words, "input": source, "settings": repr(settings), "sampling": sampling}

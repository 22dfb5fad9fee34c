"""A suite run task by task over one model that stays loaded: scores and documents, as the history keeps them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api import task as task_module
from lm_eval.evaluator import evaluate

from outcore.common.errors import line_of
from outcore.evaluate.harness.loading import load_tasks
from outcore.evaluate.settings import EvaluationError, EvaluationSettings

NUM_RESAMPLES = 100
"""Resamples of documents for standard errors that no formula gives; the harness's own number for its costly metrics."""
Record = dict[str, Any]
Lm = Any


def run_suite(
    lm: Lm,
    settings: EvaluationSettings,
    started: Callable[[str, int], None],
    scored: Callable[[str, list[Record], list[Record]], None],
    loaded: Mapping[str, Any] | None = None,
) -> None:
    """Run every task of the settings. `started` is told a task and its number, `scored` its scores and documents.
    `loaded`: the tasks, where they are already. EvaluationError for what a task needs and does not have."""
    loaded = load_tasks(settings) if loaded is None else loaded
    for number, (name, tasks) in enumerate(loaded.items()):
        started(name, number)
        for task in tasks["tasks"].values():
            _apply(task, settings)
        random.seed(settings.seed)
        np.random.seed(settings.seed % 2**32)
        bar, task_module.tqdm = task_module.tqdm, _quiet
        try:
            results = evaluate(
                lm,
                tasks,
                limit=settings.limit,  # pyright: ignore[reportArgumentType]  a share below 1 is taken too
                bootstrap_iters=NUM_RESAMPLES,
                system_instruction=settings.system_instruction,
                apply_chat_template=settings.apply_chat_template,
                fewshot_as_multiturn=settings.apply_chat_template,
            )
        except (KeyError, TypeError, IndexError, AttributeError) as error:
            raise EvaluationError(f"the task {name!r} failed: {line_of(error)}.", "tasks") from error
        finally:
            task_module.tqdm = bar
        assert results is not None
        scored(name, list(scores_of(results)), list(samples_of(results)))


def _apply(task: Any, settings: EvaluationSettings) -> None:
    """Settings over the task's own, by the harness's rules: a task that says no examples gets none."""
    own = task.get_config("num_fewshot")
    if settings.num_fewshot is not None and own != 0:
        task.set_config(key="num_fewshot", value=settings.num_fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    if settings.gen_kwargs and task.get_config("output_type") == "generate_until":
        task.set_config(key="generation_kwargs", value=dict(settings.gen_kwargs), update=True)
    task.set_fewshot_seed(seed=settings.seed)


def scores_of(results: Mapping[str, Any]) -> Iterator[Record]:
    """A record for each metric of each task and group."""
    better, versions, counts = results["higher_is_better"], results["versions"], results["n-samples"]
    for name, values in (results["results"] | results.get("groups", {})).items():
        for key, value in values.items():
            metric, _, filter_name = key.partition(",")
            if not filter_name or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = values.get(f"{metric}_stderr,{filter_name}")
            yield {
                "task": name,
                "version": str(versions.get(name, "")),
                "metric": metric,
                "filter": filter_name,
                "value": float(value),
                "stderr": float(error) if isinstance(error, (int, float)) else None,
                "documents": counts.get(name, {}).get("effective"),
                "higher_is_better": (better.get(name) or {}).get(metric),
            }


def samples_of(results: Mapping[str, Any]) -> Iterator[Record]:
    """A record for each document and filter: prompt, continuations, answers, metrics."""
    for task, samples in (results.get("samples") or {}).items():
        for sample in samples:
            arguments = sample["arguments"]
            first = [argument[0] for argument in arguments]
            yield {
                "task": task,
                "filter": sample["filter"],
                "doc_id": sample["doc_id"],
                "prompt": first[0],
                "continuations": [
                    str(argument[1]) for argument in arguments if len(argument) > 1 and isinstance(argument[1], str)
                ],
                "target": _plain(sample["target"]),
                "answers": [_answer(responses) for responses in sample["resps"]],
                "filtered": [_plain(one) for one in sample["filtered_resps"]],
                "metrics": {name: _metric(sample[name]) for name in sample["metrics"]},
            }


def _answer(responses: Sequence[Any]) -> Any:
    """[log-probability, likeliest], [log-probability], or the text (texts, where several were asked for)."""
    first = responses[0]
    if isinstance(first, (tuple, list)):
        return [float(first[0]), bool(first[1])]
    if isinstance(first, float):
        return [first]
    return first if len(responses) == 1 else list(responses)


def _metric(value: Any) -> Any:
    """A number; for a perplexity, whose documents have (log-likelihood, weight), the loss of a unit."""
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(x, (int, float)) for x in value):
        return -float(value[0]) / value[1] if value[1] else None
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (bool, int, float, str)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return str(value)


def _quiet(items: Any, *_: Any, **__: Any) -> Any:
    """Items without a bar on the terminal; progress is told elsewhere."""
    return items

"""Tasks by name: our own built in memory, the harness's from its index, with errors that say what is missing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from outcore.common.errors import line_of
from outcore.common.words import did_you_mean
from outcore.evaluate.settings import EvaluationError, EvaluationSettings
from outcore.evaluate.tasks import OWN_TASKS, Document, endings, files, sums, version_of

OWN_NAMES = tuple(task.name for task in OWN_TASKS)


def load_tasks(settings: EvaluationSettings) -> dict[str, Any]:
    """Each name of the settings -> what the harness's `evaluate` takes. EvaluationError."""
    from lm_eval.tasks import TaskManager

    needs_index = any(name not in OWN_NAMES for name in settings.tasks)
    manager = TaskManager(include_path=settings.include_path, include_defaults=needs_index)
    return {name: manager.load([_own(name)]) if name in OWN_NAMES else _known(name, manager) for name in settings.tasks}


def only_score(loaded: Mapping[str, Any]) -> bool:
    """Whether none of these tasks has answers written."""
    return not any(
        task.get_config("output_type") == "generate_until"
        for tasks in loaded.values()
        for task in tasks["tasks"].values()
    )


def _known(name: str, manager: Any) -> Any:
    """A task of the harness. EvaluationError when there is none, or its data cannot be had."""
    if name not in manager.task_index:
        near = did_you_mean(name, [*OWN_NAMES, *manager.all_tasks])
        raise EvaluationError(f"there is no task {name!r}.{near} `outcore evaluate --list_tasks` lists all.", "tasks")
    try:
        return manager.load([name])
    except Exception as error:  # a task's data set and its code are strangers' and may raise anything
        raise EvaluationError(
            f"the task {name!r} cannot be loaded: {line_of(error)}. Its data set comes from a hub: without a network "
            f"only tasks whose data lie in the cache work, and our own: {', '.join(OWN_NAMES)}.",
            "tasks",
        ) from error


def _own(name: str) -> Any:
    from lm_eval.api.task import ConfigurableTask

    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it explains to a task's author what the defaults are
    try:
        return ConfigurableTask(config=_CONFIGS[name]() | {"task": name})
    finally:
        logger.setLevel(level)


def _endings() -> dict[str, Any]:
    found = endings()
    return {
        **_data(found, found[-20:]),
        "output_type": "multiple_choice",
        "doc_to_text": "{{begins}}",
        "doc_to_choice": "{{endings}}",
        "doc_to_target": "right",
        "metric_list": [_mean("acc"), _mean("acc_norm")],
    }


def _stdlib() -> dict[str, Any]:
    found = files()
    metrics = ("word_perplexity", "byte_perplexity", "bits_per_byte")
    return {
        **_data(found, []),
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{page}}",
        "metric_list": [{"metric": name} for name in metrics],
    }


def _sums() -> dict[str, Any]:
    found = sums()
    return {
        **_data(found[50:], found[:50]),
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "num_fewshot": 5,
        "fewshot_delimiter": "\n",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "do_sample": False, "temperature": 0.0},
        "filter_list": [{"name": "number", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}],
        "metric_list": [_mean("exact_match")],
    }


_CONFIGS: dict[str, Callable[[], dict[str, Any]]] = {
    "outcore_endings": _endings,
    "outcore_stdlib": _stdlib,
    "outcore_sums": _sums,
}


def _mean(metric: str) -> dict[str, Any]:
    return {"metric": metric, "aggregation": "mean", "higher_is_better": True}


def _data(test: list[Document], examples: list[Document]) -> dict[str, Any]:
    """Splits held in memory; nothing is looked for anywhere."""
    from datasets import Dataset

    def splits(**_: Any) -> dict[str, Any]:
        return {"test": Dataset.from_list(test)} | ({"examples": Dataset.from_list(examples)} if examples else {})

    return {"custom_dataset": splits, "test_split": "test", "metadata": {"version": version_of(test)}} | (
        {"fewshot_split": "examples"} if examples else {}
    )

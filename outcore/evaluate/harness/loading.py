"""Tasks by name: our own built in memory, the harness's from its index, with errors that say what is missing.

What a task would run is read from its files before any of them is imported: tasks that run what a model writes are
refused, and those that fetch Python (metrics of the `evaluate` library, code of a hub) unless that is allowed."""

from __future__ import annotations

import ast
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from outcore.common.errors import line_of
from outcore.common.words import did_you_mean
from outcore.evaluate.settings import EvaluationError, EvaluationSettings
from outcore.evaluate.tasks import OWN_TASKS, Document, endings, files, sums, version_of

OWN_NAMES = tuple(task.name for task in OWN_TASKS)


def load_tasks(settings: EvaluationSettings, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Each name of the settings -> what the harness's `evaluate` takes. EvaluationError. `trust_remote_code`: whether
    tasks may fetch Python, which whoever sits at the command line decides and no request."""
    from lm_eval.tasks import TaskManager

    needs_index = any(name not in OWN_NAMES for name in settings.tasks)
    manager = TaskManager(include_path=settings.include_path, include_defaults=needs_index)
    found = {}
    for name in settings.tasks:
        if name in OWN_NAMES:
            found[name] = manager.load([_own(name)])
        else:
            found[name] = _known(name, manager, trust_remote_code)
    return found


def only_score(loaded: Mapping[str, Any]) -> bool:
    """Whether none of these tasks has answers written."""
    return not any(
        task.get_config("output_type") == "generate_until"
        for tasks in loaded.values()
        for task in tasks["tasks"].values()
    )


def _known(name: str, manager: Any, trust_remote_code: bool) -> Any:
    """A task of the harness. EvaluationError when there is none, it would run strangers' code, or its data cannot be
    had."""
    if name not in manager.task_index:
        near = did_you_mean(name, [*OWN_NAMES, *manager.all_tasks])
        raise EvaluationError(f"there is no task {name!r}.{near} `outcore evaluate --list_tasks` lists all.", "tasks")
    for task, config in _configs_in(name, manager.task_index, set()):
        _check_code(task, config, trust_remote_code)
    try:
        return manager.load([name])
    except Exception as error:  # a task's data set and its code are strangers' and may raise anything
        raise EvaluationError(
            f"the task {name!r} cannot be loaded: {line_of(error)}. Its data set comes from a hub: without a network "
            f"only tasks whose data lie in the cache work, and our own: {', '.join(OWN_NAMES)}.",
            "tasks",
        ) from error


def _configs_in(
    part: str | Mapping[str, Any], index: Mapping[str, Any], seen: set[str]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(name, its file as the harness's index has it, where a `!function` is a path) of a task, or of a group or tag
    and all in it."""
    tagged: list[str] = []
    if isinstance(part, str):
        if part not in index or part in seen:
            return
        seen.add(part)
        name, entry = part, index[part]
        config, tagged = entry.cfg or {}, [] if entry.cfg else sorted(entry.tags)
    else:  # written within its group
        name, config = str(part.get("group") or part.get("task")), part
    yield name, config
    own = config.get("task")
    for member in [*tagged, config.get("group"), *(own if isinstance(own, list) else [own])]:
        if isinstance(member, (str, Mapping)):
            yield from _configs_in(member, index, seen)


def _check_code(task: str, config: Mapping[str, Any], trust_remote_code: bool) -> None:
    """EvaluationError for a task that runs what a model writes, or fetches code that it was not allowed to."""
    if config.get("unsafe_code", False) is not False:
        raise EvaluationError(
            f"the task {task!r} runs the Python that the model writes. The harness's own command does so when told: "
            "python -m outcore.evaluate.lm_eval --model outcore --confirm_run_unsafe_code ...",
            "tasks",
        )
    if not trust_remote_code and (why := _fetched_code(config)):
        raise EvaluationError(
            f"the task {task!r} fetches and runs Python: {why}. `outcore evaluate MODEL --trust_remote_code` allows "
            "it; a request to a server cannot.",
            "tasks",
        )


def _fetched_code(config: Mapping[str, Any]) -> str:
    """Find a part of a task that is Python from a hub, or from the current folder; in words, '' for none."""
    from lm_eval.api import metrics
    from lm_eval.api.registry import metric_registry

    assert metrics  # it fills the registry
    for one in config.get("metric_list") or ():
        name = one.get("metric")
        is_path = isinstance(name, str) and "/" in name
        if one.get("hf_evaluate") or not (is_path or name in metric_registry or config.get("process_results")):
            return f"its metric {name!r} is a script"
    for path in _texts_in(config):
        folder, called = os.path.split(path)  # FOLDER/MODULE.FUNCTION, if it is one
        module = os.path.join(folder, called.rpartition(".")[0].replace(".", os.sep) + ".py")
        if folder and os.path.isfile(module) and _fetches(Path(module), set()):
            return f"{os.path.basename(module)} beside it loads a script"
    return ""


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list)):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(one)


def _fetches(file: Path, seen: set[Path]) -> bool:
    """Whether a module, or one beside it that it imports, imports the library that fetches metrics, or trusts the code
    of a hub."""
    if file in seen or not file.is_file():
        return False
    seen.add(file)
    imported, trusts = set[str](), False
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import) or (isinstance(node, ast.ImportFrom) and not node.module):
            imported |= {one.name.partition(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call) and "trust_remote_code" in [one.arg for one in node.keywords]:
            trusts |= not ast.unparse(node.func).endswith("load_dataset")  # which runs no code since datasets 4
    return trusts or "evaluate" in imported or any(_fetches(file.with_name(f"{name}.py"), seen) for name in imported)


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

"""A suite run task by task over one model that stays loaded: scores and documents, as the history keeps them.

Our engine as a model of lm-evaluation-harness: its questions become tokens here and go to the desk.

Tokens are cut as the harness's own Hugging Face backend cuts them (where the start token goes, what is left out of a
prompt that is too long), so that scores can be compared document by document. Its windows are one token shorter than
the model's context."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api import task as task_module
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from outcore.common.errors import line_of
from outcore.evaluate.asking import PORTION_TOKENS, Desk, EngineAnswerer, ScoreQuestion, WriteQuestion
from outcore.evaluate.harness.loading import load_tasks
from outcore.evaluate.settings import EvaluationError, EvaluationSettings
from outcore.infer.opening import InferSettings, OpenedModel, open_engine
from outcore.infer.requests import derived_seed, seed_of

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


MAX_STOPS = 16
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class OutcoreLM(TemplateLM):
    """`--model outcore`. With `desk` the model is opened already; else `pretrained` is opened with what
    `outcore generate` has flags for (preset, ram_gib, nvme_offload_path, adapter, ...)."""

    def __init__(
        self,
        pretrained: str = "",
        desk: Desk | None = None,
        opened: OpenedModel | None = None,
        seed: int = 1234,
        starting: Callable[[str, Sequence[tuple[str, int]]], None] = lambda stage, documents: None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if opened is None:
            opened = open_engine(pretrained, infer_settings(settings))
        self.opened, self.tokenizer, self.seed = opened, opened.found.tokenizer, seed
        answerer = EngineAnswerer(opened)
        self.desk = desk or Desk(answerer, None, PORTION_TOKENS[opened.device.type])
        self.max_length = answerer.max_length
        self._starting = starting

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else start

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None:
            start = self.tokenizer.decode([self.prefix_token_id])
            return self.tokenizer.encode(string, **({"add_special_tokens": False} if string.startswith(start) else {}))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        self._starting("tokenizing", _documents(requests))
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        answers = self.desk.ask(
            [ScoreQuestion(tuple(context), tuple(continuation)) for _, context, continuation in requests]
        )
        found = [(float(logprob), bool(likeliest)) for logprob, likeliest in answers]
        for (texts, _, _), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        windows: list[tuple[int, ScoreQuestion]] = []
        for number, request in enumerate(requests):
            cut = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for pair in cut:
                context, continuation = make_disjoint_window(pair)
                windows.append((number, ScoreQuestion(tuple(context), tuple(continuation))))
        documents = _documents(requests)
        self._starting("tokenizing", [documents[number] for number, _ in windows])
        totals = [0.0] * len(requests)
        for (number, _), (logprob, _) in zip(windows, self.desk.ask([q for _, q in windows]), strict=True):
            totals[number] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        self._starting("tokenizing", _documents(requests))
        end = self.tokenizer.decode([self.eot_token_id], skip_special_tokens=False)
        asked: dict[tuple[str, str], int] = {}
        questions, stops = [], []
        for request in requests:
            prompt, given = request.args[0], normalize_gen_kwargs(request.args[1])
            until = [stop for stop in handle_stop_sequences(given.pop("until", None), eos=end) if stop]
            place = (prompt, repr(sorted(given.items(), key=str)))
            repeat = asked[place] = asked.get(place, -1) + 1
            questions.append(self._written(prompt, given, until, repeat if given.get("do_sample") else 0))
            stops.append(until)
        texts = [
            postprocess_generated_text(text, stop=until, think_end_token=None)
            for text, until in zip(self.desk.ask(questions), stops, strict=True)
        ]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _written(self, prompt: str, given: Mapping[str, Any], until: Sequence[str], repeat: int) -> WriteQuestion:
        room = self.max_length - int(given["max_gen_toks"])
        if room < 1:
            raise EvaluationError(
                f"an answer may have {given['max_gen_toks']} tokens, and the context is {self.max_length + 1}. Give a "
                "larger --context, or --gen_kwargs '{\"max_gen_toks\": N}'.",
                "gen_kwargs",
            )
        tokens = tuple(self.tok_encode(prompt)[-room:])
        sampling: dict[str, Any] = {name: given[name] for name in SAMPLING if given.get(name) is not None}
        if not given.get("do_sample"):
            sampling = {"temperature": 0.0} | {k: v for k, v in sampling.items() if k.endswith("penalty")}
        sampling |= {"max_tokens": int(given["max_gen_toks"]), "stop": list(until[:MAX_STOPS])}
        sampling["seed"] = derived_seed(seed_of(f"{self.seed} {prompt}"), repeat)
        return WriteQuestion(tokens, sampling, repeat)


def infer_settings(given: Mapping[str, Any]) -> InferSettings:
    """Settings from the harness's `--model_args`; what the harness adds of its own accord is left out. ValueError."""
    own = {
        "nvme_path" if name == "nvme_offload_path" else name: value
        for name, value in given.items()
        if name not in ("batch_size", "max_batch_size") and value is not None
    }
    try:
        return InferSettings(**{"deterministic": True, **own})
    except TypeError as error:
        raise ValueError(f"--model_args: {error}.") from None


def register() -> None:
    """Tell the harness of the model `outcore`."""
    import lm_eval.models  # noqa: F401  the harness fills its registry only while it is empty
    from lm_eval.api.registry import model_registry

    if "outcore" not in model_registry:
        model_registry.register("outcore", target=OutcoreLM)


def _documents(requests: Sequence[Any]) -> list[tuple[str, int]]:
    return [(str(request.task_name), int(request.doc_id or 0)) for request in requests]

"""Our engine as a model of lm-evaluation-harness: its questions become tokens here and go to the desk.

Tokens are cut as the harness's own Hugging Face backend cuts them (where the start token goes, what is left out of a
prompt that is too long), so that scores can be compared document by document. Its windows are one token shorter than
the model's context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from outcore.evaluate.asking import PORTION_TOKENS, Desk, EngineAnswerer, ScoreQuestion, WriteQuestion
from outcore.evaluate.settings import EvaluationError
from outcore.infer.opening import InferSettings, OpenedModel, open_engine
from outcore.infer.requests import derived_seed, seed_of

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

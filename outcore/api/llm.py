"""`outcore.LLM`: a model of any size that answers in a Python program, by the names that vLLM's users know.

    with outcore.LLM("Qwen/Qwen3-8B", quantize="nf4", vram_gib=6.5) as llm:
        outputs = llm.generate(["Once upon a time"], temperature=0, max_tokens=32)
        print(outputs[0].outputs[0].text)

Passes run on a thread of the engine's own, so any thread may call, several at a time, and Ctrl-C in a call ends that
call alone: its answers are cancelled, and the model goes on answering. What an answer is made from (prompts, sampling,
forms, tools) is understood as in a line of `outcore generate --input`."""

from __future__ import annotations

import itertools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from queue import SimpleQueue
from typing import Any

from outcore.api.outputs import (
    Classification,
    ClassificationOutput,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingVector,
    RequestOutput,
    RerankOutput,
    ScoreOutput,
    completion_of,
)
from outcore.api.settings import check_known, infer_settings
from outcore.common.classes import Closing
from outcore.common.output import printable
from outcore.infer import Answer, EngineThread, Labels, Piece, Request
from outcore.infer.chats import CHAT_FIELDS, Chat
from outcore.infer.commands import AHEAD, groups_of, sampling_from, scored_tokens, understand
from outcore.infer.opening import InferSettings, OpenedModel, open_engine
from outcore.infer.requests import KNOWN, Grammars, Prompts, Sampling, sampling_of

logger = logging.getLogger("outcore")
ABOUT_ANSWERS = KNOWN | {"n", "response_format"}
"""Fields that a call may set beside its prompts."""
Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, its tokens, or vLLM's {"prompt": ...} and {"prompt_token_ids": ...}."""
Said = Mapping[str, Any]
"""Fields about sampling."""


class SamplingParams(dict[str, Any]):
    """Sampling settings, by the names of OpenAI's and vLLM's fields: `SamplingParams(temperature=0.8, max_tokens=64,
    n=2)`. Fields left out follow the model's generation config. Raises ValueError for bad values."""

    def __init__(self, **said: Any) -> None:
        super().__init__(said)
        check_known(said, ABOUT_ANSWERS)
        sampling_of(said, Sampling())


class LLM(Closing):
    """A model that answers; close it, or use `with`. ValueError (also where it does not fit what is free) or
    RuntimeError, in words."""

    def __init__(self, model: str | os.PathLike[str], config: InferSettings | None = None, **settings: Any) -> None:
        self.config = infer_settings(config, settings)
        self._opened = open_engine(str(model), self.config, logger.info)
        self._engine = self._opened.engine
        tokenizer, ends = self._opened.found.tokenizer, self._engine.speech.end_tokens
        self._prompts, self._grammars = Prompts(tokenizer), Grammars(tokenizer, ends)
        if self._prompts.note:
            logger.info(self._prompts.note)
        self._defaults = sampling_from(self._opened, {})
        self._numbers = itertools.count(1)
        thread = EngineThread(self._engine)
        thread.start()
        self._end = weakref.finalize(self, _close, thread, self._opened)

    # --- what is asked

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Said | Sequence[Said] | None = None, **sampling: Any
    ) -> list[RequestOutput]:
        """Texts that go on from the prompts, in their order. `sampling_params`: of all, or one for each; `sampling`:
        the same as keywords, which win. Where nobody says `max_tokens`, the context is the limit."""
        asked = [_prompt_body(prompt) for prompt in _listed(prompts, _is_prompt)]
        return self._answered(asked, _said(sampling_params, sampling, len(asked)))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: Said | Sequence[Said] | None = None,
        **fields: Any,
    ) -> list[RequestOutput]:
        """Answers to a conversation, or to several. `fields`: about sampling, and what a request to
        /v1/chat/completions may have: tools, tool_choice, response_format, chat_template_kwargs. An answer's thoughts
        and calls of tools are in its `message`."""
        asked = [_chat_body(talk) for talk in _listed(messages, _is_talk)]
        return self._answered(asked, _said(sampling_params, fields, len(asked), CHAT_FIELDS))

    def stream(
        self,
        prompt: Prompt | Sequence[Mapping[str, Any]],
        sampling_params: Said | None = None,
        **fields: Any,
    ) -> Iterator[CompletionOutput]:
        """Yield what each pass adds to the answer to one prompt or conversation, as it comes; the last piece has a
        `finish_reason`. Whoever leaves the loop cancels the rest."""
        is_talk = _is_talk(prompt)
        asked = _chat_body(prompt) if is_talk else _prompt_body(prompt)
        (said,) = _said(sampling_params, fields, 1, CHAT_FIELDS if is_talk else ())
        return self._pieces(*self._understood(asked | said))

    def score(self, prompts: str | Sequence[str], completions: str | Sequence[str] | None = None) -> list[ScoreOutput]:
        """Score how likely texts are to the model: each prompt as a whole, or the completion behind it."""
        texts = _listed(prompts, _is_text)
        behind = None if completions is None else _listed(completions, _is_text)
        if behind is not None and len(behind) != len(texts):
            raise ValueError(f"there are {len(texts)} prompts and {len(behind)} completions: give one for each.")
        pairs = [("", text) for text in texts] if behind is None else list(zip(texts, behind, strict=True))
        ids, counted_of = scored_tokens(pairs, self._prompts)
        self._engine.check_texts(ids)  # all of them, before hours of work
        found: list[Any] = []
        for group in groups_of(ids):
            found += self._told(lambda told, group=group: self._engine.submit_texts(group, 1, told))
        return [
            ScoreOutput("".join(pair), tuple(tokens), tuple(compress(scores.logprobs.tolist(), counts)))
            for pair, tokens, counts, scores in zip(pairs, ids, counted_of, found, strict=True)
        ]

    def embed(self, prompts: str | Sequence[str]) -> list[EmbeddingOutput]:
        """A vector of length one for each text: the mean of its tokens' last hidden states, or what the model says."""
        texts = _listed(prompts, _is_text)
        ids = self._prompts.of_texts(texts)
        vectors = self._told(lambda told: self._engine.submit_embeddings(ids, told))
        return [
            EmbeddingOutput(text, tokens, EmbeddingVector(vector.tolist()))
            for text, tokens, vector in zip(texts, ids, vectors, strict=True)
        ]

    def classify(self, prompts: str | Sequence[str]) -> list[ClassificationOutput]:
        """Labels of each text, by a model whose head classifies (AutoModelForSequenceClassification)."""
        texts = _listed(prompts, _is_text)
        ids = self._prompts.of_texts(texts)
        labels, found = self._labels(ids)
        return [
            ClassificationOutput(text, tokens, Classification(labels.names[probs.index(max(probs))], probs))
            for text, tokens, probs in zip(texts, ids, found, strict=True)
        ]

    def rerank(self, query: str, documents: str | Sequence[str]) -> list[RerankOutput]:
        """Documents by their relevance to the query, the best first, by a model whose head has one label."""
        texts = _listed(documents, _is_text)
        ids = self._prompts.of_pairs(query, texts)
        labels, found = self._labels(ids)
        if len(labels.names) != 1:
            raise ValueError(f"this model tells {len(labels.names)} labels apart; one that reranks has one.")
        outputs = [RerankOutput(number, texts[number], score) for number, (score,) in enumerate(found)]
        return sorted(outputs, key=lambda output: -output.relevance_score)

    # --- what it is

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._opened.found.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""
        return self._engine.max_tokens

    @property
    def lines(self) -> list[str]:
        """Placement for people: what lives where, and why."""
        return self._opened.placement.lines()

    def close(self) -> None:
        """Cancel what is under way and let model, memory and drives go; a second time does nothing."""
        self._end()

    # --- parts

    def _check_open(self) -> None:
        if not self._end.alive:
            raise RuntimeError("this LLM is closed. Open the model again.")

    def _understood(self, body: Mapping[str, Any]) -> tuple[Request, Chat | None]:
        self._check_open()
        name = f"call-{next(self._numbers)}"
        request, chat = understand(body, name, self._prompts, self._grammars, self._defaults)
        self._engine.check(request)
        return request, chat

    def _answered(self, asked: Sequence[Said], said: Sequence[Said]) -> list[RequestOutput]:
        """All of them understood before the first is answered, then answered in one job."""
        understood = [self._understood({**body, **more}) for body, more in zip(asked, said, strict=True)]
        answers = self._run([request for request, _ in understood])
        return [
            RequestOutput(
                body.get("prompt") if isinstance(body.get("prompt"), str) else None,
                request.prompt,
                [completion_of(answer, chat) for answer in sorted(answers[request.name], key=lambda a: a.choice)],
            )
            for body, (request, chat) in zip(asked, understood, strict=True)
        ]

    def _run(self, requests: Sequence[Request]) -> dict[str, list[Answer]]:
        found: dict[str, list[Answer]] = {request.name: [] for request in requests}
        waiting, ended = iter(requests), SimpleQueue[Answer]()
        with self._cancelling() as under_way:
            for request in itertools.islice(waiting, AHEAD * self._opened.placement.max_sequences):
                self._submit(request, under_way, None, ended.put)
            while under_way:
                answer = _whole(ended.get())
                found[answer.request].append(answer)
                if len(found[answer.request]) == under_way[answer.request].n:
                    del under_way[answer.request]
                    if (request := next(waiting, None)) is not None:
                        self._submit(request, under_way, None, ended.put)
        return found

    def _pieces(self, request: Request, chat: Chat | None) -> Iterator[CompletionOutput]:
        parsers = [chat.parser(f"{request.name}-{choice}") if chat else None for choice in range(request.n)]
        heard, left = SimpleQueue[Piece | Answer](), request.n
        with self._cancelling() as under_way:
            self._submit(request, under_way, heard.put, heard.put)
            while left:
                item = heard.get()
                if isinstance(item, Answer):
                    left -= 1
                    _whole(item)
                elif item.finish not in ("error", "cancelled"):
                    yield completion_of(item, parser=parsers[item.choice])
            under_way.clear()

    def _submit(
        self,
        request: Request,
        under_way: dict[str, Request],
        on_piece: Callable[[Piece], None] | None,
        on_answer: Callable[[Answer], None],
    ) -> None:
        under_way[request.name] = request
        self._engine.submit(request, on_piece, on_answer)
        self._check_open()  # closed meanwhile, by another thread: nobody would answer

    @contextmanager
    def _cancelling(self) -> Iterator[dict[str, Request]]:
        """Requests under way by name; those that are left when the caller goes, or is interrupted, are cancelled."""
        under_way: dict[str, Request] = {}
        try:
            yield under_way
        finally:
            for name in under_way:
                self._engine.cancel(name)

    def _labels(self, ids: Sequence[tuple[int, ...]]) -> tuple[Labels, list[list[float]]]:
        """The model's labels, and how likely each is for each text."""
        scores = self._told(lambda told: self._engine.submit_labels(ids, told))
        labels = self._engine.speech.labels
        assert labels is not None  # else it was refused
        return labels, [labels.probabilities(of_text) for of_text in scores]

    def _told(self, ask: Callable[[Callable[[Any], None]], None]) -> Any:
        """Wait for what the engine's thread gives to the callback handed to `ask`; raise it where it is an error."""
        heard = SimpleQueue[Any]()
        ask(heard.put)
        self._check_open()
        found = heard.get()
        if isinstance(found, Exception):
            raise found
        return found


def _close(thread: EngineThread, opened: OpenedModel) -> None:
    if thread.stop():  # a pass that takes longer reads what closing would let go
        opened.close()


def _whole(answer: Answer) -> Answer:
    """The answer. RuntimeError for one that failed or was cancelled."""
    if answer.finish == "cancelled":
        raise RuntimeError("the answer was cancelled: the model was closed meanwhile.")
    if answer.finish == "error":
        raise RuntimeError(printable(answer.error))
    return answer


def _is_text(item: Any) -> bool:
    return isinstance(item, str)


def _is_prompt(item: Any) -> bool:
    tokens = isinstance(item, Sequence) and bool(item) and all(type(token) is int for token in item)
    return tokens or isinstance(item, str | Mapping)


def _is_talk(item: Any) -> bool:
    return isinstance(item, Sequence) and bool(item) and all(isinstance(message, Mapping) for message in item)


def _listed(items: Any, is_one: Callable[[Any], bool]) -> list[Any]:
    """Several, where one may stand for a list of one. TypeError for what is neither."""
    found = [items] if is_one(items) else list(items)
    for item in found:
        if not is_one(item):
            raise TypeError(f"{item!r} is none of what this call takes, nor a list of it.")
    return found


def _prompt_body(prompt: Any) -> dict[str, Any]:
    if isinstance(prompt, Mapping):
        check_known(prompt, ("prompt", "prompt_token_ids"))
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
    return {"prompt": prompt if isinstance(prompt, str) or prompt is None else list(prompt)}


def _chat_body(messages: Any) -> dict[str, Any]:
    return {"messages": [dict(message) for message in messages]}


def _said(
    params: Said | Sequence[Said] | None, more: Said, count: int, beside: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Fields about each of so many answers. ValueError for unknown ones, or for another number of them."""
    each = [params or {}] * count if params is None or isinstance(params, Mapping) else list(params)
    if len(each) != count:
        raise ValueError(f"there are {count} prompts and {len(each)} sampling_params: give one, or one for each.")
    for said in (*each, more):
        check_known(said, {*ABOUT_ANSWERS, *beside})
    return [{**said, **more} for said in each]

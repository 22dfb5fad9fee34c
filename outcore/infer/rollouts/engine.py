"""The engine over a model that somebody trains: transformers' own modules, streamed by `outcore.hf`, over our pages.

A pass is one call of the model with all its tokens in one row, so the layers' weights cross once for all answers, from
the homes where the optimizer changes them: there is no second copy. While the engine is open the model's attention is
ours; then the model is as it was, and the keys and values are gone. Nothing that is measured decides, so the same
requests give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from outcore.infer.attention import PagedAttention
from outcore.infer.cache import CacheSettings, GroupPlan, KvCache, KvMemory
from outcore.infer.engine import InferenceEngine, Speech
from outcore.infer.opening import PagedLayers, implementations_of, use_attention
from outcore.infer.passes import Found, TextScores, lay_out
from outcore.infer.requests import Answer, Request, Sampling
from outcore.infer.schedule import ScheduleLimits, Scheduler, Work
from outcore.model.forward import Pooling
from outcore.sizing.streaming import ROLLOUT_PASS_TOKENS
from outcore.staging.pool import SmallCopies

PAGE_TOKENS = 16


def group_pages(prompt_tokens: int, answers: int, answer_tokens: int) -> int:
    """Pages of a prompt and of all its answers, whole pages of the prompt once."""
    return -(-prompt_tokens // PAGE_TOKENS) + answers * (-(-answer_tokens // PAGE_TOKENS) + 1)


class StreamedRunner:
    """Runner over `layers` of `model`. `on_close`: gives the model back as it was."""

    can_step_back = True
    is_usual = True

    def __init__(
        self, model: Any, layers: Sequence[torch.nn.Module], attention: PagedAttention, on_close: Callable[[], None]
    ) -> None:
        self.copies, self._model, self._attention = SmallCopies(model.device), model, attention
        self._on_close = on_close
        self._hooks = [
            layer.register_forward_hook(lambda *_, at=at: attention.moved(at, 0)) for at, layer in enumerate(layers)
        ]

    def run(self, works: Sequence[Work]) -> Found:
        (row,) = lay_out(works, sum(work.count for work in works), None)
        wanted = row.wanted
        # What modules keep of a call (factors of positions) is read in training, which takes no inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            batch, places = row.batch(self.copies), self.copies.to(torch.tensor(wanted or [0], dtype=torch.long))
            self._attention.begin([row.tables(PAGE_TOKENS, self.copies)])
            logits = self._model(**batch, use_cache=False, logits_to_keep=places).logits[0]
        complete = [work for work, _ in row.works if work.is_last]
        return list(zip(complete, logits[: len(wanted)].split(1), strict=False))

    def score(self, texts: Sequence[Sequence[int]], num_top: int = 1) -> list[TextScores]:
        raise NotImplementedError  # the engine refuses texts (`Speech.scores`)

    def embed(self, texts: Sequence[Sequence[int]], pooling: Pooling = "mean") -> list[torch.Tensor]:
        raise NotImplementedError  # the engine refuses texts (`Speech.scores`)

    def label(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        raise NotImplementedError  # the engine refuses texts (`Speech.scores`)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._attention.close()
        self._on_close()


@contextmanager
def streamed_engine(model: Any, paged: PagedLayers, speech: Speech, num_pages: int) -> Iterator[InferenceEngine]:
    """Answer with a model that `outcore.hf` streams; nothing of the engine stays when the context ends."""
    before, was_training = implementations_of(model), model.training
    groups = tuple(GroupPlan(window, num_pages) for window in paged.kept.shapes)
    cache = KvCache(CacheSettings(groups, PAGE_TOKENS, model.dtype), KvMemory(model.device))
    attention = PagedAttention(cache)

    def give_back() -> None:
        cache.stores.clear()
        for put_back in before:
            put_back()
        model.train(was_training)

    use_attention(model, attention.name)
    runner = StreamedRunner(model.eval(), paged.layers, attention, give_back)
    limits = ScheduleLimits(num_pages, ROLLOUT_PASS_TOKENS, ROLLOUT_PASS_TOKENS, 0, is_deterministic=True)
    engine = InferenceEngine(runner, Scheduler(cache, limits), speech, speculates=False, clock=lambda: 0.0)
    try:
        yield engine
    finally:
        engine.close()


def groups_of_answers(
    engine: InferenceEngine, prompts: Sequence[tuple[str, Sequence[int]]], answers: int, sampling: Sampling
) -> list[list[Answer]]:
    """Answers to each (name, prompt), `answers` of them, each drawn by its own number under the name. A prompt is read
    once: its other answers begin when its pages are there. RuntimeError for an answer that failed."""
    found: dict[str, Answer] = {}

    def submit(numbers: range) -> None:
        for name, prompt in prompts:
            for number in numbers:
                request = Request(f"{name}/{number}", tuple(prompt), sampling)
                engine.submit(request, on_answer=lambda answer: found.update({answer.request: answer}))

    submit(range(1))
    queue = engine.scheduler
    while engine.step() and (queue.waiting or not all(sequence.is_writing for sequence in queue.running)):
        pass
    submit(range(1, answers))
    while engine.step():
        pass
    if failed := next((answer for answer in found.values() if answer.finish == "error"), None):
        raise RuntimeError(f"an answer could not be computed: {failed.error}")
    return [[found[f"{name}/{number}"] for number in range(answers)] for name, _ in prompts]

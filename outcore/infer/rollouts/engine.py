"""The engine over a model that somebody trains: transformers' own modules, streamed by `outcore.hf`, over our pages.

A pass is one call of the model with all its tokens in one row, so the layers' weights cross once for all answers, from
the homes where the optimizer changes them; those of as many layers as fit stay on the device while the engine is open.
Then they and the keys and values are gone, and the model, whose attention was ours, is as it was. Nothing that is
measured changes a result: the same requests give the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import outcore.hf
from outcore.infer.attention import PagedAttention
from outcore.infer.cache import CacheSettings, GroupPlan, KvCache, KvMemory
from outcore.infer.engine import InferenceEngine, Speech
from outcore.infer.opening import PagedLayers, implementations_of, use_attention
from outcore.infer.passes import StreamedRunner
from outcore.infer.requests import Answer, Request, Sampling
from outcore.infer.schedule import ScheduleLimits, Scheduler
from outcore.sizing.streaming import ROLLOUT_PASS_TOKENS

PAGE_TOKENS = 16


def group_pages(prompt_tokens: int, answers: int, answer_tokens: int) -> int:
    """Pages of a prompt and of all its answers, whole pages of the prompt once."""
    return -(-prompt_tokens // PAGE_TOKENS) + answers * (-(-answer_tokens // PAGE_TOKENS) + 1)


@contextmanager
def streamed_engine(model: Any, paged: PagedLayers, speech: Speech, num_pages: int) -> Iterator[InferenceEngine]:
    """Answer with a model that `outcore.hf` streams; nothing of the engine stays when the context ends."""
    before, was_training = implementations_of(model), model.training
    groups = tuple(GroupPlan(window, num_pages) for window in paged.kept.shapes)
    cache = KvCache(CacheSettings(groups, PAGE_TOKENS, model.dtype), KvMemory(model.device))
    attention = PagedAttention(cache)

    def give_back() -> None:
        attention.close()
        cache.stores.clear()
        for put_back in before:
            put_back()
        model.train(was_training)

    kv_bytes = num_pages * PAGE_TOKENS * paged.token_bytes(model.dtype)
    with ExitStack() as opened:
        opened.callback(give_back)
        all_stay = opened.enter_context(outcore.hf.staying(model, kv_bytes))
        use_attention(model, attention.name)
        is_captured = all_stay and model.device.type == "cuda"
        runner = StreamedRunner(model.eval(), paged.layers, attention, is_captured=is_captured)
        limits = ScheduleLimits(num_pages, ROLLOUT_PASS_TOKENS, ROLLOUT_PASS_TOKENS, 0, is_deterministic=True)
        engine = InferenceEngine(runner, Scheduler(cache, limits), speech, speculates=False, clock=lambda: 0.0)
        opened.callback(engine.close)
        yield engine


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

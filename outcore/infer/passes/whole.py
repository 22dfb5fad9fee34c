"""Sequences by themselves, each with the model's own cache: for layers whose tokens meet elsewhere than in attention.

Recurrent states, convolutions and biases by position belong to one sequence and cannot be cut into pages. Weights still
come once a pass for all sequences; each is a call of its own. A sequence's states are kept whole beside its pages,
which only count: they hold nothing. Prompts are not cut: many of these models begin anew with every chunk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache

from outcore.flow import Call, Flow, Want
from outcore.infer.passes.rows import lay_out_texts
from outcore.infer.passes.runner import Found, RunnerLimits, TakeVectors, grouped, label, pool
from outcore.infer.passes.scores import Scores, TextScores
from outcore.infer.schedule import Work
from outcore.model import LoadedModel
from outcore.model.forward import Pooling, accepted_names
from outcore.staging.pool import SmallCopies


class WholeRunner:
    """Runner for models whose sequences cannot share rows."""

    can_step_back = False
    is_usual = True

    def __init__(self, flow: Flow, loaded: LoadedModel, limits: RunnerLimits, device: torch.device) -> None:
        self.flow, self.limits, self.device, self.copies = flow, limits, device, SmallCopies(device)
        self._config = loaded.config
        names, takes_any = accepted_names(flow.units.parts.decoder)
        self._takes_positions = "position_ids" in names or takes_any
        self._takes_mask = "attention_mask" in names
        self._cache_name = "cache_params" if "cache_params" in names else "past_key_values"

    def run(self, works: Sequence[Work]) -> Found:
        calls = [self._call(work) for work in works]
        found: Found = []
        for output in self.flow.run(calls):
            if output.logits is not None:
                found.append((works[output.number], output.logits))
        return found

    def _call(self, work: Work) -> Call:
        assert not work.num_drafts, "states cannot be taken back"
        pages = work.sequence.pages
        assert pages is not None
        if work.start == 0 or pages.states is None:
            pages.states = DynamicCache(config=self._config)
        batch = {"input_ids": self.copies.to(torch.tensor([work.tokens]))}
        if self._takes_positions:
            batch["position_ids"] = torch.arange(work.start, work.start + work.count, device=self.device)[None]
        inputs: dict[str, Any] = {self._cache_name: pages.states, "use_cache": True}
        if self._takes_mask:  # some models count positions by it
            inputs["attention_mask"] = torch.ones((1, work.start + work.count), dtype=torch.long, device=self.device)
        return Call(batch, "logits" if work.is_last else "nothing", inputs=inputs)

    def score(self, texts: Sequence[Sequence[int]], num_top: int = 1) -> list[TextScores]:
        scores, calls = Scores(len(texts), self.device), lay_out_texts(texts, 1)  # each text has a call of its own
        for group in grouped(calls, self.limits.score_tokens):
            batches = []
            for call in group:
                batch = call.batch(self.copies)
                batch.pop("position_ids")
                batches.append(Call(batch, "logprobs", num_top=num_top))
            scores.bring(group, list(self.flow.run(batches)))
        return scores.all()

    def embed(self, texts: Sequence[Sequence[int]], pooling: Pooling = "mean") -> list[torch.Tensor]:
        return self._of_texts(texts, "hidden", partial(pool, pooling))

    def label(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return self._of_texts(texts, "labels", label)

    def _of_texts(self, texts: Sequence[Sequence[int]], want: Want, take: TakeVectors) -> list[torch.Tensor]:
        found: list[torch.Tensor] = [torch.zeros(0) for _ in texts]
        for group in grouped(lay_out_texts(texts, 1), self.limits.score_tokens):
            batches = [
                Call({"input_ids": call.batch(self.copies)["input_ids"]}, want, call.ends(self.copies))
                for call in group
            ]
            for output in self.flow.run(batches):
                take(group[output.number].texts, output, found)
        return found

    def close(self) -> None:
        return

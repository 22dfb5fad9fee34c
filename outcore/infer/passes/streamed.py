"""Passes of a model that is streamed as a whole: transformers' own modules over our pages.

A pass is one call of the model with all its tokens in one row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outcore.infer.attention import PagedAttention
from outcore.infer.cache import PassTables
from outcore.infer.cache.tables import RowTables
from outcore.infer.passes.answers import AnswerPasses
from outcore.infer.passes.rows import lay_out
from outcore.infer.passes.runner import Found, WritesOnly
from outcore.infer.schedule import Work
from outcore.staging.pool import SmallCopies


class StreamedRunner(WritesOnly):
    """Runner over `layers` of `model`. `is_captured`: passes of single tokens become CUDA graphs. Who makes it gives
    the model and `attention` back."""

    can_step_back = True
    is_usual = True

    def __init__(
        self, model: Any, layers: Sequence[torch.nn.Module], attention: PagedAttention, *, is_captured: bool
    ) -> None:
        assert attention.cache is not None
        self.copies, self._model, self._attention = SmallCopies(model.device), model, attention
        self._page_tokens = attention.cache.settings.page_tokens
        self._answers = AnswerPasses(self._single, attention.cache, self.copies, is_captured=is_captured)
        self._hooks = [
            layer.register_forward_hook(lambda *_, at=at: attention.moved(at, 0)) for at, layer in enumerate(layers)
        ]

    def run(self, works: Sequence[Work]) -> Found:
        # What modules keep of a call (factors of positions) is read in training, which takes no inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            found = self._answers.run(works)
            return self._run_rows(works) if found is None else found

    def _run_rows(self, works: Sequence[Work]) -> Found:
        (row,) = lay_out(works, sum(work.count for work in works), None)
        wanted = row.wanted
        places = self.copies.to(torch.tensor(wanted or [0], dtype=torch.long))
        logits = self._logits(row.batch(self.copies), places, row.tables(self._page_tokens, self.copies))
        complete = [work for work, _ in row.works if work.is_last]
        return list(zip(complete, logits[: len(wanted)].split(1), strict=False))

    def _single(self, tables: RowTables) -> torch.Tensor:
        tables.work_out()
        return self._logits({"input_ids": tables.ids, "position_ids": tables.positions}, tables.wanted, tables)

    def _logits(
        self, batch: dict[str, torch.Tensor], places: torch.Tensor, tables: PassTables | RowTables
    ) -> torch.Tensor:
        self._attention.begin([tables])
        return self._model(**batch, use_cache=False, logits_to_keep=places).logits[0]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._answers.close()

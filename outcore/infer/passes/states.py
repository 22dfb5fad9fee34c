"""Models whose layers keep states beside or instead of keys and values: hybrid and recurrent ones.

Attention has its keys and values in pages as everywhere; states go to a layer through the cache object that the model's
own code asks for them. A chunk of a prompt is a call of its own, since states may not mix; single tokens of sequences
under way are rows of one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from outcore.flow import Call, Flow, Part
from outcore.infer.attention import PagedAttention
from outcore.infer.cache import SequenceStates
from outcore.infer.passes.rows import RowCall, lay_out_alone
from outcore.infer.passes.runner import Found, PagedRunner, RunnerLimits
from outcore.infer.schedule import Work
from outcore.model import LoadedModel
from outcore.model.forward import accepted_names


def fresh_layers(config: Any) -> dict[int, LinearAttentionLayer]:
    """Empty states of the layers that keep some, as transformers has them for this config."""
    return {
        number: LinearAttentionLayer(number_of_states=layer.number_of_states)
        for number, layer in enumerate(DynamicCache(config=config).layers)
        if isinstance(layer, LinearAttentionCacheLayerMixin)
    }


def cache_argument(decoder: torch.nn.Module) -> str:
    """Name under which a decoder takes its cache."""
    return "cache_params" if "cache_params" in accepted_names(decoder)[0] else "past_key_values"


class StatesOfCall(Cache):
    """Cache that a model sees in one call: states of the call's sequences, in one batch while a layer runs. Keys and
    values pass through, for attention has them in pages. `start`: tokens before the call's."""

    def __init__(self, of_sequences: Sequence[SequenceStates], start: int, num_layers: int) -> None:
        super().__init__(layers=[of_sequences[0].layers.get(at) or DynamicLayer() for at in range(num_layers)])
        self._of_sequences, self._start = of_sequences, start

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **more: Any) -> tuple[Any, Any]:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._start + query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return self._start > 0 if layer_idx is None else super().has_previous_state(layer_idx, state_idx)

    def enter(self, layer: int) -> None:
        """The layer is about to run."""
        if len(self._of_sequences) > 1 and layer in self._of_sequences[0].layers:
            self.layers[layer] = SequenceStates.joined(self._of_sequences, layer)

    def leave(self, layer: int) -> None:
        """The layer has run: its states are the sequences' own again."""
        if len(self._of_sequences) > 1 and layer in self._of_sequences[0].layers:
            together, self.layers[layer] = self.layers[layer], DynamicLayer()
            SequenceStates.part(together, self._of_sequences, layer)


class StatesRunner(PagedRunner):
    """Runner of sequences with states. `can_step_back`: several tokens at once give what they give one by one."""

    has_rows = False

    def __init__(
        self,
        flow: Flow,
        loaded: LoadedModel,
        attention: PagedAttention,
        limits: RunnerLimits,
        device: torch.device,
        *,
        can_step_back: bool = True,
    ) -> None:
        super().__init__(flow, attention, limits, device)
        self.can_step_back = can_step_back
        self._config, self._num_layers = loaded.config, len(flow.units.layers)
        self._cache_name = cache_argument(flow.units.parts.decoder)
        self._rows: list[RowCall] = []
        self._caches: list[StatesOfCall] = []

    def _calls(self, works: Sequence[Work]) -> tuple[list[RowCall], list[Call]]:
        for work in works:
            if work.num_drafts:
                self._states_of(work).remember()
        most = 1 if self.limits.is_deterministic else self.limits.call_tokens
        self._rows = lay_out_alone(works, most)
        self._caches = [
            StatesOfCall([self._states_of(work) for work, _ in row.works], row.works[0][0].start, self._num_layers)
            for row in self._rows
        ]
        calls = []
        for row, cache in zip(self._rows, self._caches, strict=True):
            batch = {name: rows.view(len(row.works), -1) for name, rows in self._taken(row.batch(self.copies)).items()}
            inputs = {self._cache_name: cache, "use_cache": True}
            calls.append(self._call(row, batch, inputs))
        return self._rows, calls

    def _run_rows(self, works: Sequence[Work]) -> Found:
        try:
            found = super()._run_rows(works)
        finally:
            self._rows, self._caches = [], []
        for work in works:
            self._states_of(work).length = work.start + work.count
        return found

    def _states_of(self, work: Work) -> SequenceStates:
        pages = work.sequence.pages
        assert pages is not None
        if pages.states is None:
            found = pages.beginning
            assert found is not None or work.start == 0
            pages.states = SequenceStates(fresh_layers(self._config)) if found is None else found.copied(self.device)
            pages.beginning = None
        return pages.states

    def _moved(self, part: Part, call: int, hidden: torch.Tensor) -> None:
        super()._moved(part, call, hidden)
        layer, caches = part.index - 1, self._caches
        if not caches:
            return
        after = call + 1 if layer >= 0 else len(caches)
        caches[after % len(caches)].enter(layer + after // len(caches))
        if layer < 0:
            return
        caches[call].leave(layer)
        for work, _ in self._rows[call].works:
            pages, end = work.sequence.pages, work.start + work.count
            assert pages is not None and pages.states is not None
            if end in pages.cuts and layer in pages.states.layers:
                pages.taken.setdefault(end, SequenceStates({}, end)).take_layer(layer, pages.states)

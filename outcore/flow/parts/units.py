"""The units of a causal language model (embedding, each layer, head) and how they run by the model's own code.

The decoder's forward is run around its layers: `record` runs it up to the last layer's call and keeps what each layer
was called with; `finish` runs what comes after the layers. `discovery` finds the units.

Whether rows are packed is known on the host before a step: transformers need not ask the device for it.

Its mask code looks for restarts in `position_ids` on the device and waits for the answer, once per run of a decoder. A
wait drains the queue of work that keeps the GPU busy, at every micro-batch's embedding and head: 9 % of a step of a
1.2 B model (M). `packing_known` answers in its place, by the same rule, for as long as the context lasts; a version of
transformers without that function works as it did, with the waits.

Where documents begin is known on the host as well, and where attention takes their borders (`packed_rows`) it gets
these instead of masks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from outcore.flow.parts.layout import SlabLayout
from outcore.flow.parts.shell import (
    Blank,
    CallLog,
    Held,
    LayersReached,
    Owner,
    Recorder,
    Relay,
    ReturnForm,
    ShapeNote,
    StreamUnsupported,
    Tape,
    shell_of,
)
from outcore.model.forward import CausalParts, Isolation, forward_inputs
from outcore.model.packed import borders_known, borders_of

QUESTION = "find_packed_sequence_indices"
"""In transformers.masking_utils: position_ids [B, T] -> documents' numbers [B, T], or None when not packed."""


class DeviceBatch(dict[str, torch.Tensor]):
    """A micro-batch on the device that knows from its host copy whether it is packed, and where documents begin."""

    def __init__(self, batch: Mapping[str, torch.Tensor], device: torch.device) -> None:
        positions = batch.get("position_ids")
        self.is_packed = positions is not None and bool((positions.diff(dim=-1) != 1).any())
        borders = borders_of(positions) if positions is not None and self.is_packed else None
        self.borders = None if borders is None else borders.to(device, non_blocking=True)
        """Borders on the device; None when not packed, or when documents are so short that masks serve better."""
        super().__init__({name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()})

    def packing_known(self) -> AbstractContextManager[None]:
        """Within this context transformers and packed attention take for granted what is known of it."""
        return packing_known(self.is_packed, self.borders)


@contextmanager
def packing_known(is_packed: bool | None, borders: torch.Tensor | None = None) -> Iterator[None]:
    """Within this context transformers takes this for granted (None: it asks the device), and so does packed
    attention."""
    from transformers import masking_utils

    before = getattr(masking_utils, QUESTION, None)
    if is_packed is None or before is None:
        yield
        return
    setattr(masking_utils, QUESTION, document_numbers if is_packed else lambda position_ids: None)
    try:
        with borders_known(borders if is_packed else None):
            yield
    finally:
        setattr(masking_utils, QUESTION, before)


def document_numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """[B, T] -> [B, T], counting up where positions do not go on by one."""
    before_first = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=before_first, dim=-1) != 1).cumsum(-1)


@dataclass
class Part:
    """Unit of streaming, a layer or an end: parameters that are uploaded, updated and saved together."""

    index: int
    """Place in the order of need: embedding 0, layers from 1 on, head last."""
    name: str
    layout: SlabLayout
    owners: list[list[Owner]]
    """Owners of each slot of the layout: where the model holds that parameter (a tied one in several places)."""
    parameters: list[nn.Parameter]
    """The model's own parameter objects, in slot order."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of its parameters."""
        return self.layout.dtype

    @property
    def is_trainable(self) -> bool:
        return self.layout.trainable_numel > 0


@dataclass
class ModelParts:
    """A causal language model as units, and what is needed to run them by the model's own code."""

    parts: CausalParts
    stack: str
    """Path of the layers' module list within the decoder."""
    layers: list[nn.Module]
    embed_paths: tuple[str, ...]
    """Modules within the decoder that hold the embedding unit's parameters."""
    form: ReturnForm
    embed: Part
    layer_units: list[Part]
    head: Part
    """Head of the model: the same object as `embed` when weights are tied."""
    isolation: Isolation
    writes_embedding: bool | None = None
    """Whether the decoder changes what its embedding returns in place (CTRL scales it so); None: not yet seen."""
    expert_units: dict[int, Part] = field(default_factory=dict)
    """Experts that are parts of their own, by layer; those of other layers belong to these (`experts_apart`)."""

    def __post_init__(self) -> None:  # once: they are used by every micro-batch
        self._tape, self._held = Tape(), Held()
        self._recorders = recorders_of(self.layers, self._tape)
        self._relays = nn.ModuleList([Relay(layer, self._held) for layer in self.layers])

    @property
    def tied(self) -> bool:
        return self.head is self.embed

    @property
    def ends(self) -> list[Part]:
        """Embedding and head, one part where they are tied."""
        return [self.embed] if self.tied else [self.embed, self.head]

    @property
    def all(self) -> list[Part]:
        """Every unit once, in order of need; experts that are parts of their own behind the others."""
        return [self.embed, *self.layer_units, *self.ends[1:], *self.expert_units.values()]

    @property
    def lowest_trained(self) -> int | None:
        """The layer at which a backward pass ends: below it nothing is trained. None: only the head is."""
        trained = [part.is_trainable for part in self.layer_units]
        return 0 if self.embed.is_trainable else (trained.index(True) if any(trained) else None)

    def buffers_to(self, device: torch.device) -> None:
        """Have the model's buffers (rotary frequencies and the like) on the device for good."""
        for module in self.parts.causal.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    def grouping_configs(self) -> list[Any]:
        """Configs by which a mixture's experts are multiplied together, from the whole stack of their weights; with
        `_experts_implementation` "eager" each is multiplied by itself."""
        configs = {id(c): c for m in self.parts.causal.modules() if (c := getattr(m, "config", None)) is not None}
        return [c for c in configs.values() if getattr(c, "_experts_implementation", None) not in (None, "eager")]

    def record(
        self,
        batch: Mapping[str, torch.Tensor],
        form: ReturnForm | None = None,
        *,
        with_masks: bool = True,
        inputs: Mapping[str, Any] | None = None,
    ) -> CallLog:
        """Run what comes before the layers (with whatever is bound to the embedding's parameters).

        `with_masks` False: the layers' masks are not wanted, so documents are not told apart for them. `inputs`: given
        to the decoder beside what the batch gives."""
        log = CallLog()
        decoder = self.parts.decoder
        shell = shell_of(
            decoder,
            {path: ShapeNote(decoder.get_submodule(path), path, log) for path in self.embed_paths}
            | {self.stack: self._recorders},
        )
        isolation: Isolation = self.isolation if with_masks else "position_ids"
        self._tape.log, self._tape.form = log, form or self.form
        is_packed = getattr(batch, "is_packed", None) if with_masks else False
        with packing_known(is_packed, getattr(batch, "borders", None)):
            run_to_layers(shell, forward_inputs(decoder, batch, isolation) | dict(inputs or {}))
        self._tape.log = CallLog()
        if len(log.calls) != len(self.layers):
            raise StreamUnsupported(f"its decoder called {len(log.calls)} of its {len(self.layers)} layers")
        if not_called := [path for path in self.embed_paths if path not in log.shapes]:
            raise StreamUnsupported(f"its decoder takes weights of {not_called[0]} without calling it")
        return log

    def finish(self, hidden: torch.Tensor, batch: Mapping[str, torch.Tensor], log: CallLog) -> torch.Tensor:
        """Run what the decoder does after its last layer: hidden [B, T, H] -> hidden [B, T, H'] for the head."""
        decoder = self.parts.decoder
        self._held.hidden, self._held.form = hidden, self.form
        blanks = {
            path: Blank(
                decoder.get_submodule(path), log.shapes[path], hidden, has_memory=self.writes_embedding is not False
            )
            for path in self.embed_paths
        }
        maskless = {name: tensor for name, tensor in batch.items() if name != "attention_mask"}
        with packing_known(False):
            output = shell_of(decoder, {self.stack: self._relays} | blanks)(**forward_inputs(decoder, maskless))
        self._held.hidden = None
        if self.writes_embedding is None:
            self.writes_embedding = any(blank.is_written for blank in blanks.values())
        return output.last_hidden_state if hasattr(output, "last_hidden_state") else output[0]


def recorders_of(layers: Sequence[nn.Module], tape: Tape) -> nn.ModuleList:
    """Modules in place of the layers while a decoder's calls are recorded."""
    return nn.ModuleList([Recorder(layer, index, len(layers), tape) for index, layer in enumerate(layers)])


def run_to_layers(shell: nn.Module, inputs: dict[str, Any]) -> None:
    """Run a decoder whose last layer is a recorder, as far as that. StreamUnsupported when it never gets there."""
    try:
        shell(**inputs)
    except LayersReached:
        return
    raise StreamUnsupported("its decoder's forward ended without calling its last layer")

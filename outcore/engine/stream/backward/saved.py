"""Layers whose forward keeps what their backward reads: they need no second forward.

The last layers of a step, whose backward comes soonest, as many as fit idle memory of the device (`sizing.residents`).
autograd holds what their code saved, compiled (the compiler keeps matrix products and attention, and computes cheap
values again) or eager. Weights are not held: a saved view of them is the same view of the slab that backward brings.
Eager layers give the bits of recomputation; compiled ones are other code, whose roundings may differ as those of any
two compilations do. What a layer takes is planned until one was seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from outcore.common.quantities import format_gib
from outcore.flow.layers import CompiledLayers, PartRunner
from outcore.flow.parts import LayerCall, ModelParts
from outcore.sizing.residents import num_saved

ROLE = "saving_forward"


@dataclass
class Saved:
    """One layer's forward on one micro-batch, with the graph that goes back through it."""

    hidden: torch.Tensor
    output: torch.Tensor
    routers: list[torch.Tensor]
    trainable: list[torch.Tensor]
    slab: torch.Tensor
    """Memory that views of the weights are taken from: the forward's slab, then the backward's."""
    n_bytes: int = 0
    """Device memory that is held for it."""


class SavedForwards:
    """Runs the last layers of a step so that backward finds what it needs. `limit_bytes`: idle memory for it at most,
    None for all that is idle, 0 for none. `planned_bytes_per_token`: what a layer keeps, at most; None: not known, then
    none is saved."""

    def __init__(
        self,
        units: ModelParts,
        compiled: CompiledLayers,
        *,
        limit_bytes: int | None,
        planned_bytes_per_token: int | None,
    ) -> None:
        self._units, self._compiled = units, compiled
        self._limit_bytes = limit_bytes if planned_bytes_per_token else 0
        self._per_token = float(planned_bytes_per_token or 0)
        self._was_seen = False
        self._idle_bytes = 0
        self._first = self._num_layers = len(units.layers)
        self._tokens = 0
        self._kept: dict[tuple[int, int], Saved] = {}
        self.peak_bytes = 0
        """Most that was held at once, since memory was offered."""
        compiled.register(ROLE, lambda forward, trainable: forward)

    @property
    def num_layers(self) -> int:
        """Layers of this step that are saved."""
        return self._num_layers - self._first

    @property
    def wants_memory(self) -> bool:
        """Whether idle memory would be used."""
        return self._limit_bytes != 0

    def offer(self, idle_bytes: int) -> None:
        """Let so much of the device be used from the next step on; 0: nothing any more."""
        limit = idle_bytes if self._limit_bytes is None else self._limit_bytes
        self._idle_bytes, self.peak_bytes = min(idle_bytes, limit), 0

    def words(self) -> str:
        """For people: what is saved, or may be; '' when nothing will."""
        if self.num_layers:
            size = format_gib(int(self.num_layers * self._tokens * self._per_token))
            return f"the last {self.num_layers} layers are not computed again in backward, {size}"
        return "the last layers, where memory is idle after two steps (--saved_gib 0: none)" * self.wants_memory

    def step_begins(self, tokens: int) -> None:
        """Before a step of so many tokens: decide which layers are saved in it."""
        lowest = self._units.lowest_trained
        layers = 0 if lowest is None or self._compiled.has_eager_graphs(lowest) else self._num_layers - lowest
        count = num_saved(int(self._per_token * tokens), self._idle_bytes, layers)
        self._first, self._tokens = self._num_layers - (count if self._was_seen else min(1, count)), tokens

    def step_ended(self) -> None:
        """After a step that may have shown what a layer takes."""
        if self.num_layers and self.peak_bytes and not self._was_seen:
            self._per_token, self._was_seen = self.peak_bytes / self._tokens, True

    def saves(self, layer: int) -> bool:
        """Whether this layer's forward is to be saved now."""
        return layer >= self._first

    def holds(self, layer: int, number: int) -> bool:
        """Whether its backward on this micro-batch is ready."""
        return (layer, number) in self._kept

    def forward(
        self, runner: PartRunner, layer: int, number: int, slab: torch.Tensor, given: torch.Tensor, call: LayerCall
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(output, router logits), as flow gets them from a layer that is not saved."""
        leaves, trainable = runner.weights.leaves(runner.units.layer_units[layer], slab)
        kept = Saved(given.detach().requires_grad_(), given, [], trainable, slab)
        seen = {t.untyped_storage().data_ptr() for t in tree_leaves((call.args, call.kwargs)) if torch.is_tensor(t)}

        def pack(tensor: torch.Tensor) -> torch.Tensor | tuple[int, torch.Size, tuple[int, ...]]:
            storage = tensor.untyped_storage()
            if storage.data_ptr() == slab.untyped_storage().data_ptr():
                assert tensor.dtype == slab.dtype, "weights are saved in the slab's type"
                return int(tensor.storage_offset() - slab.storage_offset()), tensor.shape, tensor.stride()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                kept.n_bytes += storage.nbytes()
            return tensor

        def unpack(packed: torch.Tensor | tuple[int, torch.Size, tuple[int, ...]]) -> torch.Tensor:
            if isinstance(packed, torch.Tensor):
                return packed
            offset, shape, stride = packed
            return kept.slab.as_strided(shape, stride, kept.slab.storage_offset() + offset)

        with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
            output = None
            if self._compiled.is_active(layer):
                output = self._compiled.run(ROLE, layer, leaves, kept.hidden, call, under_grad=True)
            if output is None:
                kept.output, kept.routers = runner.apply_layer(layer, leaves, kept.hidden, call)
            else:
                kept.output = output
        self._kept[layer, number] = kept
        self.peak_bytes = max(self.peak_bytes, sum(one.n_bytes for one in self._kept.values()))
        return kept.output.detach(), [logits.detach() for logits in kept.routers]

    def take(self, layer: int, number: int, slab: torch.Tensor) -> Saved:
        """Give the forward back, once, with the weights of `slab` in its graph."""
        kept = self._kept.pop((layer, number))
        kept.slab = slab
        return kept

    def clear(self) -> None:
        """Forget everything, after a failed pass."""
        self._kept.clear()

"""A layer's experts on the tokens that chose them, from the slots of an `ExpertCache`.

The router's choice is read once a layer, since the host has to know what to bring. The model's own code then runs on
a stack of a group's experts with the choice renumbered: on the slots themselves where nothing is packed, on packed
weights where the CPU's kernels multiply them as they are, else on the expanded matrices of the group. It is given every
pair of token and expert as a row of its own with weight one; the sum over a token's experts is taken here, as
transformers takes it where experts are multiplied together, so results do not depend on what came in which group.

N tokens, K experts of each, E experts of the layer, G in a group, P pairs of them, H hidden size."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from outcore.flow.experts.cache import ExpertCache
from outcore.flow.experts.form import experts_of, planes_of
from outcore.flow.parts import ModelParts, bound
from outcore.flow.weights import InPlaceProducts, PackedWeight
from outcore.formats import PackedSpec, stack_of
from outcore.staging.pool import SmallCopies

MOST_STACKED = 1023
"""Experts of a stack: CUDA's `grouped_mm` refuses 1,024 groups, also empty ones."""


opened: WeakValueDictionary[int, ChosenLayers] = WeakValueDictionary()
"""Layers of each model, by number: compiled code cannot hold an object, so it names the model that it means."""
_numbers = itertools.count()


@torch.library.custom_op("outcore::chosen_experts", mutates_args=())
def chosen_experts(hidden: torch.Tensor, choice: torch.Tensor, weights: torch.Tensor, number: int) -> torch.Tensor:
    """[N, H] by the experts of the layer that is run, of the model of this number: an operation that the compiler does
    not look into."""
    layers = opened[number]
    return layers.of[layers.now](hidden, choice, weights)


@chosen_experts.register_fake
def _(hidden: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(hidden)


class ChosenLayers:
    """The experts of all layers of a model, forward of each of their modules: so that these are alike to who looks, and
    compiled code serves them all. `scratch`: where experts are expanded."""

    def __init__(self, scratch: GroupMemory) -> None:
        self.number, self.scratch = next(_numbers), scratch
        self.of: dict[int, ChosenExperts] = {}
        self.now = -1
        """Layer that is run."""
        self.is_few = False
        """Whether they run by `ChosenExperts.few`."""
        opened[self.number] = self

    def enter(self, layer: int) -> None:
        """A layer is about to be run."""
        self.now = layer

    def __call__(self, *args: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        """hidden [N, H], choice [N, K], weights [N, K] -> [N, H], in whatever way the model's code gives them."""
        hidden, choice, weights = (*args, *named.values())
        if torch.compiler.is_compiling():
            return chosen_experts(hidden, choice, weights, self.number)
        return self.of[self.now](hidden, choice, weights)


class ChosenExperts:
    """Runs the experts of one layer. `in_place`: multiplies packed weights as they are; None: they are expanded."""

    def __init__(
        self, module: nn.Module, layer: int, cache: ExpertCache, in_place: InPlaceProducts | None, layers: ChosenLayers
    ) -> None:
        self._module, self._layer, self._cache = module, layer, cache
        self._in_place, self._scratch, self._layers = in_place, layers.scratch, layers
        self._part = cache.parts[layer]
        self._is_packed = bool(self._part.layout.packed_slots)
        self._planes = planes_of(self._part, cache.memory)
        self._copies = SmallCopies(cache.memory.device)
        self.few: Callable[..., torch.Tensor] | None = None
        """Runs few tokens without the host."""

    def __call__(self, hidden: torch.Tensor, choice: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [N, H], choice [N, K], weights [N, K] -> [N, H]."""
        if self._layers.is_few:
            assert self.few is not None
            return self.few(hidden, choice, weights)
        chosen = choice.reshape(-1).cpu()  # waits for the device
        rows, found = choice.shape[1], None
        for experts, slots in self._stackable(self._cache.groups(self._layer, chosen.unique().tolist())):
            numbers = torch.full((self._cache.forms[self._layer].num_experts,), -1)
            places = range(len(slots)) if self._is_packed else [slot % MOST_STACKED for slot in slots]
            numbers[experts] = torch.tensor(places)
            pairs = (numbers[chosen] >= 0).nonzero()[:, 0]
            where, index = self._copies.to(torch.stack((pairs, numbers[chosen[pairs]])))
            values = self._run(hidden[where // rows], index[:, None], slots)
            if found is None:
                found = values.new_empty(len(chosen), values.shape[-1])
            found[where] = values
        if found is None:  # no tokens
            return torch.zeros_like(hidden)
        weighted = found * weights.reshape(-1, 1)
        return weighted.view(*choice.shape, -1).sum(dim=1).to(hidden.dtype)

    def _stackable(self, groups: Iterable[tuple[list[int], list[int]]]) -> Iterator[tuple[list[int], list[int]]]:
        """The groups, and where slots are used as they lie those of each so many slots apart."""
        for experts, slots in groups:
            if self._is_packed:
                yield experts, slots
                continue
            for stack in sorted({slot // MOST_STACKED for slot in slots}):
                of_stack = [pair for pair in zip(experts, slots, strict=True) if pair[1] // MOST_STACKED == stack]
                yield [expert for expert, _ in of_stack], [slot for _, slot in of_stack]

    def _run(self, hidden: torch.Tensor, index: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """hidden [P, H], index [P, 1] into the stack -> [P, H]."""
        module: Any = self._module
        before = module.num_experts
        stacks = self._stacks(slots)
        module.num_experts = len(stacks[0])
        try:
            with bound(self._part.owners, stacks):
                return type(module).forward(module, hidden, index, hidden.new_ones(index.shape))
        finally:
            module.num_experts = before

    def _stacks(self, slots: Sequence[int]) -> list[Any]:
        """Tensors in place of the part's parameters: all slots of a stack where nothing is packed, else these."""
        layout = self._part.layout
        if not self._is_packed:
            first = slots[0] // MOST_STACKED * MOST_STACKED
            return [planes[0][first : first + MOST_STACKED] for planes in self._planes]
        chosen = self._copies.to(torch.tensor(slots))
        stacks: list[Any] = []
        self._scratch.used_bytes = 0
        for slot, planes in zip(layout.slots, self._planes, strict=True):
            if slot.packed is None:
                stacks.append(planes[0][chosen])
                continue
            spec = PackedSpec(slot.packed.format, (len(slots), *slot.packed.shape[1:]), slot.packed.is_transposed)
            if self._in_place is not None:
                stacks.append(ChosenWeight.at(slots, spec, planes, layout.dtype, self._in_place))
                continue
            value = self._scratch.take(spec.value_shape, layout.dtype)
            spec.expand_planes([plane[chosen].flatten(0, 1) for plane in planes], value)
            stacks.append(value)
        return stacks


class GroupMemory:
    """Memory for the expanded matrices of a group, which every layer uses again."""

    def __init__(self, n_bytes: int, device: torch.device) -> None:
        self._memory = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        self.used_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next matrices of this shape."""
        start, size = self.used_bytes, torch.Size(shape).numel() * dtype.itemsize
        self.used_bytes += size
        return self._memory[start : start + size].view(dtype).view(shape)


class ChosenWeight(PackedWeight):
    """A stack of experts, each in a slot, where the kernels read it. `planes`: [slots, blocks, per_block]."""

    slots: Sequence[int]

    @staticmethod
    def at(slots: Sequence[int], spec: PackedSpec, planes: list[torch.Tensor], *more: Any) -> ChosenWeight:
        """A stack of the experts that lie in these slots; `more` as for any packed weight."""
        made: Any = ChosenWeight(spec, planes, *more)
        made.slots = slots
        return made

    def expanded(self, out: torch.Tensor | None = None) -> torch.Tensor:
        gathered = [plane[list(self.slots)].flatten(0, 1) for plane in self.planes]
        return PackedWeight(self.spec, gathered, self.dtype, self.products).expanded(out)

    def chosen(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        return self.products.chosen(self.stack, x, torch.tensor(self.slots)[numbers])

    @cached_property
    def stack(self) -> Any:
        strides = [plane.stride(0) * plane.dtype.itemsize for plane in self.planes]
        spec = PackedSpec(self.spec.format, (len(self.planes[0]), *self.spec.shape[1:]))
        return stack_of(spec, [plane[0] for plane in self.planes], strides)

    def one(self, index: int) -> PackedWeight:
        spec = PackedSpec(self.spec.format, self.spec.shape[1:], self.spec.is_transposed)
        return PackedWeight(spec, [plane[self.slots[index]] for plane in self.planes], self.dtype, self.products)


def run_chosen(units: ModelParts, cache: ExpertCache, in_place: InPlaceProducts | None) -> ChosenLayers:
    """Have the layers' experts run from the cache's slots."""
    needed = max(form.expanded_bytes for form in cache.forms.values()) * cache.group if in_place is None else 0
    layers = ChosenLayers(GroupMemory(needed, cache.memory.device))
    for layer in cache.parts:
        module = experts_of(units.layers[layer])
        assert module is not None
        layers.of[layer] = ChosenExperts(module, layer, cache, in_place, layers)
        module.forward = layers
    return layers

"""Bytes that a training run keeps, part by part: from a model's shape, or from its parts once it is taken apart.

Every parameter starts at a multiple of `BLOCK_NUMEL` elements in its part's home, as `flow.parts` lays it out, so both
ways give the same bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, repeat
from typing import NamedTuple

from outcore.common.quantities import round_up
from outcore.sizing.ring import BLOCK_BYTES
from outcore.sizing.shape import Blocks, ModelShape
from outcore.sizing.states import BLOCK_NUMEL, MOMENT_BYTES, STATE_FORMATS, packed_size


class PartNeeds(NamedTuple):
    """One part of the model: the embedding, a layer or the head. A tied head belongs to the embedding."""

    home_bytes: int
    """Bytes of its parameters at home, packed where they are."""
    size_bytes: int
    """Bytes of them on the device, where nothing is packed."""
    trained: int
    """Elements with a gradient and states."""
    matrices: tuple[int, ...] = ()
    """Elements of each matrix among them that Muon updates, which has a momentum alone."""


@dataclass(frozen=True)
class TrainingNeeds:
    """Bytes that must live somewhere while a model is trained, in bytes."""

    layers: tuple[PartNeeds, ...]
    ends: tuple[PartNeeds, ...]
    """Embedding and head."""
    element_bytes: int
    state_format: str
    checkpoint_ends: tuple[int, ...] = ()
    """Bytes of a layer's activation checkpoints up to the end of each micro-batch of a step; (): not known."""
    ranks: int = 1
    """Processes on this host, which share parameters and gradients; `checkpoint_ends` are of one of them."""

    @property
    def parts(self) -> tuple[PartNeeds, ...]:
        """Parts, the ends last."""
        return (*self.layers, *self.ends)

    @cached_property
    def weights(self) -> int:
        """Homes of all parameters."""
        return sum(part.home_bytes for part in self.parts)

    @cached_property
    def trained(self) -> int:
        """Elements that are trained."""
        return sum(part.trained for part in self.parts)

    @cached_property
    def matrices(self) -> tuple[int, ...]:
        """Elements of each matrix that Muon updates."""
        return tuple(chain.from_iterable(part.matrices for part in self.parts))

    @cached_property
    def muon_params(self) -> int:
        """Elements that Muon updates."""
        return sum(self.matrices)

    @property
    def gradients(self) -> int:
        """Gradients, with a home for each part's."""
        return self.element_bytes * self.trained

    @property
    def states(self) -> int:
        """Masters and moments."""
        return int(sum(STATE_FORMATS[self.state_format]) * self.trained) - MOMENT_BYTES * self.muon_params

    @property
    def matrix_states(self) -> int:
        """Masters and momenta of the matrices that Muon updates; a GPU takes them where they live."""
        return (STATE_FORMATS[self.state_format][0] + MOMENT_BYTES) * self.muon_params

    @property
    def checkpoints(self) -> int:
        """Activation checkpoints of a step on this host: the input of every layer."""
        return self.ranks * len(self.layers) * (self.checkpoint_ends[-1] if self.checkpoint_ends else 0)

    def gradient_bytes(self, part: PartNeeds) -> int:
        """Bytes of a part's gradient."""
        return self.element_bytes * part.trained


def checkpoint_ends(step_tokens: Sequence[int], row_bytes: int) -> tuple[int, ...]:
    """Ends of each micro-batch's checkpoints among a layer's; each begins at a block of the drive."""
    return tuple(accumulate(round_up(tokens * row_bytes, BLOCK_BYTES) for tokens in step_tokens))


def needs_of_shape(
    shape: ModelShape,
    element_bytes: int,
    state_format: str,
    step_tokens: Sequence[int],
    *,
    uses_muon: bool = False,
    ranks: int = 1,
) -> TrainingNeeds:
    """Make the needs of a run of such a model."""
    layers, ends = parts_of_shape(shape, element_bytes, uses_muon)
    row_bytes = element_bytes * shape.hidden_size
    return TrainingNeeds(
        layers, ends, element_bytes, state_format, checkpoint_ends(tuple(step_tokens), row_bytes), ranks
    )


@lru_cache(maxsize=16)
def parts_of_shape(
    shape: ModelShape, element_bytes: int, uses_muon: bool = False
) -> tuple[tuple[PartNeeds, ...], tuple[PartNeeds, ...]]:
    """(layers, embedding and head) of the model."""
    base = _cut(shape.tensors, shape.num_layers, shape.layer_params)
    ends, counted = list(base.ends), (shape.embedding_params, shape.head_params)
    if tuple(map(sum, ends)) != counted:  # what follows the layers stands before them in the model
        ends = [(numel,) for numel in counted]
    ends = [tuple(chain(*ends))] if shape.tied else [end for end in ends if end]
    if not shape.lora_r:
        layers = [_part(tensors, (), element_bytes) for tensors in base.layers]
        if uses_muon:
            layers = [part._replace(matrices=own) for part, own in zip(layers, _muon(shape, base.layers), strict=True)]
        return tuple(layers), tuple(_part(tensors, (), element_bytes) for tensors in ends)
    adapters, lengths, whole = (
        _cut(blocks, shape.num_layers, outside=outside)
        for blocks, outside in ((shape.adapters, 0), (shape.lengths, 0), (shape.whole, shape.whole_in_ends))
    )
    matrices = _cut(shape.matrices, shape.num_layers).layers if shape.quantize else [()] * shape.num_layers
    layers = [
        _part(
            [*(shape.lora_r * dim for dim in adapters.layers[i]), *lengths.layers[i], *whole.layers[i]],
            _without(base.layers[i], whole.layers[i]),
            element_bytes,
            _packed(matrices[i], shape.quantize),
        )
        for i in range(shape.num_layers)
    ]
    beside = [*(shape.lora_r * dim for dim in chain(*adapters.ends)), *chain(*lengths.ends)]
    trained = list(chain(*whole.ends))
    found = []
    for number, tensors in enumerate(ends):  # what is trained beside an end is the embedding's
        own = [n for n in trained if n in tensors]
        found.append(_part([*(beside if not number else []), *own], _without(tensors, own), element_bytes))
    return tuple(layers), tuple(found)


def _muon(shape: ModelShape, layers: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Elements of the matrices that Muon updates, of each layer: linear layers, and what chooses between experts."""
    router = shape.num_experts * shape.hidden_size
    for tensors, sides in zip(layers, _cut(shape.adapters, shape.num_layers).layers, strict=True):
        found = [a * b for a, b in zip(sides[::2], sides[1::2], strict=True)]
        found += [router] * (router in _without(tensors, found))
        yield tuple(sorted(map(_aligned, found)))


class _Cut(NamedTuple):
    """Numbers of a model, by part."""

    layers: Sequence[Sequence[int]]
    ends: tuple[Sequence[int], Sequence[int]]
    """Before and after the layers."""


def _cut(blocks: Blocks, num_layers: int, sums: Sequence[int] = (), outside: int = 0) -> _Cut:
    """Blocks in the model's order by part. `sums`: of each layer, where that is known; `outside`: elements of no layer,
    likewise. Blocks that only some layers have are spread over all of them."""
    found = list(chain.from_iterable(repeat(block, times) for times, block in blocks))
    if outside and outside == sum(chain(*found)):
        return _Cut([()] * num_layers, (tuple(chain(*found)), ()))
    beside = len(found) - num_layers
    if 0 <= beside <= 2:
        first = min(beside, int(beside == 2 or num_layers == 1 or found[0] != found[1])) if beside else 0
        layers, last = found[first : first + num_layers], found[first + num_layers :]
        if not sums or [sum(layer) for layer in layers] == list(sums):
            return _Cut(layers, (found[0] if first else (), last[0] if last else ()))
    total = sum(chain(*found))
    if sums:
        return _Cut([(n,) for n in sums], ((total - sum(sums),), ()))
    return _Cut([(-(-total // num_layers),) if total else ()] * num_layers, ((), ()))


def _part(
    trained: Sequence[int], frozen: Sequence[int], element_bytes: int, packed: Sequence[tuple[int, int]] = ()
) -> PartNeeds:
    """`trained` and `frozen`: elements of each parameter; `packed`: (elements, bytes) of those of `frozen` that are
    packed."""
    own, all_of_it = sum(map(_aligned, trained)), sum(map(_aligned, [*trained, *frozen]))
    spared = sum(_aligned(numel) - _aligned(size // element_bytes) for numel, size in packed)
    return PartNeeds(element_bytes * (all_of_it - spared), element_bytes * all_of_it, own)


def _packed(matrices: Sequence[int], quantize: str) -> list[tuple[int, int]]:
    """(elements, bytes at home) of those of a layer's matrices that the format packs."""
    if not quantize:
        return []
    size = packed_size(quantize)
    pairs = zip(matrices[::2], matrices[1::2], strict=True)
    return [(numel, size.of(numel)) for numel, columns in pairs if columns % size.block == 0]


def _without(numels: Sequence[int], taken: Sequence[int]) -> list[int]:
    left = Counter(numels)
    left.subtract(taken)
    return list(left.elements())


def _aligned(numel: int) -> int:
    return round_up(numel, BLOCK_NUMEL)

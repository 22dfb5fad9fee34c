"""Recurrent and convolution states: what a layer keeps of all tokens so far, however many, instead of keys and values.

They are one more kind of page with a rule of its own: a state stands for everything before it and cannot be cut, so
copies are made at page ends where another prompt may begin, and no token can be taken back but by an older copy. The
copies lie in RAM; those that RAM forgets are kept on a drive (`KeptStates`).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load, save

LayerStates = Any
"""One layer of a transformers cache that holds states: tensors in dictionaries by number, beside flags."""


class SequenceStates:
    """States of one sequence after `length` tokens, by layer."""

    def __init__(self, layers: Mapping[int, LayerStates], length: int = 0) -> None:
        self.layers, self.length = dict(layers), length
        self._before: SequenceStates | None = None

    def copied(self, device: torch.device | None = None) -> SequenceStates:
        """Copy the states to a device; None: where they are."""
        layers = {number: _mapped(layer, lambda t: _copied(t, device)) for number, layer in self.layers.items()}
        return SequenceStates(layers, self.length)

    def remember(self) -> None:
        """Keep what is known now: the tokens that come next are guesses."""
        self._before = self.copied()

    def step_back(self) -> int:
        """Forget all since `remember`; the number of tokens that are known then."""
        assert self._before is not None
        self.layers, self.length, self._before = self._before.layers, self._before.length, None
        return self.length

    def take_layer(self, layer: int, of: SequenceStates) -> None:
        """Have one layer's states as they are there now, in RAM."""
        self.layers[layer] = _mapped(of.layers[layer], lambda t: _copied(t, torch.device("cpu")))

    @staticmethod
    def joined(of_sequences: Sequence[SequenceStates], layer: int) -> LayerStates:
        """One layer's states of several sequences as one batch."""
        layers = [states.layers[layer] for states in of_sequences]
        together = _mapped(layers[0], lambda t: t)
        for name, number, _ in _tensors(layers[0]):
            getattr(together, name)[number] = torch.cat([getattr(own, name)[number] for own in layers])
        return together

    @staticmethod
    def part(together: LayerStates, of_sequences: Sequence[SequenceStates], layer: int) -> None:
        """Give each sequence its own of what was `joined`."""
        for at, states in enumerate(of_sequences):
            states.layers[layer] = _mapped(together, lambda t, at=at: t[at : at + 1].clone())

    def to_bytes(self) -> bytes:
        """The states as a safetensors file: each by its layer, the layer's dictionary and its number there."""
        held = [(number, found) for number, layer in self.layers.items() for found in _tensors(layer)]
        return save({f"{number}.{name}.{k}": tensor.contiguous() for number, (name, k, tensor) in held})

    @staticmethod
    def from_bytes(data: bytes, layers: Mapping[int, LayerStates], length: int) -> SequenceStates:
        """States that `to_bytes` told, in `layers` that hold none so far."""
        for key, tensor in load(data).items():
            number, name, k = key.split(".")
            layer = layers[int(number)]
            update = layer.update_conv_state if name == "conv_states" else layer.update_recurrent_state
            update(tensor, state_idx=int(k))
        return SequenceStates(layers, length)

    @property
    def size_bytes(self) -> int:
        return sum(t.nbytes for layer in self.layers.values() for _, _, t in _tensors(layer))


class Snapshots:
    """Copies of states by the key of the page at whose end they stood, `most` of them: least recently used go first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[bytes, SequenceStates] = OrderedDict()

    def __contains__(self, key: object) -> bool:
        return key in self._kept

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes) -> SequenceStates:
        """The states at the end of this page; not to be written to."""
        self._kept.move_to_end(key)
        return self._kept[key]

    def next_to_go(self) -> bytes | None:
        """Key of those that the next new ones push out, if any."""
        return next(iter(self._kept), None) if len(self._kept) >= self.most else None

    def put(self, key: bytes, states: SequenceStates) -> None:
        """Keep these."""
        self._kept[key] = states
        self._kept.move_to_end(key)
        while len(self._kept) > self.most:
            self._kept.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """Drop those of a page, if there are any."""
        self._kept.pop(key, None)


def _copied(tensor: torch.Tensor, device: torch.device | None) -> torch.Tensor:
    return tensor.clone() if device is None else tensor.to(device, copy=True)


def _tensors(layer: LayerStates) -> list[tuple[str, Any, torch.Tensor]]:
    """(dictionary, number, tensor) of every state."""
    held = [(name, value) for name, value in vars(layer).items() if isinstance(value, dict)]
    return [(name, k, t) for name, value in held for k, t in value.items() if isinstance(t, torch.Tensor)]


def _mapped(layer: LayerStates, change: Callable[[torch.Tensor], torch.Tensor]) -> LayerStates:
    """The layer with `change` made to each tensor; nothing that it writes to is shared with the first."""
    new = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(new, name, {k: change(v) if isinstance(v, torch.Tensor) else v for k, v in value.items()})
    return new

"""Outputs of a frozen tower, kept in RAM and found by the content of what it was given.

transformers asks for all of a batch's pictures in one call (`get_image_features`), whose outputs are kept whole:
pictures in another company may be computed by other kernels, and their last bits would differ. A call that comes again
has the bits of the first time. What draws random numbers, wants gradients, or learns from what it sees is not kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from hashlib import blake2b
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers.utils.generic import ModelOutput

UNREAD = "hidden_states", "attentions"
"""Outputs of each of a tower's layers, which are large, and which no language model reads."""


class TowerOutputs:
    """Outputs of one model's tower, in `room_bytes` of RAM. `evicts`: the oldest give way to new ones; else what came
    first stays, of which each epoch has its share."""

    def __init__(self, room_bytes: int, *, evicts: bool) -> None:
        self._room_bytes, self._evicts = room_bytes, evicts
        self._kept = dict[bytes, tuple[list[Any], TreeSpec]]()
        self.kept_bytes = 0

    def keep_of(self, model: nn.Module) -> None:
        """Stand between this model and its tower."""
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
            return  # its running means change with each picture
        for module in model.modules():
            if callable(encode := getattr(module, "get_image_features", None)):
                # `generate` reads the signature to know what it may give
                module.get_image_features = update_wrapper(partial(self.outputs, encode), encode)  # type: ignore

    def outputs(self, encode: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Give what `encode` gives for these, computed or kept."""
        key, device = _digest((encode.__qualname__, args, kwargs))
        if key in self._kept:
            leaves, spec = self._kept[key] = self._kept.pop(key)  # now the youngest
            return tree_unflatten([_copy(leaf, device) for leaf in leaves], spec)
        before = _random_state(device)
        made = encode(*args, **kwargs)
        if isinstance(made, ModelOutput):
            made = type(made)(**{name: value for name, value in made.items() if name not in UNREAD})
        leaves, spec = tree_flatten(made)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        is_fixed = torch.equal(before, _random_state(device)) and not any(leaf.requires_grad for leaf in tensors)
        if is_fixed and self._has_room(sum(leaf.nbytes for leaf in tensors)):
            self._kept[key] = [_copy(leaf, torch.device("cpu")) for leaf in leaves], spec
        return made

    def _has_room(self, size: int) -> bool:
        while self._evicts and self._kept and size <= self._room_bytes < self.kept_bytes + size:
            leaves, _ = self._kept.pop(next(iter(self._kept)))
            self.kept_bytes -= sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
        has_room = self.kept_bytes + size <= self._room_bytes
        self.kept_bytes += size if has_room else 0
        return has_room


def _copy(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device, copy=True) if isinstance(leaf, torch.Tensor) else leaf


def _digest(given: Any) -> tuple[bytes, torch.device]:
    """Key of what is given, tensors by all of their bytes; and where its first tensor is."""
    leaves, spec = tree_flatten(given)
    found, device = blake2b(repr(spec).encode(), digest_size=16), None
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.update(repr((leaf.dtype, leaf.shape)).encode())
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            device = device or leaf.device
        else:
            found.update(repr(leaf).encode())
    return found.digest(), device or torch.device("cpu")


def _random_state(device: torch.device) -> torch.Tensor:
    on_cpu = torch.get_rng_state()
    return torch.cat([on_cpu, torch.cuda.get_rng_state(device)]) if device.type == "cuda" else on_cpu

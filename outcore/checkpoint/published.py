"""Weights under the names and shapes of a published checkpoint, as `save_pretrained` writes them and others load them.

transformers fuses some weights while it loads (the experts of a mixture into one tensor) and renames others; inference
servers and converters know the published ones only. What a weight becomes is asked of transformers' own
`revert_weight_conversion`, first with tensors that have no data: names and shapes are known before anything is read.
Memory: what is converted together (one fused tensor, or a layer where several make one), and its result."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from outcore.checkpoint.shards import TensorPlan

logger = logging.getLogger(__name__)

Tensor = tuple[TensorPlan, Callable[[], torch.Tensor]]
Tensors = dict[str, Tensor]
"""Tensors by name: what each is, and how to get its values."""

_LAYER = re.compile(r"^(.*?\.\d+)\.")


def published(
    base: nn.Module,
    tensors: Tensors,
    source: Mapping[str, Tensor] = MappingProxyType({}),
    untrained: Collection[str] = (),
) -> Tensors:
    """Yield the weights as a published checkpoint of `base`'s architecture holds them; get them in their order.

    As they are for a model that is not one of transformers', or that it loads without a change. `source`: tensors of
    the checkpoint that the model was read from, which take the place of those that were made of `untrained` ones alone
    and have another number type."""
    from transformers import PreTrainedModel

    if not isinstance(base, PreTrainedModel):
        return tensors
    found: Tensors = {}
    try:
        for group in _groups(base, tensors):
            converted = _converted(base, group)
            if all(name in untrained for name in group):
                converted = {name: _of_source(source.get(name), entry) for name, entry in converted.items()}
            if twice := sorted(converted.keys() & found.keys()):
                raise ValueError(f"two weights would be called {twice[0]}")
            found |= converted
    except Exception as error:  # transformers' code for one architecture, at the end of a run
        logger.warning(
            "the weights are exported under the names that transformers %s uses in memory, which other programs may "
            "not know: their published names could not be found (%s: %s)",
            _version(),
            type(error).__name__,
            error,
        )
        return tensors
    return found


def _of_source(theirs: Tensor | None, ours: Tensor) -> Tensor:
    if theirs is None or theirs[0].shape != ours[0].shape or theirs[0].dtype == ours[0].dtype:
        return ours
    return theirs


def _groups(base: Any, tensors: Tensors) -> Iterable[Tensors]:
    """Group what is converted together: single tensors where that makes the same of a layer as all of it at once."""
    layers: dict[str, Tensors] = {}
    for name, entry in tensors.items():
        match = _LAYER.match(name)
        layers.setdefault(match[1] if match else name, {})[name] = entry
    for layer in layers.values():
        singly = [{name: entry} for name, entry in layer.items()]
        apart: dict[str, torch.Tensor] = {}
        for one in singly:
            apart |= _reverted(base, _empty(one))
        whole = _reverted(base, _empty(layer))
        same = apart.keys() == whole.keys() and all(apart[name].shape == whole[name].shape for name in whole)
        yield from singly if same else [layer]


def _empty(group: Tensors) -> dict[str, torch.Tensor]:
    return {name: torch.empty(plan.shape, dtype=plan.dtype, device="meta") for name, (plan, _) in group.items()}


def _converted(base: Any, group: Tensors) -> Tensors:
    empty = _empty(group)
    outline = _reverted(base, empty)
    plans = {name: TensorPlan(name, value.dtype, tuple(value.shape)) for name, value in outline.items()}
    if len(group) == len(plans) == 1:
        ((source, (_, load)),), ((name, plan),) = group.items(), plans.items()
        if outline[name] is empty[source]:  # no more than another name, if that
            return {name: (plan, load)}
    values: dict[str, torch.Tensor] = {}
    left = set(plans)

    def value_of(name: str) -> torch.Tensor:
        if not values:
            values.update(_reverted(base, {source: load() for source, (_, load) in group.items()}))
        left.discard(name)
        value = values[name].contiguous()
        if not left:
            values.clear()
        return value

    return {name: (plan, lambda name=name: value_of(name)) for name, plan in plans.items()}


def _reverted(base: Any, group: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename and convert by the architecture's own rules, whatever the file had that this model was read from:
    another prefix, for one, where it is the text part of a model with more parts."""
    from transformers.core_model_loading import revert_weight_conversion

    attached, base._weight_conversions = getattr(base, "_weight_conversions", None), None
    try:
        return revert_weight_conversion(base, group)
    finally:
        base._weight_conversions = attached


def _version() -> str:
    import transformers

    return transformers.__version__

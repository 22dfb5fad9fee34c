"""The weights of a model, one after the other, for whoever writes them to a file: never the whole model twice.

`iter_weights` gives them as the model holds them, `iter_export_weights` as a published checkpoint of that architecture
names and shapes them (transformers fuses some weights when it loads, such as the experts of a mixture; others expect
them apart). Adapters are merged on the way.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.model.head import unwrap
from outcore.model.initialise import Gather
from outcore.model.lora import is_lora
from outcore.model.names import checkpoint_name

_LAYER = re.compile(r"^(.*?\.\d+)\.")


def whole(parameters: list[nn.Parameter], gather: Gather | None) -> Any:
    """A context in which these parameters are whole: `gather` for partitioned ones, nothing to do for others."""
    partitioned = [p for p in parameters if hasattr(p, "ds_id")]
    return gather(partitioned) if gather is not None and partitioned else nullcontext()


@torch.no_grad()
def iter_weights(
    model: nn.Module, *, merge: bool = True, gather: Gather | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights to export, one at a time on the CPU under their checkpoint names; shared ones once.

    Of an adapted model the base's weights, with the adapters merged in (base + alpha / r * B A, summed in fp32 and
    rounded to the base's dtype) unless `merge` is off; adapters themselves are left out. At most one weight is held
    twice. `gather`: `outcore.model.zero3.gathered_for_reading` for partitioned parameters; all ranks iterate together.
    """
    adapted = {}
    if merge and is_lora(model):
        for name, module in model.named_modules():
            if hasattr(module, "get_delta_weight") and hasattr(module, "base_layer"):
                adapted[f"{name}.base_layer.weight"] = module
    for full_name, parameter in model.named_parameters():
        if "lora_" in full_name:
            continue
        module = adapted.get(full_name)
        own = [parameter] if module is None else [parameter, *(p for n, p in module.named_parameters() if "lora_" in n)]
        with whole(own, gather):
            value = parameter.detach()
            if module is not None:
                delta = sum(module.get_delta_weight(name).float() for name in module.active_adapters)
                value = (value.float() + delta).to(value.dtype)
            value = value.to("cpu", copy=True).contiguous()
        yield checkpoint_name(full_name), value


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, value in model.state_dict().items():
        if name not in parameters:
            yield checkpoint_name(name), value.detach().to("cpu", copy=True).contiguous()


@torch.no_grad()
def iter_export_weights(
    model: nn.Module, *, merge: bool = True, gather: Gather | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights and persistent buffers under the names and shapes of a published checkpoint, CPU tensors, in order.

    At most one layer is held beside the model. `AutoModelForCausalLM.from_pretrained` reads what is written from it.
    """
    from transformers import PreTrainedModel

    base = unwrap(model)
    group: dict[str, torch.Tensor] = {}
    prefix: str | None = None
    for name, value in _chain(iter_weights(model, merge=merge, gather=gather), _persistent_buffers(base)):
        match = _LAYER.match(name)
        if (match[1] if match else name) != prefix:
            yield from _published(base, group) if isinstance(base, PreTrainedModel) else group.items()
            group, prefix = {}, match[1] if match else name
        group[name] = value
    yield from _published(base, group) if isinstance(base, PreTrainedModel) else group.items()


def _chain(*iterators: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for iterator in iterators:
        yield from iterator


def _published(base: Any, group: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    from transformers.core_model_loading import revert_weight_conversion

    for name, value in (revert_weight_conversion(base, group) if group else {}).items():
        yield name, value.contiguous()


def save_config(model: nn.Module, folder: Path | str) -> None:
    """config.json (and generation_config.json) of a transformers model, as an exported model needs them.

    The cache, switched off for training, is on again; nothing is written for a module without such a config.
    """
    base: Any = unwrap(model)
    if not hasattr(getattr(base, "config", None), "to_dict"):
        return
    config = copy.deepcopy(base.config)
    config.use_cache = True
    config.architectures = [type(base).__name__]
    config.dtype = next(base.parameters()).dtype
    config.save_pretrained(str(folder))
    if getattr(base, "generation_config", None) is not None:
        base.generation_config.save_pretrained(str(folder))

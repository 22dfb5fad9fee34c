"""Which modules adapters go on."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from outcore.model.weights import full_shape


def linear_names(model: nn.Module) -> list[str]:
    """Names of layers that "auto" adapts: linear ones (Conv1D too), without the output head, those whose names peft
    takes for experts of a mixture, and those that it refuses in this architecture (projections that a state-space
    kernel reads past their module)."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    found = [name for name, module in model.named_modules() if module is not head and _is_linear(module)]
    model_type = getattr(getattr(model, "config", None), "model_type", "")
    left_out = names_of_experts(model, found)
    left_out |= {leaf for leaf in set(map(leaf_of, found)) if _is_refused(model_type, leaf)}
    return [name for name in found if leaf_of(name) not in left_out]


def _is_linear(module: nn.Module) -> bool:
    """Whether a module maps [n, in] to [n, out]: a class made from nn.Linear may be a router that returns more, or
    work in groups. One with a forward of its own is asked on the meta device."""
    if not isinstance(module, nn.Linear):
        return type(module).__name__ == "Conv1D"
    if type(module).forward is nn.Linear.forward:
        return True
    weights = {name: torch.empty(full_shape(p), dtype=p.dtype, device="meta") for name, p in module.named_parameters()}
    x = torch.empty(2, module.in_features, dtype=module.weight.dtype, device="meta")
    try:
        output = functional_call(module, weights, (x,))
    except Exception:  # any model's own code may fail in any way on such an input
        return False
    return isinstance(output, torch.Tensor) and output.shape == (2, module.out_features)


@cache
def _is_refused(model_type: str, leaf: str) -> bool:
    """Whether peft refuses to adapt a layer of this name in a model of this type."""
    from peft import LoraConfig, inject_adapter_in_model
    from transformers import PreTrainedConfig

    probe: Any = nn.Module()
    probe.config = type("Probed", (PreTrainedConfig,), {"model_type": model_type})()
    probe.add_module(leaf, nn.Linear(1, 1, bias=False))
    try:
        inject_adapter_in_model(LoraConfig(r=1, target_modules=[leaf]), probe)
    except ValueError:
        return True
    return False


def leaf_of(name: str) -> str:
    return name.rpartition(".")[2]


def names_of_experts(model: nn.Module, names: list[str]) -> set[str]:
    """Last parts of those `names` that peft takes for parts of a mixture's experts or its router, which transformers 5
    holds as one weight for all of them."""
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel) or not any(len(full_shape(p)) == 3 for p in model.parameters()):
        return set()
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:  # a peft that takes names as they are
        return set()
    from peft import LoraConfig

    mapping = get_model_conversion_mapping(model)
    found = set()
    for name in {leaf_of(name) for name in names}:
        config = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(config, model=model, conversions=mapping)
        except ValueError:  # half of what is one weight
            found.add(name)
        else:
            found |= {name} - set(config.target_modules or ())
    return found

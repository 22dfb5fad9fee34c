"""One name per parameter, whatever is wrapped around the model: what checkpoints are keyed by."""

from __future__ import annotations

import torch
from torch import nn

WRAPPER_PREFIXES = ("module.", "_orig_mod.", "network.")
"""DeepSpeed's and DDP's `module`, torch.compile's `_orig_mod`, LossModule's `network`."""


def checkpoint_name(name: str) -> str:
    """The parameter's name without wrappers, as the plain transformers model calls it.

    `network.base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight` (LoRA in a loss module) becomes
    `model.layers.0.self_attn.q_proj.weight`; the adapter beside it `model.layers.0.self_attn.q_proj.lora_A.weight`.
    Of adapters on several parameters of one module, which peft nests, the inner ones keep their `base_layer`."""
    stripped = True
    while stripped:
        stripped = False
        for prefix in WRAPPER_PREFIXES:
            if name.startswith(prefix):
                name, stripped = name[len(prefix) :], True
    if name.startswith("base_model.model."):
        name = name[len("base_model.model.") :]
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    parts = [p for p, after in zip(parts, [*parts[1:], ""], strict=True) if p != "base_layer" or _is_adapter(after)]
    for index, part in enumerate(parts):
        if _is_adapter(part) and index + 1 < len(parts) and parts[index + 1] == "default":
            del parts[index + 1]
            break
    return ".".join(parts)


def _is_adapter(part: str) -> bool:
    return part.startswith("lora_")


def adapter_name(name: str) -> str:
    """What peft calls a parameter of this checkpoint name in an adapter's file."""
    return name.removesuffix(".weight") if name.endswith(".lora_magnitude_vector.weight") else name


def named_checkpoint_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter once by its checkpoint name, in the model's order; two parameters of one name are an error."""
    named: dict[str, nn.Parameter] = {}
    for full_name, parameter in model.named_parameters():
        name = checkpoint_name(full_name)
        if name in named:
            raise RuntimeError(f"Two parameters would be saved as {name!r}; the second is {full_name!r}.")
        named[name] = parameter
    return named


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the model saves beside its parameters, by name."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    state = model.state_dict()
    return {name: t for name, t in state.items() if name not in parameters and isinstance(t, torch.Tensor)}

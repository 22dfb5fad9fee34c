"""One name per parameter, whatever is wrapped around the model: what checkpoints are keyed by.

Questions whose answer follows from a model's config alone, asked by several parts of one start.

Which parameters have no weight decay: biases and norms, found as Hugging Face's Trainer finds them, by a norm's type
or by how it is called (`Trainer.get_decay_parameter_names`).

Tokens that end what a model writes, set where other programs look for them.

`generate`, vLLM and converters read `generation_config.json`, and some the configuration. A base model whose chats end
their turns with another token than its text would run on in all of them, because both know the text's end only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class ConfigKey:
    """A config as a key of `functools.lru_cache`: two of one class with equal fields and attention are one."""

    config: Any = field(compare=False)
    kind: type
    fields: str
    attention: str | None

    @classmethod
    def about(cls, config: Any) -> ConfigKey:
        """Read the key off a transformers config as it is now; what changes it later changes no answer given."""
        attention = getattr(config, "_attn_implementation", None)
        return cls(config, type(config), config.to_json_string(use_diff=False), attention)


UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")
"""Names, in lower case, of parameters without weight decay."""


def undecayed(model: nn.Module) -> frozenset[str]:
    """Checkpoint names of the model's parameters that have no weight decay."""
    named = {name for name, _ in model.named_parameters(remove_duplicate=False) if UNDECAYED.search(name.lower())}
    for prefix, module in model.named_modules():
        if isinstance(module, nn.LayerNorm):
            named.update(name for name, _ in module.named_parameters(prefix=prefix))
    return frozenset(map(checkpoint_name, named))


GENERATION_FILE = "generation_config.json"


def end_ids(eos_token_id: Any) -> list[int]:
    """`eos_token_id` as configurations write it (a number, several, or nothing) as a list."""
    if eos_token_id is None:
        return []
    return [int(token) for token in eos_token_id] if isinstance(eos_token_id, list | tuple) else [int(eos_token_id)]


def set_end_tokens(model: Any, tokenizer: Any, trained: Iterable[int]) -> list[int]:
    """Have what is exported of `model` (one of transformers') end its answers with the tokens that ended them so far,
    the tokenizer's EOS and those that the data trains. Returns all of them; nothing of a model without a configuration.
    """
    config, generation = getattr(model, "config", None), getattr(model, "generation_config", None)
    if config is None or not hasattr(config, "save_pretrained"):
        return []
    own = end_ids(tokenizer.eos_token_id)
    before = end_ids(generation.eos_token_id if generation is not None else None) or end_ids(config.eos_token_id)
    ends = list(dict.fromkeys([*before, *own, *trained]))
    if own and own[0] not in end_ids(config.eos_token_id):
        config.eos_token_id = own[0]  # one number: not every architecture's configuration takes more
    if generation is not None and ends:
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    return ends


def read_end_tokens(model: Any, folder: str | Path) -> None:
    """Give `model` the generation config that lies in `folder` beside an adapter or a checkpoint's configuration: its
    base has the one from before the training. Nothing where there is none."""
    from transformers import GenerationConfig

    if (Path(folder) / GENERATION_FILE).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)

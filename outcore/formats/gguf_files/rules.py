"""How llama.cpp names and keeps the weights of each architecture that is known here.

Names come from the `gguf` package's own table. Its converter turns the rows of Llama's query and key projections from
half-split to interleaved rotary order; everything else of these architectures is kept as it is."""

from __future__ import annotations

from typing import Any

import torch

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""transformers' model_type -> architecture of the file."""
INTERLEAVED = ("llama",)


class GgufRefused(ValueError):
    """Why this model cannot be written to, or read from, a GGUF file."""


def architecture_of(config: Any) -> str:
    """GgufRefused naming the architectures that are known."""
    if config.model_type not in ARCHITECTURES:
        raise GgufRefused(
            f"GGUF files are written and read for {', '.join(ARCHITECTURES)}, not for {config.model_type}. Convert the "
            "exported folder with llama.cpp's convert_hf_to_gguf.py instead"
        )
    scaling = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        raise GgufRefused(f"its positions are scaled ({kind}), which is not written to or read from GGUF files here")
    return ARCHITECTURES[config.model_type]


def rope_theta(config: Any) -> float:
    """The base of rotary frequencies."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta", getattr(config, "rope_theta", None) or 10000.0))


def gguf_names(config: Any, names: list[str]) -> dict[str, str]:
    """The file's name of each parameter. GgufRefused for one that llama.cpp has no name for."""
    import gguf

    architecture = architecture_of(config)
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found = {}
    for name in names:
        stem, _, suffix = name.rpartition(".")
        known = table.get_name(stem)
        if known is None:
            raise GgufRefused(f"llama.cpp's {architecture} has no place for {name}")
        found[name] = f"{known}.{suffix}"
    return found


def row_order(config: Any, name: str, *, to_file: bool) -> torch.Tensor | None:
    """The rows of a parameter in the order of the file (or of the model); None where both are the same."""
    leaf = name.split(".")[-2] if "." in name else ""
    if ARCHITECTURES[config.model_type] not in INTERLEAVED or leaf not in ("q_proj", "k_proj"):
        return None
    heads = config.num_attention_heads if leaf == "q_proj" else config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = (heads, 2, head_dim // 2) if to_file else (heads, head_dim // 2, 2)
    return torch.arange(heads * head_dim).view(shape).transpose(1, 2).reshape(-1)

"""How llama.cpp names and keeps the weights of each architecture that is known here.

Names come from the `gguf` package's own table. Its converter turns the rows of Llama's query and key projections from
half-split to interleaved rotary order; everything else of these architectures is kept as it is."""

from __future__ import annotations

from typing import Any

import torch

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
"""transformers' model_type -> architecture of the file."""
ONLY_READ = ("qwen3_moe",)
INTERLEAVED = ("llama",)
EXPERTS = (".experts.gate_up_proj", ".experts.down_proj")


class GgufRefused(ValueError):
    """Why this model cannot be written to, or read from, a GGUF file."""


def architecture_of(config: Any, *, to_file: bool) -> str:
    """GgufRefused naming the architectures that are known."""
    known = [name for name in ARCHITECTURES if not (to_file and name in ONLY_READ)]
    if config.model_type not in known:
        raise GgufRefused(
            f"GGUF files are {'written' if to_file else 'read'} for {', '.join(known)}, not for {config.model_type}. "
            + ("Convert the exported folder with llama.cpp's convert_hf_to_gguf.py" if to_file else "Take safetensors")
            + " instead"
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


def gguf_names(config: Any, names: list[str], *, to_file: bool) -> dict[str, tuple[str, ...]]:
    """The file's name of each parameter; of stacked experts' gate and up, which are two tensors there, both.

    GgufRefused for a parameter that llama.cpp has no name for."""
    import gguf

    architecture = architecture_of(config, to_file=to_file)
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    table = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    found = {}
    for name in names:
        # Stacked experts are parameters themselves; all others are a module's weight or bias.
        stem, suffix = (name, "weight") if name.endswith(EXPERTS) else name.rsplit(".", 1)
        stems = [stem.replace("gate_up_proj", half) for half in ("gate_proj", "up_proj")]
        known = [table.get_name(one) for one in (stems if stem.endswith(EXPERTS[0]) else [stem])]
        if None in known:
            raise GgufRefused(f"llama.cpp's {architecture} has no place for {name}")
        found[name] = tuple(f"{one}.{suffix}" for one in known)
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

"""Facts of a model for planners and builders, counted without memory (meta device) or on a live model.

One name per parameter, whatever is wrapped around the model: checkpoints are keyed by it.

Answers that follow from a model's config alone, for several parts of one start.

Parameters without weight decay: biases and norms, found as Hugging Face's Trainer finds them, by a norm's type or by
its name (`Trainer.get_decay_parameter_names`).

Tokens that end a model's answers, set where other programs look for them.

`generate`, vLLM and converters read `generation_config.json`, and some the configuration. A base model whose chats end
their turns with another token than its text would run on in all of them, because both know the text's end only."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from outcore.model.weights import full_numel, meta_skeleton


@dataclass(frozen=True)
class ModelFacts:
    """Sizes in numbers of elements, never bytes; shared (tied) parameters counted once."""

    total_params: int
    trainable_params: int
    largest_weight_numel: int
    """Elements of the largest single parameter: no partition buffer may be smaller."""
    num_tensors: int
    hidden_size: int
    num_layers: int
    vocab_size: int
    is_encoder_decoder: bool
    is_moe: bool
    tied: bool
    """True when the output head shares its weight with the input embedding."""
    short_positions: int | None = None
    """Positions up to which a model with two sets of rotary factors (LongRoPE: Phi 3.5) takes the short ones."""


def model_class_of(config: Any) -> type[Any]:
    """The transformers class that trains this config: sequence-to-sequence or causal. ValueError when there is none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

    mapping = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if config.is_encoder_decoder else MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise ValueError(
            f"transformers has no language model that trains a {config.model_type} config. Choose a causal or "
            "sequence-to-sequence language model."
        )
    found: Any = mapping[type(config)]
    return found[0] if isinstance(found, (tuple, list)) else found


def language_config(config: Any) -> Any:
    """The config that the language model is made from: the text part of one with more parts (Qwen3.5 as published),
    where the causal model takes that alone, as transformers' AutoModelForCausalLM does; else `config` itself."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text_class: Any = getattr(config, "sub_configs", {}).get("text_config")
    mapping = MODEL_FOR_CAUSAL_LM_MAPPING
    if text_class not in mapping or type(config) not in mapping or getattr(config, "is_encoder_decoder", False):
        return config
    if getattr(model_class_of(config), "config_class", None) is not text_class:
        return config
    text = config.get_text_config(decoder=True)
    if getattr(config, "quantization_config", None) is not None:
        text.quantization_config = config.quantization_config
    return text


def quantization_of(config: Any) -> dict[str, Any] | None:
    """The `quantization_config` of a checkpoint; None when its weights are stored in 16 or 32 bits."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None or isinstance(quantization, dict):
        return quantization
    return quantization.to_dict() if hasattr(quantization, "to_dict") else dict(vars(quantization))


def parameter_types(model: Any, dtype: torch.dtype, *, trained: bool) -> dict[str, torch.dtype]:
    """The type of every parameter, by name, of a transformers model made in `dtype`: what its constructor gave it and,
    with `trained` weights, fp32 where transformers keeps that (`_keep_in_fp32_modules`)."""
    from transformers.core_model_loading import build_glob_alternation

    types = {name: p.dtype for name, p in model.named_parameters()}
    if trained and (plan := model._get_dtype_plan(dtype)):
        pattern, pattern_of_group, _ = build_glob_alternation(list(plan))
        for name in types:
            if (match := pattern.search(name)) and match.lastgroup:
                types[name] = plan[pattern_of_group[match.lastgroup]]
    return types


def resolve_attention(config: Any, wanted: str) -> tuple[str, tuple[str, ...]]:
    """The attention implementation for a config, and notes for people: auto is sdpa, or eager where that is missing.

    ValueError for sdpa where the model caps attention's logits: torch's kernels cannot, and transformers 5.17
    leaves the cap out without a word (Gemma 2)."""
    parts = (config, config.get_text_config(decoder=True), config.get_text_config(encoder=True))
    cap = max(getattr(part, "attn_logit_softcapping", None) or 0.0 for part in parts)
    if wanted == "sdpa" and cap:
        raise ValueError(
            f"This {config.model_type} model caps the logits of attention (at {cap:g}), which torch's fused kernels "
            "(sdpa) leave out: it would be another model. Use --attn_implementation auto."
        )
    if wanted != "auto":
        return wanted, ()
    if cap:
        return "eager", ("attention: eager, because torch's fused kernels (sdpa) cannot cap the logits of attention",)
    try:
        model_class = model_class_of(config)
    except ValueError:  # remote code: its class is known only after it has been loaded
        return "sdpa", ()
    if getattr(model_class, "_supports_sdpa", False):
        return "sdpa", ()
    return "eager", (f"attention: eager, because {model_class.__name__} does not support torch's fused kernels (sdpa)",)


def skeleton_and_tied(model_class: type[Any], config: Any) -> tuple[nn.Module, tuple[int, ...]]:
    """The model on the meta device, and the elements of each weight that its constructor makes and then ties away.

    Whoever takes weights as they are made (ZeRO-3 partitions them so) has these too: a decoder makes its head before it
    ties it, T5 the embeddings of encoder and decoder and the head."""
    made: list[nn.Parameter] = []
    hook = register_module_parameter_registration_hook(lambda module, name, parameter: made.append(parameter))
    try:
        skeleton = meta_skeleton(model_class, config)
    finally:
        hook.remove()
    kept = {id(parameter) for parameter in skeleton.parameters()}
    tied = {id(parameter): parameter.numel() for parameter in made if id(parameter) not in kept}
    return skeleton, tuple(tied.values())


def model_facts(model_or_config: Any) -> ModelFacts:
    """Facts of a live model (also partitioned by ZeRO-3, also with adapters) or of a transformers config."""
    if isinstance(model_or_config, nn.Module):
        model, config = model_or_config, getattr(model_or_config, "config", None)
    else:
        config = model_or_config
        model = meta_skeleton(model_class_of(config), config)
    parameters = list(model.parameters())
    text = config.get_text_config(decoder=True) if config is not None and hasattr(config, "to_dict") else None
    counts = [full_numel(p) for p in parameters]
    return ModelFacts(
        total_params=sum(counts),
        trainable_params=sum(n for n, p in zip(counts, parameters, strict=True) if p.requires_grad),
        largest_weight_numel=max(counts, default=0),
        num_tensors=len(parameters),
        hidden_size=int(getattr(text, "hidden_size", 0) or 0),
        num_layers=_num_layers(model, text),
        vocab_size=int(getattr(text, "vocab_size", 0) or 0),
        is_encoder_decoder=bool(getattr(config, "is_encoder_decoder", False)),
        is_moe=_is_moe(text),
        tied=_is_tied(model),
        short_positions=_short_positions(text),
    )


def _num_layers(model: nn.Module, text: Any) -> int:
    layers = getattr(text, "num_hidden_layers", None)
    if isinstance(layers, int):
        decoder_layers = getattr(text, "num_decoder_layers", None)
        return layers + decoder_layers if isinstance(decoder_layers, int) else layers
    return max((len(m) for m in model.modules() if isinstance(m, nn.ModuleList)), default=0)


def _short_positions(text: Any) -> int | None:
    rope = getattr(text, "rope_parameters", None) or {}
    sets = [rope, *(of_kind for of_kind in rope.values() if isinstance(of_kind, dict))]
    return min((s["original_max_position_embeddings"] for s in sets if s.get("rope_type") == "longrope"), default=None)


def _is_moe(text: Any) -> bool:
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text, name, None) or 0) > 1 for name in names)


def _is_tied(model: nn.Module) -> bool:
    for name in ("get_input_embeddings", "get_output_embeddings"):
        if not callable(getattr(model, name, None)):
            return False
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
    except NotImplementedError:
        return False
    return head is not None and getattr(embedding, "weight", None) is getattr(head, "weight", 0)


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
    """Turn a parameter's checkpoint name into the one that peft gives it in an adapter's file."""
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
    """Tensors that the model saves beside its parameters, by name."""
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


def set_end_tokens(
    model: Any, tokenizer: Any, trained: Collection[int], say: Callable[[str], None] | None = None
) -> list[int]:
    """Have what is exported of `model` (one of transformers') end its answers with the tokens that ended them so far,
    the tokenizer's EOS and those that the data trains, said where these are others. Returns all of them; nothing of a
    model without a configuration."""
    config, generation = getattr(model, "config", None), getattr(model, "generation_config", None)
    if config is None or not hasattr(config, "save_pretrained"):
        return []
    if not hasattr(config, "eos_token_id"):
        config = config.get_text_config()  # an image-text model's own has none
    own = end_ids(tokenizer.eos_token_id)
    before = end_ids(generation.eos_token_id if generation is not None else None) or end_ids(config.eos_token_id)
    ends = list(dict.fromkeys([*before, *own, *trained]))
    if own and own[0] not in end_ids(config.eos_token_id):
        config.eos_token_id = own[0]  # one number: not every architecture's configuration takes more
    if generation is not None and ends:
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    if say is not None and set(trained) - set(own):
        words = [f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in ends]
        say(f"answers end with {' or '.join(words)}: the exported generation_config.json says so")
    return ends


def read_end_tokens(model: Any, folder: str | Path) -> None:
    """Give `model` the generation config that lies in `folder` beside an adapter or a checkpoint's configuration: its
    base has the one from before the training. Nothing where there is none."""
    from transformers import GenerationConfig

    if (Path(folder) / GENERATION_FILE).is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)

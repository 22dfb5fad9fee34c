"""Shapes by name: real models to plan for or train from scratch, and tiny ones that learn on two CPU cores.

A preset is a transformers model type and the fields that differ from that type's defaults. The sizes of real models
are those of the config.json their makers publish; `num_parameters` is checked against the meta device by the tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outcore.common.hub import RUN_FOLDERS, near_models
from outcore.common.words import did_you_mean


@dataclass(frozen=True)
class Preset:
    """One shape: `model_type` and `fields` make a transformers config."""

    name: str
    model_type: str
    num_parameters: int
    summary: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    vocab_from_tokenizer: bool = False
    """True: the tokenizer decides the vocabulary (tiny shapes); False: the published size, grown if it must be."""
    published: str | None = None
    """Hub id of the trained model of this shape."""
    packed: str = ""
    """Format in which its makers publish most of its weights; '': 16 bits."""

    @property
    def is_encoder_decoder(self) -> bool:
        return self.model_type in ("t5",)


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def _llama3(hidden: int, layers: int, heads: int, intermediate: int, tied: bool, factor: float) -> dict[str, Any]:
    # Llama 3.1 and 3.2: vocabulary 128,256, 8 key-value heads, 131,072 positions by scaled rotary embedding.
    return {
        "vocab_size": 128256,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": intermediate,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _llama3_rope(factor),
        "tie_word_embeddings": tied,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    }


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, tied: bool) -> dict[str, Any]:
    # Qwen3: vocabulary 151,936, 8 key-value heads of 128, query and key normalised, 40,960 positions.
    return {
        "vocab_size": 151936,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "tie_word_embeddings": tied,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    }


# gpt-oss: the type's defaults are the 120 B model's.
_GPT_OSS = {"num_hidden_layers": 36, "num_local_experts": 128}

_PRESETS = (
    # Own shapes. A few million parameters: on two CPU cores the loss falls visibly within minutes.
    Preset(
        "tiny",
        "llama",
        4_000_000,
        "Llama-like, for the embedded default",
        {
            "vocab_size": 4096,
            "hidden_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 704,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
        vocab_from_tokenizer=True,
    ),
    Preset(
        "tiny-moe",
        "qwen3_moe",
        1_017_600,
        "mixture of 4 experts, 2 active, for tests",
        {
            "vocab_size": 4096,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 256,
            "moe_intermediate_size": 128,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.01,
            "max_position_embeddings": 2048,
            "tie_word_embeddings": True,
        },
        vocab_from_tokenizer=True,
    ),
    Preset(
        "tiny-t5",
        "t5",
        1_181_440,
        "encoder-decoder, for tests",
        {
            "vocab_size": 4096,
            "d_model": 128,
            "d_kv": 32,
            "d_ff": 256,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
        vocab_from_tokenizer=True,
    ),
    # The defaults of the model type.
    Preset("gpt2", "gpt2", 124_439_808, "GPT-2 small, learned positions, tied", published="openai-community/gpt2"),
    Preset(
        "t5-small",
        "t5",
        60_506_624,
        "T5 small, encoder-decoder",
        {
            "vocab_size": 32128,
            "d_model": 512,
            "d_kv": 64,
            "d_ff": 2048,
            "num_layers": 6,
            "num_heads": 8,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
        },
        published="google-t5/t5-small",
    ),
    # Own shape on the Qwen3-MoE architecture: about 0.5 B parameters, a third of them active.
    Preset(
        "moe-small",
        "qwen3_moe",
        497_193_216,
        "mixture of 16 experts, 2 active",
        {
            "vocab_size": 32768,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "intermediate_size": 2048,
            "moe_intermediate_size": 1024,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.01,
            "max_position_embeddings": 32768,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": True,
        },
    ),
    Preset(
        "llama-1b",
        "llama",
        1_235_814_400,
        "Llama 3.2 1B, tied",
        _llama3(2048, 16, 32, 8192, True, 32.0),
        published="meta-llama/Llama-3.2-1B",
    ),
    Preset(
        "llama-3b",
        "llama",
        3_212_749_824,
        "Llama 3.2 3B, tied",
        _llama3(3072, 28, 24, 8192, True, 32.0),
        published="meta-llama/Llama-3.2-3B",
    ),
    Preset(
        "llama-8b",
        "llama",
        8_030_261_248,
        "Llama 3.1 8B",
        _llama3(4096, 32, 32, 14336, False, 8.0),
        published="meta-llama/Llama-3.1-8B",
    ),
    Preset(
        "llama-70b",
        "llama",
        70_553_706_496,
        "Llama 3.1 70B",
        _llama3(8192, 80, 64, 28672, False, 8.0),
        published="meta-llama/Llama-3.1-70B",
    ),
    Preset(
        "qwen3-4b",
        "qwen3",
        4_022_468_096,
        "Qwen3 4B, tied",
        _qwen3(2560, 36, 32, 9728, True),
        published="Qwen/Qwen3-4B",
    ),
    Preset(
        "qwen3-8b", "qwen3", 8_190_735_360, "Qwen3 8B", _qwen3(4096, 36, 32, 12288, False), published="Qwen/Qwen3-8B"
    ),
    Preset(
        "qwen3-14b",
        "qwen3",
        14_768_307_200,
        "Qwen3 14B",
        _qwen3(5120, 40, 40, 17408, False),
        published="Qwen/Qwen3-14B",
    ),
    Preset(
        "qwen3-32b",
        "qwen3",
        32_762_123_264,
        "Qwen3 32B",
        _qwen3(5120, 64, 64, 25600, False),
        published="Qwen/Qwen3-32B",
    ),
    Preset(
        "gpt-oss-120b",
        "gpt_oss",
        116_829_156_672,
        "gpt-oss 120B, mixture of 128 experts, 4 active",
        _GPT_OSS,
        published="openai/gpt-oss-120b",
        packed="mxfp4",
    ),
    Preset(
        "qwen3-30b-a3b",
        "qwen3_moe",
        30_532_122_624,
        "Qwen3 30B, mixture of 128 experts, 8 active",
        {
            **_qwen3(2048, 48, 32, 6144, False),
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.001,
        },
        published="Qwen/Qwen3-30B-A3B",
    ),
)

PRESETS: Mapping[str, Preset] = MappingProxyType({preset.name: preset for preset in _PRESETS})


SIZES = {
    "1b": "llama-1b",
    "3b": "llama-3b",
    "8b": "llama-8b",
    "14b": "qwen3-14b",
    "30b": "qwen3-32b",
    "32b": "qwen3-32b",
    "llama-30b": "qwen3-32b",
    "70b": "llama-70b",
}
"""Sizes people ask for -> the preset that stands for them."""


OF_THE_HUB = ("gpt2", "t5-small")
"""Presets of which the hub has a trained model by the same name, without an owner."""


def named_model(name: str) -> tuple[str, str]:
    """The setting, and its value, that a model's name stands for, in training and plans alike.

    What lies here comes first: a folder or a GGUF file has weights, other files are a shape. Then presets, by name or
    size, of which a run begins with random weights; then runs that ended here. All else, and what the hub has under a
    preset's name, is a model of the hub."""
    path = Path(name).expanduser()
    if path.exists():
        is_shape = path.suffix.lower() in (".json", ".yaml", ".yml") and path.is_file()
        return "config_file" if is_shape else "model_name_or_path", name
    preset = PRESETS.get(SIZES.get(name.lower(), name))
    if preset is not None and name not in OF_THE_HUB:
        return "preset", preset.name
    finished = RUN_FOLDERS[0] / name
    return "model_name_or_path", str(finished) if finished.is_dir() else name


def check_preset_name(name: str) -> Preset:
    """The preset of that name; ValueError with the nearest names otherwise."""
    if name not in PRESETS:
        near = did_you_mean(name, PRESETS) or near_models(name)
        raise ValueError(
            f"There is no preset {name!r}.{near} Presets: {', '.join(PRESETS)}. "
            "A trained model is named by --model_name_or_path instead, your own shape by --config_file."
        )
    return PRESETS[name]


def preset_config(name: str, vocab_size: int | None = None):
    """The transformers config of a preset.

    `vocab_size` is the tokenizer's: tiny shapes take it as it is, real shapes keep the published size and only grow
    (to a multiple of 64) when the tokenizer has more entries."""
    from transformers import AutoConfig

    preset = check_preset_name(name)
    fields = dict(preset.fields)
    config = AutoConfig.for_model(preset.model_type, **fields)
    if vocab_size is not None:
        if preset.vocab_from_tokenizer:
            config.vocab_size = vocab_size
        elif vocab_size > config.vocab_size:
            config.vocab_size = -(-vocab_size // 64) * 64
    return config

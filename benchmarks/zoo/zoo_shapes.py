"""Every causal architecture of transformers, and fields that its config class leaves to published checkpoints."""

from __future__ import annotations

from typing import Any

PUBLISHED: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 5e5}},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_shared_experts": 2, "n_routed_experts": 128, "num_experts_per_tok": 6},
    "hunyuan_v1_dense": {"head_dim": 128, "num_key_value_heads": 8},
    "hunyuan_v1_moe": {"head_dim": 128, "num_key_value_heads": 8},
    "lfm2_moe": {"num_hidden_layers": 24, "layer_types": ["conv", "conv", "full_attention"] * 8},
    "ministral": {"head_dim": 128},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}
"""What published checkpoints set and the defaults of the class lack or contradict."""


def architectures() -> list[str]:
    """Model types with a causal language model, by name."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return sorted(name for name in CONFIG_MAPPING if CONFIG_MAPPING[name] in MODEL_FOR_CAUSAL_LM_MAPPING)


def config_of(name: str) -> Any:
    """The config that a run of this model type trains: the text part of one with more parts, and a decoder."""
    from transformers import AutoConfig

    from outcore.model.facts import language_config

    fields = PUBLISHED.get(name, {})
    config = AutoConfig.for_model(name, **fields)
    if config.is_encoder_decoder:  # its class for causal models is the decoder alone
        config = AutoConfig.for_model(name, is_encoder_decoder=False, is_decoder=True, **fields)
    elif getattr(config, "is_decoder", None) is False:  # BERT and its kin see what follows otherwise
        config = AutoConfig.for_model(name, is_decoder=True, **fields)
    return language_config(config)

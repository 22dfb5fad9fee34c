"""Small models and batches for the tests of outcore/model."""

import torch
from transformers import AutoConfig, PretrainedConfig

from outcore.model import ModelSettings
from outcore.model.trial.shrink import shrink_config


def tiny_settings(preset: str = "tiny", **fields) -> ModelSettings:
    small = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96} if preset == "tiny" else {}
    defaults = {"precision": "fp32", "seq_length": 32, "vocab_size": 128, "config_overrides": small}
    return ModelSettings(preset=preset, **{**defaults, **fields})


def tiny_config(model_type: str) -> PretrainedConfig:
    """The default config made small; T5's own names of its sizes are not those that the trial shrinks."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
    return shrink_config(AutoConfig.for_model(model_type, **(sizes if model_type == "t5" else {})))


def batch_of(rows: int = 2, length: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 128, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}

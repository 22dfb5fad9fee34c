"""Small models and batches for the tests of outcore/model."""

import torch

from outcore.model import ModelSettings


def tiny_settings(preset: str = "tiny", **fields) -> ModelSettings:
    small = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96} if preset == "tiny" else {}
    defaults = {"precision": "fp32", "seq_length": 32, "vocab_size": 128, "config_overrides": small}
    return ModelSettings(preset=preset, **{**defaults, **fields})


def batch_of(rows: int = 2, length: int = 16, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 128, (rows, length), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone()}

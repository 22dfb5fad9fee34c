"""Configs of which no model can be made: each is told in words with its file, by whichever door it comes."""

import json

import pytest
import torch
from safetensors.torch import save_file

from outcore.model import ModelSettings, load_model
from tests.refused import refused

GOOD = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 100,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(("changed", "words"), [
    ({"num_attention_heads": 0}, "ZeroDivisionError|num_attention_heads is 0"), ({"head_dim": 0}, "head_dim is 0"),
    ({"num_key_value_heads": 0}, "num_key_value_heads is 0"), ({"num_attention_heads": -4}, "attention_heads is -4"),
    ({"vocab_size": 0}, "vocab_size is 0"), ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    ({"hidden_act": "relo"}, "no llama model can be made of it: KeyError: 'relo'"),
    ({"rope_scaling": {"type": "x"}}, "no llama model can be made of it"), ({"dtype": "bf61"}, "bf61"),
    ({"num_attention_heads": [4]}, "num_attention_heads"), ({"hidden_size": "64"}, "hidden_size"), (DEEP, "recursion"),
    ({"intermediate_size": -1}, "intermediate_size is -1"), ({"pad_token_id": 999}, "of it: AssertionError: Padding"),
    ({"rope_theta": "x"}, "made of it: TypeError"), ({"quantization_config": 3}, "'int' object has no attribute"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "rope_theta": 1}}, "made of it: ZeroDivisionError"),
], ids=str)  # fmt: skip
def test_a_config_of_which_no_model_can_be_made_is_told_with_its_file(tmp_path, changed, words):
    text = changed if isinstance(changed, str) else json.dumps(GOOD | changed)
    (tmp_path / "config.json").write_text(text if text[0] == "{" else f'{{"model_type": "llama", "more": {text}}}')
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    doors = {"model_name_or_path": tmp_path}, {"config_file": tmp_path / "config.json"}
    for where, door in zip((tmp_path, "config.json"), doors, strict=True):
        settings = ModelSettings(**{name: str(path) for name, path in door.items()}, seq_length=8)
        refused(ValueError, f"(?s){where}.*({words})", lambda settings=settings: load_model(settings, lazy=True))

"""Tiny configs: sizes that must agree do, and every kind of layer is still there."""

import pytest

from outcore.model.facts import model_class_of
from outcore.model.trial.shrink import HEAD_DIM, HEADS, HIDDEN, VOCAB, WINDOW, shrink_config
from outcore.model.weights.initialise import meta_skeleton

transformers = pytest.importorskip("transformers")


def tiny(model_type: str, **fields):
    return shrink_config(transformers.AutoConfig.for_model(model_type, **fields))


def test_heads_of_keys_and_values_shrink_under_any_name():
    assert tiny("falcon", num_kv_heads=8, num_attention_heads=128, hidden_size=8192).num_kv_heads == 2
    assert tiny("llama", num_key_value_heads=8, num_attention_heads=32).num_key_value_heads == 2
    assert tiny("llama", num_key_value_heads=1, num_attention_heads=32).num_key_value_heads == 1
    assert tiny("llama", num_key_value_heads=32, num_attention_heads=32).num_key_value_heads == HEADS


@pytest.mark.parametrize(("model_type", "expand", "heads", "width"), [
    ("mamba2", "expand", "num_heads", "head_dim"), ("bamba", "mamba_expand", "mamba_n_heads", "mamba_d_head"),
    ("granitemoehybrid", "mamba_expand", "mamba_n_heads", "mamba_d_head"),
    ("zamba2", "mamba_expand", "n_mamba_heads", "mamba_headdim"),
])  # fmt: skip
def test_heads_of_a_state_space_mixer_fill_its_width(model_type, expand, heads, width):
    config = tiny(model_type)
    assert getattr(config, width) == HEAD_DIM
    assert getattr(config, heads) * HEAD_DIM == getattr(config, expand) * HIDDEN


@pytest.mark.parametrize("width", [1024, 512, 768])
def test_a_mixers_own_width_shrinks_with_its_heads(width):
    """Falcon-H1 tells the width beside heads and expansion; with width = expansion x hidden its tiny copy failed."""
    config = tiny("falcon_h1", hidden_size=512, mamba_d_ssm=width, mamba_n_heads=width // 64, mamba_d_head=64)
    assert config.mamba_n_heads * config.mamba_d_head == config.mamba_d_ssm == width * HIDDEN // 512
    assert config.mamba_n_heads % 2 == 0 and config.mamba_d_head == HEAD_DIM


def test_sizes_that_follow_from_others_still_do():
    assert tiny("recurrent_gemma").lru_width == HIDDEN
    latent = tiny("longcat_flash")
    assert latent.qk_head_dim == latent.qk_nope_head_dim + latent.qk_rope_head_dim
    twice_named = tiny("xlstm")
    assert (twice_named.embedding_dim, twice_named.num_blocks) == (HIDDEN, twice_named.num_hidden_layers)


def test_parts_beside_the_text_shrink_and_the_original_stays():
    config = transformers.AutoConfig.for_model("gemma3")
    small = shrink_config(config)
    assert small.vision_config.hidden_size == HIDDEN and small.vision_config.num_hidden_layers == 2
    assert small.text_config.hidden_size == HIDDEN and small.text_config.vocab_size == VOCAB
    assert config.vision_config.hidden_size > HIDDEN and config.text_config.vocab_size > VOCAB


def test_rotary_frequencies_become_plain_for_each_kind_of_layer_and_an_own_type_stays():
    yarn = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0}
    kinds = {"full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    plain = tiny("gemma3_text", rope_parameters=kinds).rope_parameters
    assert plain["full_attention"] == {"rope_type": "default", "rope_theta": 5e5}
    config = transformers.AutoConfig.for_model("gemma3_text")
    config.rope_parameters = {"full_attention": None, "sliding_attention": yarn}
    without = shrink_config(config).rope_parameters
    assert without == {"full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}
    assert tiny("qwen3_5").vision_config.rope_parameters["rope_type"] == "axial"
    scaled = tiny("ministral3").rope_parameters
    assert scaled["rope_type"] == "default" and scaled["original_max_position_embeddings"] == WINDOW


def test_layers_of_their_own_sizes_keep_the_proportion():
    """Gemma 4: heads of full attention are twice as wide as those of sliding attention, and fewer."""
    config = tiny("gemma4_text", num_kv_shared_layers=10)
    kinds = {kind: layer.head_dim for kind, layer in zip(config.layer_types, config.per_layer_config, strict=True)}
    assert kinds == {"sliding_attention": HEAD_DIM, "full_attention": 2 * HEAD_DIM}
    model = model_class_of(config)(config)
    assert {layer.self_attn.head_dim for layer in model.model.layers} == set(kinds.values())


@pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
def test_layers_that_share_keys_and_values_come_after_those_they_take_them_from(model_type):
    config = tiny(model_type, num_kv_shared_layers=15)
    shared = config.num_kv_shared_layers
    assert shared == 2 and len(config.layer_types) == config.num_hidden_layers <= 8
    assert set(config.layer_types[-shared:]) <= set(config.layer_types[:-shared])
    assert set(config.layer_types) == {"sliding_attention", "full_attention"}


def test_every_kind_of_layer_is_kept_by_whichever_list_and_however_late():
    config = tiny("qwen3", num_hidden_layers=30, layer_types=["full_attention"] * 25 + ["sliding_attention"] * 5)
    assert config.layer_types == ["full_attention", "full_attention", "sliding_attention"]
    config = transformers.AutoConfig.for_model("llama", num_hidden_layers=30)
    config.indexer_types = ["full", "shared", "shared", "none"] + ["full"] * 26
    config.uses_rope = [1] * 20 + [0] * 10
    small = shrink_config(config)
    assert (small.num_hidden_layers, small.indexer_types) == (5, ["full", "shared", "shared", "none", "full"])
    assert small.uses_rope == [1, 1, 1, 1, 0]
    config.widths = [[96 + i] for i in range(30)]  # of every layer another: no kinds
    assert shrink_config(config).num_hidden_layers == 5


@pytest.mark.parametrize("model_type", ["kimi_linear", "bailing_hybrid", "qwen3_next", "qwen3_5_moe_text"])
def test_linear_attention_is_tiny_too(model_type):
    """Its plain PyTorch code works in chunks x chunks x widths x heads: 32 heads of 128 made a trial take a minute."""
    if model_type not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    config = tiny(model_type)
    model = meta_skeleton(model_class_of(config), config)
    assert max(p.numel() for p in model.parameters()) < 50_000

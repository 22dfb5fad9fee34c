"""Parameter counts: against the meta device for every preset, LoRA against peft; work and bytes by hand."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import transformers

from outcore.config import TrainConfig
from outcore.flow.layers import draws_random_numbers
from outcore.flow.parts import discover_units
from outcore.model import PRESETS, LoraSettings, ModelSettings, preset_shape, resolve_shape, shape_from_config
from outcore.model.presets import preset_config
from outcore.plan.choose import mild_changes
from outcore.plan.profile import RunRequest
from outcore.plan.run.forecast import run_shape
from outcore.plan.terms import device_bytes, step_flops
from outcore.sizing.activations import (
    checkpoint_bytes,
    layer_activation_bytes,
    layer_backward_bytes,
    logits_bytes,
    mask_bytes,
)
from outcore.sizing.layouts import StreamLayout
from outcore.sizing.shape import COUNTED, shape_from_fields
from outcore.sizing.work import step_work
from outcore.train.configure.rooms import model_settings_of
from tests.flow.models import FAMILIES, tiny_loaded
from tests.refused import refused


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_count_as_the_meta_device_does(name):
    shape = preset_shape(name)
    assert shape.total_params == PRESETS[name].num_parameters
    if PRESETS[name].model_type in COUNTED:  # the others are counted there anyway
        assert shape == shape_from_config(name, preset_config(name))


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "tiny-t5", "gpt2"])
def test_adapters_count_as_peft_makes_them(name):
    import torch

    from outcore.model import LoraSettings
    from outcore.model.adapters import with_adapters
    from outcore.model.facts import model_class_of

    config = preset_config(name)
    with torch.device("meta"):
        model = with_adapters(model_class_of(config)(config), LoraSettings(r=4))
    trainable = [p.numel() for p in model.parameters() if p.requires_grad]
    shape = preset_shape(name).with_lora(4)
    assert shape.trainable_params == sum(trainable)
    assert [4 * dim for times, dims in shape.adapters for dim in dims * times] == trainable  # in the order of updates


@pytest.mark.parametrize(("name", "targets"), [
    ("tiny", "q_proj,v_proj"),
    ("tiny", "o_proj, mlp.down_proj"),
    ("tiny", "embed_tokens,q_proj"),
    ("tiny", "all-linear"),
    ("tiny-moe", "q_proj,k_proj"),
    ("tiny-t5", "q,wi"),
    ("gpt2", "c_attn"),
    ("gpt2", "c_proj"),  # of attention and of the feed-forward part
])  # fmt: skip
def test_adapters_on_named_modules_count_as_peft_makes_them(name, targets):
    import torch
    from peft import LoraConfig, get_peft_model

    from outcore.model.facts import model_class_of

    config = preset_config(name)
    names = targets if targets == "all-linear" else [target.strip() for target in targets.split(",")]
    with torch.device("meta"):
        model = get_peft_model(model_class_of(config)(config), LoraConfig(r=4, target_modules=names))
    trainable = [p.numel() for p in model.parameters() if p.requires_grad]
    flags = {"preset": name, "lora_r": 4, "lora_target_modules": targets}
    asked = run_shape(model_settings_of(TrainConfig(**flags), "fp32", 8), None)
    shape = resolve_shape(name, lora_target_modules=targets).with_lora(4)
    for found in (asked, shape):
        assert found.trainable_params == sum(trainable)
        assert [4 * dim for times, dims in found.adapters for dim in dims * times] == trainable
    assert shape.lora_targets == asked.lora_targets == (() if targets == "all-linear" else tuple(names))
    assert shape.base_params == preset_shape(name).base_params


@pytest.mark.more(after=3)
@pytest.mark.parametrize("name", ["tiny", "gpt2"])
@pytest.mark.parametrize(("use_dora", "whole"), [(True, ()), (False, ("LAST", "EMBED")), (True, ("LAST",))])
def test_lengths_and_modules_trained_whole_are_counted(name: str, use_dora: bool, whole: tuple[str, ...]) -> None:
    import torch

    from outcore.model import LoraSettings
    from outcore.model.adapters import with_adapters
    from outcore.model.facts import model_class_of

    words = {"tiny": ("input_layernorm", "embed_tokens,lm_head"), "gpt2": ("ln_1", "wte,lm_head")}[name]
    names = tuple(",".join(words[w == "EMBED"] for w in whole).split(",")) if whole else ()
    config = preset_config(name)
    with torch.device("meta"):
        model = model_class_of(config)(config)
        base = sum(p.numel() for p in model.parameters())
        model = with_adapters(model, LoraSettings(r=4, use_dora=use_dora, modules_to_save=names))
    flags = {"preset": name, "lora_r": 4, "use_dora": use_dora, "lora_modules_to_save": ",".join(names) or None}
    asked = run_shape(model_settings_of(TrainConfig(**flags), "fp32", 8), None)
    planned = resolve_shape(name, use_dora=use_dora, modules_to_save=names).with_lora(4)
    for shape in (asked, planned):
        assert shape.trainable_params == sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert shape.total_params == sum(p.numel() for p in model.parameters()) and shape.base_params == base
        ends = [p.numel() for n, p in model.named_parameters() if any(f".{w}." in n for w in words[1].split(","))]
        assert shape.whole_in_ends == (sum(ends) if "EMBED" in whole else 0)


def test_adapters_on_experts_are_named_by_the_weight_that_holds_them_all():
    for targets in ("gate,o_proj", "gate_proj,up_proj,down_proj"):
        with pytest.raises(ValueError, match=r"for parts of this model's experts or its router.*write experts for all"):
            resolve_shape("tiny-moe", lora_target_modules=targets)
    names = ("experts", "gate_up_proj", "down_proj")
    counted = [resolve_shape("tiny-moe", lora_target_modules=one).with_lora(4).adapter_params for one in names]
    assert counted[0] == counted[1] + counted[2] > counted[1] > counted[2] > 0


def test_a_smaller_model_has_its_adapters_on_the_same_modules():
    shape = resolve_shape("llama-3b", lora_target_modules="q_proj").with_lora(8)
    smaller = [other for words, other, _ in mild_changes(shape, RunRequest()) if words == "a smaller model: llama-1b"]
    assert [other.adapter_params for other in smaller] == [8 * 16 * (2048 + 2048)]


@pytest.mark.more(after=6)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_stay_eager_where_the_engine_finds_random_numbers(family):
    loaded = tiny_loaded(family)
    assert shape_from_config(family, loaded.config).stays_eager == draws_random_numbers(discover_units(loaded))


def test_layers_of_several_classes_are_counted():
    shape = shape_from_config("jamba", tiny_loaded("jamba").config)
    assert shape.num_layers == 5 and len(set(shape.layer_params)) > 1


def test_layers_stay_eager_with_a_balancing_loss_and_with_dropout_of_adapters():
    eager = [name for name in PRESETS if preset_shape(name).stays_eager and not preset_shape(name).is_encoder_decoder]
    assert eager == ["tiny-moe", "gpt2", "moe-small", "qwen3-30b-a3b"]
    for rate in (0.0, 0.1):
        adapters = LoraSettings(r=4, alpha=8, dropout=rate)
        settings = ModelSettings(preset="llama-1b", seq_length=8, lora=adapters)
        assert run_shape(settings, None).stays_eager == (rate > 0)


def test_other_architectures_and_sources(tmp_path):
    fields = {
        "model_type": "gemma2", "vocab_size": 1000, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 256,
    }  # fmt: skip
    path = tmp_path / "my shape.json"
    path.write_text(json.dumps(fields))
    shape = resolve_shape(str(path))
    assert shape.tied and shape.gated_ffn and shape.num_layers == 3 and shape.max_positions == 256
    assert shape.embedding_params == 64_000
    assert len(set(shape.layer_params)) == 1
    path.rename(tmp_path / "config.json")
    folder = resolve_shape(str(tmp_path))
    assert folder == dataclasses.replace(shape, name=tmp_path.name), "a folder needs no weights to be planned"
    assert resolve_shape("llama-8b") == preset_shape("llama-8b")


def test_names_that_are_nothing(tmp_path):
    refused(ValueError, "Did you mean 'llama-8b'", lambda: resolve_shape("lama-8b"))
    refused(ValueError, r"holds no config\.json", lambda: resolve_shape(str(tmp_path)))
    refused(ValueError, "counted on the meta device", lambda: shape_from_fields("x", "mamba", {}))
    refused(ValueError, "at least 1", lambda: preset_shape("tiny").with_lora(0))


def test_work_by_hand():
    shape, request = preset_shape("llama-8b"), RunRequest()
    assert checkpoint_bytes(shape, 2, 2048) == 2048 * 4096 * 2 * 33
    # per token: norms 2 x (16,384 + 16,384), residual 16,384, q 32,768, kv 6,144, ffn 114,688, in flight 73,728
    assert layer_activation_bytes(shape, 2, 1024, 1) == 65_536 + 16_384 + 32_768 + 6_144 + 114_688 + 73_728
    assert logits_bytes(shape, 10**6) == 3 * 4 * (2**28 // (4 * 128256)) * 128256
    assert logits_bytes(shape, 7) == 3 * 4 * 7 * 128256
    assert mask_bytes(shape, 2, 1024, 2048) == 2 * 1024 * 1024 * (1 + 2)
    assert mask_bytes(preset_shape("t5-small"), request, 512, 512) == 0  # one document a row
    flops = step_flops(shape, request, 1024, 1)
    layers, attention = 2 * 32 * 218_112_000, 2 * 1024 * 4096 * 32
    head = 2 * 128256 * 4096
    assert flops.forward == layers + head and flops.attention_forward == attention
    assert flops.backward == 2 * (layers + head) + layers and flops.attention_backward == 3.5 * attention
    assert flops.total == 4 * layers + 3 * head + 4.5 * attention
    no_recompute = step_flops(shape, RunRequest(activation_checkpointing=False), 1024, 1)
    assert no_recompute.backward == 2 * (layers + head) and no_recompute.attention_backward == 2.5 * attention


def test_bytes_through_the_devices_memory_by_hand():
    shape = preset_shape("llama-8b")  # 32 layers of 4096, 32 heads and 8 of keys, each 128, feed-forward 14336
    forward, head, backward = device_bytes(shape, RunRequest(), 1024, 10, 3)
    assert forward == 2 * (8 * 4096 + 4 * (32 + 8) * 128 + 3 * 14336) * 32 * 10 * 3
    adapted = device_bytes(shape.with_lora(16), RunRequest(), 1024, 10, 3)
    inner, outer = 6 * 4096 + 14336, 2 * 4096 + 2 * 1024 + 2 * 14336 + 4096
    assert adapted[0] - forward == 2 * (inner + 4 * outer) * 32 * 10 * 3 and adapted[1] == head
    assert adapted[2] - 3 * forward == 2 * (6 * inner + 8 * outer) * 32 * 10 * 3 and backward > 3 * forward


def test_a_layer_keeps_for_its_backward_what_the_planner_counts():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {**preset_config("tiny").to_dict(), "num_hidden_layers": 1}
    config = LlamaConfig(**fields)
    config._attn_implementation = "sdpa"
    model, tokens = LlamaForCausalLM(config).to(torch.bfloat16), 32
    assert config.num_key_value_heads < config.num_attention_heads
    x = torch.randn(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    rotation = model.model.rotary_emb(x, torch.arange(tokens)[None])
    others = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *rotation, x)}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in others:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model.layers[0](x, position_embeddings=rotation, attention_mask=None)
    shape = shape_from_config("one layer", config)
    peak = layer_backward_bytes(shape, 2, tokens, tokens)
    in_flight = tokens * 2 * shape.ffn_width * (3 - 1)  # three gradients, when the product itself is gone
    factors = tokens * 4 * (2 + shape.num_heads)  # of two norms, and of each head's softmax
    assert sum(storage.nbytes() for storage in kept.values()) == peak - in_flight + factors


def test_unfused_attention_keeps_its_scores():
    shape = preset_shape("tiny")
    unfused = dataclasses.replace(shape, fused_attention=False)
    more = layer_activation_bytes(unfused, 2, 512, 1) - layer_activation_bytes(shape, 2, 512, 1)
    assert more == 4 * 512 * 6  # heads x keys x (16-bit scores and their fp32 softmax)


def test_soft_caps_cost_scores_and_passes_over_the_logits():
    """Gemma 2: no fused kernel caps the scores of attention, and its head caps the logits of a large vocabulary."""
    shape = shape_from_config("gemma2", transformers.AutoConfig.for_model("gemma2"))
    assert not shape.fused_attention and shape.caps_logits
    plain = dataclasses.replace(shape, fused_attention=True, caps_logits=False)
    request, seq = RunRequest(), 2048
    capped, fused = (step_flops(s, request, seq, 8192) for s in (shape, plain))
    assert capped.attention == 2 * fused.attention and capped.forward == fused.forward
    assert device_bytes(shape, request, seq, 8192, 1)[1] > 1.2 * device_bytes(plain, request, seq, 8192, 1)[1]
    works = [step_work(s, 2, seq, 8192, StreamLayout(4, 1), 1 << 20, None) for s in (shape, plain)]
    assert works[0].head == 2 * works[1].head and works[0].layer > works[1].layer


def test_a_config_that_was_changed_is_counted_again():
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=32, num_attention_heads=2, vocab_size=64)
    config.num_hidden_layers = 2
    first, same = shape_from_config("first", config), shape_from_config("same", copy.deepcopy(config))
    config.num_hidden_layers = 3
    other = shape_from_config("other", config)
    assert [len(shape.layer_params) for shape in (first, same, other)] == [2, 2, 3]
    assert (first.name, same.name, other.name) == ("first", "same", "other")

"""Gemma 4's text models: kinds of layers with heads of their own, a scalar in each layer, a mixture beside an MLP."""

from dataclasses import replace

import pytest
import torch
import transformers

from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.check.gradients import run_units, why_config_not_trained, why_not_trained
from outcore.flow.parts import discover_units
from outcore.model import ModelSettings, load_model
from outcore.model.facts import checkpoint_name
from outcore.model.trial.abilities import check_abilities
from outcore.model.trial.shrink import shrink_config
from tests.engine.stream.training import LR, batches_of, plain_training
from tests.flow.layers.test_compiled import assert_compiled_equals_eager
from tests.flow.models import (
    TINY_SETTINGS,
    assert_same_grads,
    packed_batch,
    padded_batch,
    plain_batch,
    plain_gradients,
    tiny_of,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif("gemma4_text" not in transformers.CONFIG_MAPPING, reason="transformers has no Gemma 4"),
]
PLAIN = {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "final_logit_softcapping": 30.0}
DENSE = {
    **PLAIN, "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60, "num_attention_heads": 32,
    "num_key_value_heads": 16, "num_global_key_value_heads": 4, "sliding_window": 1024,
}  # fmt: skip
MIXTURE = {
    **PLAIN, "hidden_size": 2816, "intermediate_size": 2112, "num_hidden_layers": 30, "num_attention_heads": 16,
    "num_key_value_heads": 8, "num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128,
    "top_k_experts": 8, "moe_intermediate_size": 704,
}  # fmt: skip
KINDS = [("gemma4_text", DENSE), ("gemma4_text", MIXTURE), ("gemma4_unified_text", DENSE)]


def config_of(model_type, fields):
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers has no {model_type}")
    if model_type == "gemma4_unified_text":
        fields = {name: value for name, value in fields.items() if name != "hidden_size_per_layer_input"}
    return transformers.AutoConfig.for_model(model_type, **fields)


def tiny(model_type, fields, **changes):
    """With scalars of the layers that are not 1, as trained ones are not."""
    loaded = tiny_of(shrink_config(config_of(model_type, fields)), **changes)
    for index, layer in enumerate(loaded.model.model.layers):
        layer.layer_scalar.fill_(0.5 + 0.25 * index)
    return loaded


@pytest.mark.more(after=1)
@pytest.mark.parametrize(("model_type", "fields"), KINDS)
def test_large_ones_are_streamed(model_type, fields):
    config = config_of(model_type, fields)
    assert why_config_not_trained(config) == ""
    abilities = check_abilities(config)
    assert abilities.chunked_head and abilities.isolation == "position_ids"


@pytest.mark.more(after=3)
@pytest.mark.parametrize("kind", [plain_batch, padded_batch, packed_batch])
@pytest.mark.parametrize(("model_type", "fields"), KINDS)
def test_loss_and_gradients_equal_plain_autograd(model_type, fields, kind):
    loaded = tiny(model_type, fields)
    layers = loaded.model.model.layers
    assert len({layer.self_attn.head_dim for layer in layers}) == len(
        {float(layer.layer_scalar) for layer in layers[:2]}
    )
    assert why_not_trained(loaded) == ""
    batch = kind(2, 20, seed=1)
    ce, _, expected = plain_gradients(loaded, [batch])
    objective, mine = run_units(loaded, batch)
    total = int((batch["labels"][:, 1:] != -100).sum())
    assert float(objective) / total == pytest.approx(ce, rel=1e-5)
    assert_same_grads(mine, {checkpoint_name(name): grad for name, grad in expected.items()})
    if fields is MIXTURE:
        assert all(float(grad.abs().max()) > 0 for name, grad in mine.items() if "experts.gate_up_proj" in name)


def test_layers_leave_nothing_for_others():
    """transformers 5.17 has the last layer of each kind leave its keys and values even where none uses them."""
    units = discover_units(tiny("gemma4_text", DENSE))
    log = units.record(plain_batch())
    for index, layer in enumerate(units.layers):
        call = log.call(index)
        assert "shared_kv_states" in call.ledgers
        with torch.no_grad():
            layer(log.hidden, *call.args, **call.kwargs)
    assert not any(ledger for index in range(len(units.layers)) for ledger in log.call(index).ledgers.values())


def test_layers_that_use_earlier_layers_keys_and_values_are_the_reason():
    why = why_config_not_trained(config_of("gemma4_unified_text", {**DENSE, "num_kv_shared_layers": 20}))
    assert (
        "hand each other more than the hidden states: layer 6 uses what layers 4 and 5 left in shared_kv_states" in why
    )


def test_inputs_of_their_own_for_layers_are_the_reason():
    why = why_config_not_trained(config_of("gemma4_text", {**DENSE, "hidden_size_per_layer_input": 256}))
    assert "its layers get a learned tensor besides the hidden states (made of parameters of" in why
    assert "model.embed_tokens_per_layer" in why


@pytest.mark.more(after=1)
@pytest.mark.parametrize("fields", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_an_engine_trains_as_plain_adamw(engines, fields):
    reference = tiny("gemma4_text", fields)
    steps = 6 if fields is DENSE else 5  # in the sixth a router's near tie falls otherwise on some CPUs
    losses, norms = plain_training(reference, steps, max_norm=1.0)
    settings = replace(TINY_SETTINGS, max_grad_norm=1.0)
    engine = build_stream_engine(tiny("gemma4_text", fields), settings, device="cpu", pinned_grant=False)
    engines.append(engine)
    results = [engine.train_step(batches_of(step), LR) for step in range(steps)]
    assert [r.loss for r in results] == pytest.approx(losses, rel=2e-4)
    assert [r.grad_norm for r in results] == pytest.approx(norms, rel=2e-3)


@pytest.mark.slow
def test_compiled_layers_equal_eager_ones():
    torch._dynamo.reset()
    loaded = tiny(
        "gemma4_text", {**DENSE, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    )
    compiled = assert_compiled_equals_eager(loaded)
    assert compiled.num_kinds == len(loaded.model.model.layers)  # each has a scalar of its own
    torch._dynamo.reset()


@pytest.mark.more(after=1)
@pytest.mark.parametrize("fields", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_trained_weights_are_read_layer_by_layer(engines, tmp_path, fields):
    tiny("gemma4_text", fields, dtype=torch.bfloat16).model.save_pretrained(tmp_path)
    settings = ModelSettings(model_name_or_path=str(tmp_path), precision="bf16", seq_length=16)
    whole, lazy = load_model(settings), load_model(settings, lazy=True)
    scalars = [name for name, _ in lazy.model.named_buffers() if name.endswith("layer_scalar")]
    assert len({float(lazy.model.get_buffer(name)) for name in scalars}) == len(scalars) == whole.facts.num_layers
    losses = []
    for loaded in (whole, lazy):
        engines.append(build_stream_engine(loaded, TINY_SETTINGS, device="cpu", pinned_grant=False))
        losses.append([engines[-1].train_step([plain_batch(2, 12, seed=1)], 1e-3).loss for _ in range(2)])
    assert losses[0] == losses[1]
    engines[-1].export(tmp_path / "final")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "final", dtype=torch.bfloat16)
    assert all(torch.equal(again.get_buffer(name), whole.model.get_buffer(name)) for name in scalars)


@pytest.mark.more(after=1)
@pytest.mark.parametrize("model_type", ["gemma4", "gemma4_unified"])
def test_of_a_published_one_the_language_model_is_streamed_when_the_rest_is_left_out(tmp_path, model_type):
    fields = {"text_config": {**PLAIN, "num_global_key_value_heads": 2, "use_bidirectional_attention": "vision"}}
    if model_type == "gemma4_unified":
        fields["text_config"].pop("hidden_size_per_layer_input")
    config = shrink_config(config_of(model_type, {**fields, "vision_config": {}}))
    transformers.AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(tmp_path)
    settings = ModelSettings(model_name_or_path=str(tmp_path), precision="bf16", seq_length=16)
    assert why_not_trained(load_model(settings, lazy=True)) != ""
    settings = replace(settings, config_overrides={"vision_config": None, "audio_config": None})
    whole, lazy = load_model(settings), load_model(settings, lazy=True)
    assert why_not_trained(lazy) == "" and lazy.feed is not None
    values = {name: value for group in lazy.feed.groups() for name, value in group.items()}
    expected = {checkpoint_name(name): p for name, p in whole.model.named_parameters()}
    assert values.keys() == expected.keys() and all(torch.equal(values[name], expected[name]) for name in values)
    assert all("language_model" in name or name.startswith("lm_head") for name in values)

"""Terms that a model's own forward adds to its cross-entropy: trained, by its balancing loss or by its whole run."""

from __future__ import annotations

import pytest
import torch
import transformers

from outcore.engine.stream.check.gradients import why_config_not_trained
from outcore.model.inputs import count_target_tokens
from outcore.model.loss import TokenLoss
from outcore.model.trial.abilities import check_abilities
from outcore.model.trial.loss_terms import LossTerms
from tests.model.test_architectures import assert_same_grads, grads, random_batch, tiny_model, zero_dropout

pytestmark = pytest.mark.usefixtures("one_thread")
DBRX = {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4}, "ffn_config": {"moe_loss_weight": 0.5}}
SWITCH = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_heads": 4, "vocab_size": 128, "decoder_start_token_id": 0}
SWITCH |= {"num_layers": 4, "num_decoder_layers": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
BALANCED = {
    "jetmoe": {"output_router_logits": True, "aux_loss_coef": 0.5},
    "dbrx": {"output_router_logits": True, **DBRX},
    "mixtral": {"output_router_logits": True, "router_aux_loss_coef": 0.5},
}
WHOLE = {
    "bamba": ({"z_loss_coefficient": 0.3, "attn_layer_indices": [1]}, "z_loss_coefficient 0.3"),
    "switch_transformers": (
        {**SWITCH, "output_router_logits": True, "router_z_loss_coef": 0.2, "router_jitter_noise": 0.0},
        "losses of its routers",
    ),
}


@pytest.mark.parametrize("name", BALANCED)
def test_a_balancing_loss_of_any_name_is_the_models_own_and_streamed(name):
    model = tiny_model(name, **BALANCED[name])
    assert same_as_own(model, TokenLoss(model, num_chunks=3)).aux_loss is not None
    assert check_abilities(model.config).terms == LossTerms()
    assert why_config_not_trained(model.config) == ""


@pytest.mark.parametrize("name", WHOLE)
def test_a_term_that_only_the_whole_forward_gives_is_named_and_trained_whole(name):
    fields, words = WHOLE[name]
    model = tiny_model(name, attention="eager", **fields)
    abilities = check_abilities(model.config)
    assert not abilities.chunked_head
    assert words in abilities.terms.unknown
    same_as_own(model, TokenLoss(model, chunked=False, terms=abilities.terms))
    if not model.config.is_encoder_decoder:
        assert words in why_config_not_trained(model.config)


def test_rows_without_a_target_add_no_term():
    model = tiny_model("bamba", **WHOLE["bamba"][0])
    batch = random_batch()
    batch["labels"][:] = -100
    result = TokenLoss(model, chunked=False, terms=check_abilities(model.config).terms)(model, batch)
    assert float(result.objective(10).detach()) == 0.0


@pytest.mark.parametrize("name", ["llama4_text", "doge"])
def test_a_model_without_a_balancing_loss_of_its_own_gets_none(name):
    fields = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = tiny_model(name, **fields)
    abilities = check_abilities(model.config)
    assert not abilities.terms.balances
    assert same_as_own(model, TokenLoss(model, terms=abilities.terms)).aux_loss is None
    assert why_config_not_trained(model.config) == ""


@pytest.mark.parametrize("name", ["minimax", "gpt_oss"])
def test_a_router_is_found_by_its_path_and_packing_stays(name):
    plain = transformers.AutoConfig.for_model(name)
    config = transformers.AutoConfig.for_model(name, output_router_logits=True)
    assert why_config_not_trained(config) == ""
    assert check_abilities(config).isolation == check_abilities(plain).isolation == {"gpt_oss": "mask_map"}.get(name)


def same_as_own(model, loss):
    """Both losses and gradients of one batch are equal; returns ours."""
    zero_dropout(model)
    batch = random_batch()
    own = model(**batch)
    own.loss.backward()
    expected = grads(model)
    result = loss(model, batch)
    tokens = count_target_tokens(batch, model.config.is_encoder_decoder)
    objective = result.objective(tokens)
    torch.testing.assert_close(objective, own.loss, rtol=1e-5, atol=1e-6)
    objective.backward()
    assert_same_grads(grads(model), expected)
    return result

"""Terms that a model's own forward adds to its cross-entropy: trained, by its balancing loss or by its whole run."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers

from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.check.gradients import why_config_not_trained
from outcore.model import ModelSettings, load_model
from outcore.model.forward import accepted_names, count_target_tokens
from outcore.model.loss import TokenLoss
from outcore.model.trial.abilities import check_abilities
from outcore.model.trial.loss_terms import USUAL_TERMS, LossTerms, mean_cross_entropy, try_loss_terms
from tests.flow.models import TINY_SETTINGS, plain_batch, plain_gradients, tiny_loaded
from tests.model.trial.test_architectures import assert_same_grads, grads, random_batch, tiny_model, zero_dropout

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


class Picky(torch.nn.Module):
    """Adds `z_loss` to its loss, and fails with labels where `a_weight` is 0."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = torch.nn.Embedding(128, 128)

    def forward(self, input_ids, labels=None):
        logits = self.embed(input_ids)
        loss = mean_cross_entropy(logits, labels) + self.config.z_loss * (1.0 / self.config.a_weight)
        return SimpleNamespace(loss=loss, logits=logits)


def test_a_field_without_which_a_forward_fails_is_not_taken_for_the_term(caplog):
    terms = try_loss_terms(Picky(transformers.PretrainedConfig(a_weight=0.5, z_loss=0.25)), Picky)
    assert "of z_loss 0.25" in terms.unknown
    assert not caplog.messages
    assert try_loss_terms(Picky(transformers.PretrainedConfig(a_weight=0.5, z_loss=0.0)), Picky).unknown == ""


def test_a_loss_that_cannot_be_tried_is_told(caplog):
    assert try_loss_terms(Picky(transformers.PretrainedConfig(a_weight=0.0, z_loss=0.25)), Picky) == USUAL_TERMS
    assert "could not be tried (ZeroDivisionError" in caplog.text


def test_rows_without_a_target_add_no_term():
    model = tiny_model("bamba", **WHOLE["bamba"][0])
    batch = random_batch()
    batch["labels"][:] = -100
    result = TokenLoss(model, chunked=False, terms=check_abilities(model.config).terms)(model, batch)
    assert float(result.objective(10).detach()) == 0.0


def test_a_model_without_a_balancing_loss_of_its_own_gets_none():
    model = tiny_model("llama4_text", output_router_logits=True, router_aux_loss_coef=0.5)
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
    asked = {}
    asks = getattr(model.config, "output_router_logits", False)
    if asks and model.config.model_type == "jetmoe" and "output_router_logits" in accepted_names(model)[0]:
        asked["output_router_logits"] = True  # transformers 5.17 does not ask its config
    try:
        own = model(**batch, **asked)
    except AttributeError as error:  # transformers 5.17 finds no routers of DBRX
        pytest.skip(f"this transformers' own forward fails: {error}")
    own.loss.backward()
    expected = grads(model)
    result = loss(model, batch)
    tokens = count_target_tokens(batch, model.config.is_encoder_decoder)
    objective = result.objective(tokens)
    torch.testing.assert_close(objective, own.loss, rtol=1e-5, atol=1e-6)
    objective.backward()
    assert_same_grads(grads(model), expected)
    return result


@pytest.mark.parametrize("tiling", ["off", "on"])
def test_a_balancing_loss_may_count_whole_for_each_micro_batch_as_transformers_trainer_adds_it(engines, tiling):
    loaded = tiny_loaded("mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    terms = replace(loaded.abilities.terms, per_micro_batch=True)
    loaded.abilities = replace(loaded.abilities, terms=terms)
    batches = [plain_batch(2, 14), plain_batch(1, 9, seed=1)]
    total = sum(count_target_tokens(batch) for batch in batches)
    by_hand = sum(
        loaded.model(**batch).loss * count_target_tokens(batch) / total
        + 0.5 * loaded.model(**batch).aux_loss * (1 - count_target_tokens(batch) / total)
        for batch in batches
    )
    loss, _, grads = plain_gradients(loaded, batches)
    by_hand.backward()
    assert_same_grads(grads, {n: p.grad.clone() for n, p in loaded.model.named_parameters()})
    loaded.model.zero_grad()
    settings = replace(TINY_SETTINGS, tiling=tiling, tile_bytes=7000, max_grad_norm=0.0)
    engines.append(build_stream_engine(loaded, settings, device="cpu", pinned_grant=False, trial=False))
    result = engines[-1].train_step(batches, 1e-3)
    expected = float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads.values()])))
    assert result.grad_norm == pytest.approx(expected, rel=1e-5)
    assert (result.loss, result.aux_loss) == (pytest.approx(loss), pytest.approx(float(by_hand.detach()) - loss))


def test_which_way_the_balancing_loss_counts_is_a_setting():
    shape = {"preset": "tiny-moe", "seq_length": 32, "vocab_size": 128, "precision": "fp32"}
    ways = {way: load_model(ModelSettings(router_loss=way, **shape)) for way in ("tokens", "micro_batch")}
    assert [loaded.abilities.terms.per_micro_batch for loaded in ways.values()] == [False, True]
    batch = random_batch()
    losses = [float(loaded.token_loss()(loaded.model, batch).objective(10_000)) for loaded in ways.values()]
    assert losses[1] > losses[0] + 0.005
    with pytest.raises(ValueError, match="router_loss"):
        ModelSettings(router_loss="rows", **shape)

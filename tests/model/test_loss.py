"""Losses: token-weighted, chunked, a user's own; what a step counts and what it refuses."""

import pytest
import torch
from torch import nn

from outcore.model import load_model
from outcore.model.forward import CausalParts, unwrap
from outcore.model.forward.head import find_decoder
from outcore.model.loss import LossModule, TokenLoss
from tests.model.cases import batch_of, tiny_settings
from tests.refused import refused

pytestmark = pytest.mark.usefixtures("one_thread")


def test_any_split_of_the_batch_gives_the_same_gradients():
    loaded = load_model(tiny_settings("tiny-moe", config_overrides={"output_router_logits": False}))
    model, loss = loaded.model, loaded.token_loss(num_chunks=2)
    batch = batch_of(4)
    batch["labels"][0, :11] = -100
    total = int((batch["labels"][:, 1:] != -100).sum())
    loss(model, batch).objective(total).backward()
    whole = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for rows in (slice(0, 1), slice(1, 4)):
        loss(model, {key: value[rows] for key, value in batch.items()}).objective(total).backward()
    for name, parameter in model.named_parameters():
        if name in whole:
            torch.testing.assert_close(parameter.grad, whole[name], rtol=1e-4, atol=1e-7)


def test_the_router_loss_counts_by_the_share_of_tokens():
    loaded = load_model(tiny_settings("tiny-moe"))
    result = loaded.token_loss()(loaded.model, batch_of())
    assert result.aux_loss is not None and result.aux_loss.item() > 0
    expected = (result.loss_sum + result.aux_loss * 30) / 60
    torch.testing.assert_close(result.objective(60), expected)
    with torch.no_grad():
        assert loaded.token_loss()(loaded.model, batch_of()).aux_loss is None, "evaluation is cross-entropy alone"


def test_the_whole_path_equals_the_chunked_one():
    loaded = load_model(tiny_settings("tiny-moe"))
    chunked = loaded.token_loss(num_chunks=4)(loaded.model, batch_of())
    whole = TokenLoss(loaded.model, chunked=False, num_chunks=2)(loaded.model, batch_of())
    torch.testing.assert_close(chunked.loss_sum, whole.loss_sum)
    torch.testing.assert_close(chunked.aux_loss, whole.aux_loss)


def test_an_encoder_decoder_equals_its_own_loss():
    loaded = load_model(tiny_settings("tiny-t5"))
    batch = {**batch_of(), "labels": batch_of(seed=1)["labels"]}
    batch["labels"][0, 4:] = -100
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    loaded.model.eval()
    result = loaded.token_loss(num_chunks=3)(loaded.model, batch)
    assert int(result.n_tokens) == 20
    torch.testing.assert_close(result.objective(20), loaded.model(**batch).loss)
    assert not loaded.abilities.packing and "encoder-decoder" in loaded.abilities.packing_reason


def test_a_micro_batch_without_targets_weighs_nothing():
    loaded = load_model(tiny_settings())
    batch = batch_of()
    batch["labels"].fill_(-100)
    result = loaded.token_loss(num_chunks=3)(loaded.model, batch)
    assert result.loss_sum.item() == 0 and int(result.n_tokens) == 0
    result.objective(5).backward()
    assert all(p.grad is None or not p.grad.any() for p in loaded.model.parameters())


def test_a_users_loss_is_weighted_by_tokens_and_survives_an_empty_micro_batch():
    loaded = load_model(tiny_settings())

    def mean_loss(model, batch):
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())

    def sum_and_count(model, batch):
        count = (batch["labels"][:, 1:] != -100).sum()
        return mean_loss(model, batch) * count, count

    batch = batch_of()
    expected = loaded.token_loss()(loaded.model, batch).loss_sum
    no_labels = {**batch, "labels": torch.full_like(batch["labels"], -100)}
    for loss_fn in (mean_loss, sum_and_count):
        torch.testing.assert_close(TokenLoss(loaded.model, loss_fn=loss_fn)(loaded.model, batch).loss_sum, expected)
        empty = TokenLoss(loaded.model, loss_fn=loss_fn)(loaded.model, no_labels)
        assert empty.loss_sum.item() == 0
        empty.objective(1).backward()
        assert all(not p.grad.any() for p in loaded.model.parameters() if p.grad is not None)


@pytest.mark.parametrize(("returned", "words"), [
    (1.5, "it returned float"), (torch.zeros(3), r"of shape \(3,\)"),
    ((torch.zeros(()), 4), "counted 4 tokens, the batch has 30"),
])  # fmt: skip
def test_a_users_loss_that_breaks_the_contract(returned, words):
    loaded = load_model(tiny_settings())
    with pytest.raises(RuntimeError, match=words):
        TokenLoss(loaded.model, loss_fn=lambda model, batch: returned)(loaded.model, batch_of())


def test_a_model_without_logits_is_refused():
    class NoLogits(nn.Linear):
        def forward(self, input_ids):  # pyright: ignore[reportIncompatibleMethodOverride]
            return {"x": input_ids}

    refused(RuntimeError, "without logits", lambda: TokenLoss(NoLogits(2, 2))(NoLogits(2, 2), batch_of()))


def test_taking_a_model_apart_leaves_it_alone():
    model = load_model(tiny_settings()).model
    modules, children = list(model.modules()), dict(model._modules)
    parts = CausalParts(model)
    parts.logits(torch.zeros(1, 3, 64))
    assert list(model.modules()) == modules and dict(model._modules) == children
    assert find_decoder(nn.Linear(2, 2)) is None
    refused(ValueError, "no single child", lambda: CausalParts(nn.Linear(2, 2)))


def test_the_loss_module_is_found_through():
    loaded = load_model(tiny_settings())
    module = loaded.loss_module()
    assert isinstance(module, LossModule) and unwrap(module) is loaded.model
    objective, loss_sum, n_tokens = module(batch_of(), 30.0)
    torch.testing.assert_close(objective, loss_sum / n_tokens)
    assert module({"input_ids": batch_of()["input_ids"]}).logits.shape == (2, 16, 128)
    assert unwrap(torch.compile(loaded.model)) is loaded.model  # pyright: ignore[reportArgumentType]

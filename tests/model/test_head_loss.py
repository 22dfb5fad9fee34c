"""The user's own loss of each token's logits: the same by plain PyTorch, by `TokenLoss` and by the streaming engine."""

from contextlib import closing

import pytest
import torch
import torch.nn.functional as F

from outcore.common.quantities import MIB
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.check.gradients import run_units, why_not_trained
from outcore.engine.stream.settings import StreamSettings
from outcore.model import ModelSettings, load_model, summed_loss
from outcore.model.hook import is_head_loss
from tests.flow.models import (
    TINY_SETTINGS,
    packed_batch,
    padded_batch,
    plain_batch,
    plain_gradients,
    set_dropout,
    tiny_loaded,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def smoothed(logits, labels):
    """Label smoothing and a penalty on the normaliser: neither is cross-entropy."""
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1) + 1e-2 * logits.logsumexp(-1) ** 2


def by_hand(model, batch):
    """Mean over the unmasked tokens by the whole model's own forward."""
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1].float()
    labels = batch["labels"][:, 1:]
    return smoothed(logits[labels != -100], labels[labels != -100]).mean()


@pytest.mark.parametrize("make_batch", [plain_batch, padded_batch, packed_batch])
def test_loss_and_gradients_are_those_of_plain_pytorch(make_batch):
    loaded, batch = tiny_loaded("llama"), make_batch()
    loaded.head_loss = smoothed
    model = loaded.model.eval()
    expected = by_hand(model, batch)
    named = dict(model.named_parameters())
    grads = dict(zip(named, torch.autograd.grad(expected, list(named.values())), strict=True))
    whole = loaded.token_loss()(model, batch)
    assert float(whole.loss_sum / whole.n_tokens) == pytest.approx(float(expected), rel=1e-5)
    objective, mine = run_units(loaded, batch)
    assert float(objective) / int(whole.n_tokens) == pytest.approx(float(expected), rel=1e-5)
    largest = max(float(g.abs().max()) for g in grads.values())
    for name, grad in grads.items():
        torch.testing.assert_close(mine[name].view(grad.shape), grad, rtol=1e-3, atol=1e-5 * largest)
    loaded.head_loss = None
    assert float(run_units(loaded, batch)[0]) != pytest.approx(float(objective), rel=1e-3)


def test_the_engine_trains_and_evaluates_on_it():
    loaded = tiny_loaded("llama")
    loaded.head_loss = smoothed
    expected = float(by_hand(loaded.model.eval(), plain_batch()))
    loaded.model.train()
    settings = StreamSettings(staging_bytes=4 * MIB, slot_bytes=65536, num_slots=2, optimizer_backend="torch")
    with closing(build_stream_engine(loaded, settings, device="cpu", pinned_grant=False)) as engine:
        assert engine.evaluate([plain_batch()]).loss == pytest.approx(expected, rel=1e-5)
        losses = [engine.train_step([plain_batch()], 1e-2).loss for _ in range(4)]
        assert losses[0] == pytest.approx(expected, rel=1e-5) and losses[-1] < losses[0]


OTHER_HEADS = [
    ("gpt2", {}),
    ("gemma3_text", {"tie_word_embeddings": True}),
    ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.1}),
]


@pytest.mark.parametrize(("model_type", "fields"), OTHER_HEADS)
def test_an_engine_computes_its_gradient_for_other_heads(engines, model_type, fields):
    """Tied, scaled, soft-capped, and with an auxiliary loss beside it; ragged micro-batches, one of them padded."""
    batches = [plain_batch(2, 12, 1), padded_batch(1, 9, 2)]

    def made():
        loaded = tiny_loaded(model_type, **fields)
        set_dropout(loaded.model, 0.0)
        loaded.head_loss = smoothed
        return loaded

    loss, aux, gradients = plain_gradients(made(), batches)
    engines.append(build_stream_engine(made(), TINY_SETTINGS, device="cpu", pinned_grant=False))
    found = engines[-1].train_step(batches, 1e-3)
    assert found.loss == pytest.approx(loss, rel=1e-5) and found.aux_loss == pytest.approx(aux, rel=1e-5)
    assert bool(aux) == ("router_aux_loss_coef" in fields)
    norm = sum(float(grad.double().square().sum()) for grad in gradients.values()) ** 0.5
    assert found.grad_norm == pytest.approx(norm, rel=1e-4)


def test_a_loss_that_is_not_of_each_token_is_told_so():
    logits, targets = torch.randn(5, 7), torch.tensor([1, -100, 2, 3, -100])
    with pytest.raises(RuntimeError, match="one loss for each of the 5 tokens"):
        summed_loss(logits, targets, lambda logits, labels: F.cross_entropy(logits, labels))
    with pytest.raises(RuntimeError, match="it returned float"):
        summed_loss(logits, targets, lambda logits, labels: 1.0)  # pyright: ignore[reportArgumentType]
    nan_where_masked = summed_loss(
        logits, targets, lambda logits, labels: torch.where(labels == 0, torch.nan, labels.float())
    )
    assert float(nan_where_masked) == 6.0, "what is returned for masked tokens counts nothing"


MODULE = """
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

def build(config, tokenizer):
    shape = LlamaConfig(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                        num_attention_heads=2, num_key_value_heads=2)
    return AutoModelForCausalLM.from_config(shape), {loss}

def of_tokens(logits, labels):
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)

def of_the_model(model, batch):
    return model(input_ids=batch["input_ids"]).logits.float().mean()
"""


@pytest.mark.parametrize(
    ("loss", "reason"), [("of_tokens", ""), ("None", ""), ("of_the_model", "may look at the whole model")]
)
def test_which_losses_of_a_module_can_be_streamed(tmp_path, loss, reason):
    file = tmp_path / "mine.py"
    file.write_text(MODULE.replace("{loss}", loss))
    loaded = load_model(ModelSettings(model_module=f"{file}:build", precision="fp32", seq_length=16))
    assert is_head_loss(loaded.head_loss) == (loss == "of_tokens")
    assert (loaded.loss_fn is not None) == (loss == "of_the_model")
    why = why_not_trained(loaded)
    assert reason in why and bool(why) == bool(reason)

"""Every architecture: the chunked loss equals the model's own, packed documents equal separate ones."""

from typing import Any

import pytest
import torch

from outcore.model.facts import model_class_of
from outcore.model.forward import count_target_tokens, forward_inputs
from outcore.model.forward.inputs import document_numbers
from outcore.model.load import enable_activation_checkpointing
from outcore.model.loss import TokenLoss
from outcore.model.trial.abilities import TOLERANCE, check_abilities
from outcore.model.trial.shrink import VOCAB, shrink_config

transformers = pytest.importorskip("transformers")

MIXTURES = ("mixtral", "qwen3_moe", "granitemoe", "gpt_oss")
EAGER_ONLY = ("gemma2", "gpt_oss", "bloom")
CAUSAL = [
    *("llama", "gemma2", "gpt2", "mixtral", "qwen2", "qwen3", "mistral", "gemma3_text", "phi", "gpt_neox"),
    *("qwen3_moe", "granite", "granitemoe", "cohere", "opt", "gpt_oss", "gemma4_text"),
]
pytestmark = pytest.mark.usefixtures("one_thread")


def tiny_model(model_type: str, seed: int = 0, attention: str | None = None, **fields):
    config = shrink_config(transformers.AutoConfig.for_model(model_type, **fields))
    attention = attention or ("eager" if model_type in EAGER_ONLY else "sdpa")
    torch.manual_seed(seed)
    model = model_class_of(config)._from_config(config, dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 1.0 / parameter.shape[-1] ** 0.5)
    return model.train()


def zero_dropout(model) -> None:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attn_dropout", "dropout", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def random_batch(rows: int = 2, length: int = 20, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, VOCAB, (rows, length), generator=generator)
    labels = ids.clone()
    labels[:, :3] = -100
    labels[0, 9] = -100
    return {"input_ids": ids, "labels": labels}


def grads(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_grads(a, b, rtol: float = 1e-4) -> None:
    assert a.keys() == b.keys()
    scale = max(float(g.abs().max()) for g in b.values())
    for name in a:
        torch.testing.assert_close(
            a[name], b[name], rtol=rtol, atol=1e-5 * scale, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("model_type", CAUSAL)
def test_chunked_loss_and_gradients_equal_the_models_own(model_type):
    fields: Any = {"output_router_logits": True} if model_type in MIXTURES else {}
    model = tiny_model(model_type, **fields)
    zero_dropout(model)
    batch = random_batch()
    if fields and isinstance(model(input_ids=batch["input_ids"]).aux_loss, int):
        pytest.skip("its balancing loss is 0 whatever its routers say, and fails with labels (transformers 5.17)")
    own = model(**batch)
    own.loss.backward()
    own_grads = grads(model)
    loss = TokenLoss(model, num_chunks=3)
    assert loss.parts is not None
    result = loss(model, batch)
    assert int(result.n_tokens) == count_target_tokens(batch)
    assert (result.aux_loss is not None) == bool(fields)
    objective = result.objective(count_target_tokens(batch))
    torch.testing.assert_close(objective, own.loss, rtol=1e-5, atol=1e-6)
    objective.backward()
    assert_same_grads(grads(model), own_grads)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3_moe", "gemma3_text"])
def test_activation_checkpointing_replays_dropout_and_router(model_type):
    fields: Any = {"output_router_logits": True} if model_type == "qwen3_moe" else {"attention_dropout": 0.2}
    model = tiny_model(model_type, **fields)
    batch = random_batch()

    def run(num_chunks: int):
        torch.manual_seed(7)
        result = TokenLoss(model, num_chunks=num_chunks)(model, batch)
        objective = result.objective(10)
        objective.backward()
        return objective.detach(), grads(model)

    plain, plain_grads = run(1)
    torch.manual_seed(8)
    other = TokenLoss(model)(model, batch).objective(10).detach()
    assert model_type == "qwen3_moe" or not torch.equal(plain, other), "dropout is not on: the test would prove nothing"
    enable_activation_checkpointing(model)
    replayed, replayed_grads = run(4)
    torch.testing.assert_close(replayed, plain)
    assert_same_grads(replayed_grads, plain_grads)


@pytest.mark.more(after=6)
@pytest.mark.parametrize(
    ("model_type", "attention"),
    [(name, "eager" if name in EAGER_ONLY else "sdpa") for name in CAUSAL]
    + [(name, "eager") for name in ("llama", "gpt2", "gemma3_text", "granitemoe")],
)
def test_packed_documents_equal_separate_ones(model_type, attention):
    model = tiny_model(model_type, seed=3, attention=attention).eval()
    abilities = check_abilities(model.config, attention)
    assert abilities.isolation is not None, abilities.packing_reason
    lengths = [[5, 1, 12, 6], [24], [2, 11, 11]]
    ids = torch.randint(2, VOCAB, (3, 24), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    batch = {"input_ids": ids, "position_ids": positions}
    with torch.no_grad():
        packed = model(**forward_inputs(model, batch, abilities.isolation)).logits
        for row, row_lengths in enumerate(lengths):
            parts = [model(input_ids=doc[None], use_cache=False).logits[0] for doc in ids[row].split(row_lengths)]
            apart = torch.cat(parts)
            assert (packed[row] - apart).abs().max() < TOLERANCE * apart.std()


def test_packed_loss_equals_the_sum_of_its_documents():
    model = tiny_model("llama")
    ids = torch.randint(2, VOCAB, (1, 20))
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    labels = ids.clone()
    labels[0, 8] = -100
    loss = TokenLoss(model, num_chunks=3)
    packed = loss(model, {"input_ids": ids, "labels": labels, "position_ids": positions})
    parts = [loss(model, {"input_ids": d[None], "labels": d[None]}) for d in ids[0].split([8, 12])]
    torch.testing.assert_close(packed.loss_sum, parts[0].loss_sum + parts[1].loss_sum)
    assert int(packed.n_tokens) == 18 == sum(int(p.n_tokens) for p in parts)


@pytest.mark.parametrize(("model_type", "attention", "words"), [
    ("bloom", "eager", "see each other"), ("t5", "sdpa", "encoder-decoder"), ("gpt_oss", "sdpa", "could not be built"),
])  # fmt: skip
def test_models_that_cannot_pack_say_why(model_type, attention, words):
    abilities = check_abilities(transformers.AutoConfig.for_model(model_type), attention)
    assert not abilities.packing
    assert words in abilities.packing_reason


def test_layers_that_mix_tokens_outside_attention_are_found_out():
    config = transformers.AutoConfig.for_model("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"])
    assert not check_abilities(config).packing
    assert check_abilities(transformers.AutoConfig.for_model("lfm2", num_hidden_layers=2)).packing


def test_the_trial_leaves_random_numbers_alone():
    before = torch.get_rng_state()
    check_abilities(transformers.AutoConfig.for_model("qwen3_moe"))
    assert torch.equal(before, torch.get_rng_state())


def test_flash_attention_gets_one_flat_row():
    model = tiny_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    ids = torch.arange(2, 14).reshape(2, 6)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]])
    inputs = forward_inputs(model, {"input_ids": ids, "position_ids": positions})
    assert inputs["input_ids"].shape == (1, 12) and inputs["position_ids"].shape == (1, 12)
    assert document_numbers(inputs["position_ids"]).tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 3]]


def test_padding_and_packing_together_are_refused():
    model = tiny_model("llama")
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="must not carry an attention_mask"):
        forward_inputs(model, {"input_ids": ids, "position_ids": ids, "attention_mask": ids})


def test_padded_rows_equal_short_ones():
    model = tiny_model("mistral")
    batch = random_batch(rows=1, length=12)
    padded = {
        key: torch.nn.functional.pad(value, (0, 5), value=-100 if key == "labels" else 1)
        for key, value in batch.items()
    }
    padded["attention_mask"] = (torch.arange(17) < 12).long()[None]
    loss = TokenLoss(model)
    torch.testing.assert_close(loss(model, padded).loss_sum, loss(model, batch).loss_sum)

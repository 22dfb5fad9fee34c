"""Packed documents do not see each other: measured on tiny models, with what the model must be given for it."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.data.layout.isolation import document_ids, isolates, packed_attention_mask, varlen_kwargs

POSITIONS = torch.cat([torch.arange(7), torch.arange(12), torch.arange(5)])
LENGTHS = (7, 12, 5)
SHAPES = {
    "llama": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "mistral": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "sliding_window": 4,
    },
    "mixtral": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": 4,
    },
    "opt": {
        "hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 32,
        "max_position_embeddings": 64,
    },
}  # fmt: skip


def tiny(name: str, implementation: str):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, vocab_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=0, **SHAPES[name])
    return AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()


def packed_and_alone(model, **how):
    """(logits of packed rows, logits of each document alone), micro-batch of 2."""
    ids = torch.randint(3, 64, (2, len(POSITIONS)), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        packed = model(input_ids=ids, position_ids=POSITIONS.expand(2, -1), use_cache=False, **how).logits
        parts = [model(input_ids=part, use_cache=False).logits for part in ids.split(LENGTHS, dim=1)]
    return packed, torch.cat(parts, dim=1)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "mixtral"])
def test_position_ids_alone_isolate(name: str, implementation: str):
    model = tiny(name, implementation)
    torch.testing.assert_close(*packed_and_alone(model), rtol=1e-4, atol=1e-5)
    assert isolates(lambda ids, at: model(input_ids=ids, position_ids=at, use_cache=False).logits, 64)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_cache_switches_isolation_off_without_a_word(name: str):
    """The trap that `use_cache=False` avoids; if this fails, transformers has changed for the better."""
    model = tiny(name, "sdpa")
    assert not isolates(lambda ids, at: model(input_ids=ids, position_ids=at).logits, 64)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_mask_helper_isolates(name: str, implementation: str):
    model = tiny(name, implementation)
    dtype = torch.bool if implementation == "sdpa" else torch.float32
    mask = packed_attention_mask(POSITIONS.expand(2, -1), dtype=dtype)
    torch.testing.assert_close(*packed_and_alone(model, attention_mask=mask), rtol=1e-4, atol=1e-5)


def test_models_that_need_the_mask_are_found_out():
    model = tiny("opt", "sdpa")
    assert not isolates(lambda ids, at: model(input_ids=ids, position_ids=at, use_cache=False).logits, 64)
    assert isolates(
        lambda ids, at: (
            model(input_ids=ids, position_ids=at, attention_mask=packed_attention_mask(at), use_cache=False).logits
        ),
        64,
    )


def test_mask_helper_with_a_sliding_window():
    model = tiny("mistral", "sdpa")
    mask = packed_attention_mask(POSITIONS.expand(2, -1), sliding_window=4)
    torch.testing.assert_close(*packed_and_alone(model, attention_mask=mask), rtol=1e-4, atol=1e-5)


def test_mask_by_definition():
    position_ids = torch.tensor([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]])
    mask = packed_attention_mask(position_ids)
    assert document_ids(position_ids).tolist() == [[0, 0, 1, 1, 1, 2], [0] * 6]
    for b, documents in enumerate(document_ids(position_ids).tolist()):
        for q in range(6):
            for k in range(6):
                assert mask[b, 0, q, k] == (k <= q and documents[q] == documents[k])
    additive = packed_attention_mask(position_ids, dtype=torch.bfloat16)
    assert torch.equal(additive == 0, mask) and additive.min() == torch.finfo(torch.bfloat16).min
    near = packed_attention_mask(position_ids, sliding_window=2)
    assert near[1, 0, 5].tolist() == [False] * 4 + [True] * 2


def test_varlen_borders():
    kwargs = varlen_kwargs(torch.tensor([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]]))
    assert kwargs["cu_seq_lens_q"].tolist() == [0, 2, 5, 6, 12] == kwargs["cu_seq_lens_k"].tolist()
    assert kwargs["cu_seq_lens_q"].dtype == torch.int32 and kwargs["max_length_q"] == kwargs["max_length_k"] == 6
    # A row may go on counting where the row before it ended; it is another document all the same.
    assert varlen_kwargs(torch.tensor([[0, 1], [2, 3]]))["cu_seq_lens_q"].tolist() == [0, 2, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_isolation_on_the_gpu_in_bf16(name: str):
    model = tiny(name, "sdpa").to("cuda", torch.bfloat16)
    assert isolates(lambda ids, at: model(input_ids=ids, position_ids=at, use_cache=False).logits, 64, device="cuda")

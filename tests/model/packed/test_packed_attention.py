"""Attention by documents' borders: the borders themselves, what they mean, and when the kernel gets them."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.model.packed import trial as packed_trial
from outcore.model.packed.attention import attend, kernel_takes, register
from outcore.model.packed.borders import (
    FEW_ENTRIES,
    MIN_ENTRIES,
    PACKED_ATTENTION,
    are_borders,
    borders_known,
    borders_of,
    known_borders,
    mask_of,
    num_entries,
)
from outcore.model.packed.trial import kernel_error, takes_packed_attention, why_masks_differ, why_no_kernel
from outcore.model.trial.abilities import DOCUMENTS
from tests.data.layout.isolation import packed_attention_mask
from tests.flow.models import packed_batch, padded_batch, plain_batch, tiny_loaded
from tests.model.packed.varlen_kernel import imitated

POSITIONS = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in DOCUMENTS])
CPU = torch.device("cpu")


@st.composite
def rows_of_documents(draw):
    length = draw(st.integers(1, (FEW_ENTRIES - 1) // 3))  # more documents than borders are made for get a mask
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row: list[int] = []
        while len(row) < length:
            row += range(min(draw(st.integers(1, length)), length - len(row)))
        rows.append(row)
    return torch.tensor(rows)


@settings(max_examples=60, deadline=None)
@given(positions=rows_of_documents(), window=st.none() | st.integers(1, 9))
def test_borders_mean_the_mask(positions, window):
    borders = borders_of(positions)
    assert borders is not None and are_borders(borders)
    assert borders[0] == 0 and borders[-1] == positions.numel() and bool((borders.diff() >= 0).all())
    rows, length = positions.shape
    assert torch.equal(mask_of(borders, rows, length, window), packed_attention_mask(positions, sliding_window=window))


def test_shapes_are_few_and_short_documents_get_a_mask():
    tokens = 8192
    usual = {num_entries(documents, tokens) for documents in range(1, 32)}
    assert usual == {32}
    assert num_entries(32, tokens) == 64 and num_entries(255, tokens) == 256
    assert num_entries(256, tokens) is None
    assert num_entries(1, 24) == MIN_ENTRIES and num_entries(FEW_ENTRIES - 1, 24) == FEW_ENTRIES
    assert borders_of(torch.zeros((1, 4096), dtype=torch.long)) is None


def test_borders_are_known_inside_only():
    borders = borders_of(POSITIONS)
    with pytest.raises(KeyError), borders_known(borders):
        assert known_borders() is borders
        raise KeyError
    assert known_borders() is None
    assert not are_borders(None) and not are_borders(POSITIONS) and not are_borders(POSITIONS[0])


# --- a model with borders and with masks


def logits_of(model, batch, borders=None):
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    with torch.no_grad(), borders_known(borders):
        return model(**inputs, use_cache=False).logits


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_logits_are_those_of_masks(model_type, by_kernel):
    """Bit by bit where the borders become a mask; to rounding by the kernel. All else is sdpa as it is."""
    model = tiny_loaded(model_type).model.eval()
    packed = {**packed_batch(2, sum(DOCUMENTS[0])), "position_ids": POSITIONS}
    others = [plain_batch(), padded_batch(), packed_batch()]
    masked, plain = logits_of(model, packed), [logits_of(model, batch) for batch in others]
    assert takes_packed_attention(model) == ""
    assert all(torch.equal(logits_of(model, b), expected) for b, expected in zip(others, plain, strict=True))
    borders = borders_of(POSITIONS)
    if not by_kernel:
        assert torch.equal(logits_of(model, packed, borders), masked)
        return
    with imitated() as calls:
        torch.testing.assert_close(logits_of(model, packed, borders), masked, rtol=1e-4, atol=1e-4)
        assert calls == [MIN_ENTRIES] * model.config.num_hidden_layers
        logits_of(model, padded_batch(), borders)  # a 2-D mask says more than borders
        assert len(calls) == model.config.num_hidden_layers


@pytest.mark.parametrize("change", [
    {"dropout": 0.1}, {"more": {"position_bias": torch.zeros(1)}}, {"more": {"softcap": 30.0}}, {"width": 264},
    {"width": 20}, {"kv_heads": 3}, {"values": 8}, {"kv_length": 5},
])  # fmt: skip
def test_what_the_kernel_does_not_compute_it_does_not_get(change):
    def takes(width=16, kv_heads=2, kv_length=6, values=None, dropout=0.0, more=None):
        query = torch.zeros(1, 4, 6, width)
        key = torch.zeros(1, kv_heads, kv_length, width)
        value = torch.zeros(1, kv_heads, kv_length, values or width)
        return kernel_takes(query, key, value, dropout, {"sliding_window": 4, "position_bias": None, **(more or {})})

    with imitated():
        assert takes() and not takes(**change)
    assert not takes()  # fp32 on the CPU


# --- the trials


def test_a_model_that_passes_and_one_that_bends_its_mask(monkeypatch):
    assert why_masks_differ(tiny_loaded("mistral").model) == ""
    bent = tiny_loaded("mistral").model
    register()
    real = attend

    def without_window(*args, sliding_window=None, **more):
        return real(*args, **more)

    from transformers import AttentionInterface

    with monkeypatch.context() as patch:
        patch.setitem(AttentionInterface._global_mapping, PACKED_ATTENTION, without_window)
        patch.setattr("outcore.model.packed.attention.attend", without_window)
        assert "are off by" in why_masks_differ(bent)

    def fails(*args, **more):
        raise IndexError("too many indices for tensor of dimension 1\nand more")

    with monkeypatch.context() as patch:
        patch.setattr("outcore.model.packed.attention.attend", fails)
        found = why_masks_differ(tiny_loaded("llama").model)
        assert found == "its tiny copy fails without a mask (IndexError: too many indices for tensor of dimension 1)"
    register()


def test_a_model_that_transformers_does_not_change_stays_as_it_is(monkeypatch):
    model = tiny_loaded("llama").model
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    assert "does not give it another attention" in takes_packed_attention(model)
    assert model.config._attn_implementation == "sdpa"
    assert "not a transformers model" in takes_packed_attention(torch.nn.Linear(2, 2))


def test_a_kernel_that_fails_or_errs_is_named(monkeypatch):
    config = tiny_loaded("llama").config
    with imitated():
        assert why_no_kernel(config, CPU, torch.float32) == ""
    monkeypatch.setattr(packed_trial, "kernel_error", lambda *args: float("nan"))
    monkeypatch.setattr("outcore.model.packed.attention.has_kernel", lambda tensor: True)
    assert "is off by nan" in why_no_kernel(config, CPU, torch.float32)
    monkeypatch.undo()
    monkeypatch.setattr("outcore.model.packed.attention.has_kernel", lambda tensor: True)
    assert "does not run there" in why_no_kernel(config, CPU, torch.float32)  # no such operator on the CPU


@pytest.mark.parametrize(
    "fields", [{"head_dim": 20}, {"head_dim": 512}, {"attention_dropout": 0.1}, {"num_key_value_heads": 3}]
)
def test_heads_that_the_kernel_does_not_take_are_named(fields):
    config = tiny_loaded("llama").config
    for name, value in fields.items():
        setattr(config, name, value)
    with imitated() as calls:
        assert "does not take heads of" in why_no_kernel(config, CPU, torch.float32)
    assert not calls


def test_keys_and_values_of_different_width_are_named():
    config = tiny_loaded("deepseek_v3").config
    config.v_head_dim = 24
    with imitated():
        assert "heads of 16, their values of 24" in why_no_kernel(config, CPU, torch.float32)
        config.v_head_dim = 16
        assert why_no_kernel(config, CPU, torch.float32) == ""
    strange = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(hidden_size=64))
    assert "how many heads" in why_no_kernel(strange, CPU, torch.float32)


def test_the_trial_notices_documents_that_see_each_other(monkeypatch):
    lengths = packed_trial.TRIAL_LENGTHS
    apart = borders_of(torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths]))
    together = borders_of(torch.arange(sum(lengths[0])).expand(2, -1))
    assert apart is not None
    monkeypatch.setattr(packed_trial, "borders_of", lambda positions: together)
    monkeypatch.setattr(packed_trial, "mask_of", lambda borders, *shape: mask_of(apart, *shape))
    with imitated():
        assert kernel_error(CPU, torch.float32, 2, 2, 16, None) > 5 * packed_trial.KERNEL_TOLERANCE

"""Masks that wait are held small, are the same bits again, and are not there at all where none is needed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from stream_models import packed_batch, padded_batch, plain_batch, tiny_loaded

from outcore.data import packed_attention_mask
from outcore.engine.stream import shell
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.masks import MaskShrinker, RowStretches, restored
from outcore.engine.stream.settings import StreamSettings
from outcore.engine.stream.units import discover_units
from outcore.units import MIB

SETTINGS = StreamSettings(
    staging_bytes=2 * MIB, slot_bytes=65536, num_slots=2, optimizer_threads=1, optimizer_backend="torch"
)
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]])


def mask_in(call):
    """The mask that a layer is called with, by position or by name; None without one."""
    found = [
        value
        for value in (*call.args, *call.kwargs.values())
        if isinstance(value, RowStretches) or (isinstance(value, torch.Tensor) and value.ndim == 4)
    ]
    assert len(found) <= 1
    return found[0] if found else None


def masks_of(log) -> list:
    return [mask_in(call) for call in log.calls]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 3])
def test_a_mask_of_documents_comes_back_bit_for_bit(dtype, window):
    mask = packed_attention_mask(POSITIONS, dtype=dtype, sliding_window=window)
    held = RowStretches.of(mask)
    assert held is not None
    again = held.mask()
    assert again.dtype == mask.dtype and again.shape == mask.shape and torch.equal(again, mask)
    assert held.first.numel() == held.end.numel() == 2 * 10


def test_rows_that_allow_nothing_and_masks_expanded_over_the_batch():
    mask = packed_attention_mask(POSITIONS)
    mask[1, 0, 3] = False
    assert torch.equal(RowStretches.of(mask).mask(), mask)
    expanded = torch.ones(10, 10, dtype=torch.bool).tril().expand(5, 1, 10, 10)
    held = RowStretches.of(expanded)
    assert held.first.numel() == 10
    assert torch.equal(held.mask(), expanded) and held.mask().stride() == expanded.stride()


def test_masks_of_another_kind_stay_as_they_are():
    holed = packed_attention_mask(POSITIONS)
    holed[0, 0, 2, 1] = False
    bias = packed_attention_mask(POSITIONS, dtype=torch.float32)
    bias[0, 0, 4, 3] = -0.5
    for mask in (holed, bias, torch.zeros(2, 1, 4, 4, dtype=torch.int64)):
        assert RowStretches.of(mask) is None
        assert MaskShrinker(1).shrunk(mask) is mask
    small = packed_attention_mask(POSITIONS)
    assert MaskShrinker(small.numel() + 1).shrunk(small) is small
    shrinker = MaskShrinker(1)
    assert shrinker.shrunk(small) is shrinker.shrunk(small) and restored(shrinker.shrunk(small)) is not small
    assert shrinker.shrunk("eager") == "eager"


@pytest.mark.parametrize("model_type", ["gemma3_text", "gemma2", "gpt2"])
def test_a_log_that_waits_gives_every_layer_its_own_mask(model_type):
    units = discover_units(tiny_loaded(model_type))
    batch = packed_batch(2, 20)
    before, log = units.record(batch), units.record(batch)
    log.shrink_masks(1)
    assert all(isinstance(mask, RowStretches) for mask in masks_of(log))
    assert len({id(mask) for mask in masks_of(log)}) == len({id(mask) for mask in masks_of(before)})
    for layer, expected in enumerate(before.calls):
        call = log.call(layer)
        assert torch.equal(mask_in(call), mask_in(expected))
        assert call.kwargs.keys() == expected.kwargs.keys() and len(call.args) == len(expected.args)


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gpt2", "mixtral"])
def test_without_documents_or_padding_there_is_no_mask(model_type):
    """So that attention takes the kernel that is causal by itself."""
    units = discover_units(tiny_loaded(model_type))
    plain = plain_batch(2, 12)
    full = {**plain, "attention_mask": torch.ones(2, 12, dtype=torch.long)}
    whole = {**plain, "position_ids": torch.arange(12).expand(2, -1).contiguous()}
    for batch in (plain, full, whole):
        assert masks_of(units.record(batch)) == [None] * len(units.layers)
    for batch in (padded_batch(2, 12), packed_batch(2, 12)):
        assert all(mask is not None for mask in masks_of(units.record(batch)))


@pytest.mark.parametrize("count", [1, 3])
def test_training_with_shrunk_masks_is_the_same(monkeypatch, count):
    """Held small only while other micro-batches run."""
    batches = [packed_batch(2, 18, seed=s) for s in range(count - 1)] + [padded_batch(2, 18, seed=9)]
    results, built = [], []
    whole = RowStretches.mask
    monkeypatch.setattr(RowStretches, "mask", lambda self: built.append(1) or whole(self))
    for min_numel in (1 << 40, 1):
        monkeypatch.setattr(shell.CallLog.shrink_masks, "__defaults__", (min_numel,))
        engine = build_stream_engine(
            tiny_loaded("gemma3_text"), replace(SETTINGS, seed=1), device="cpu", pinned_grant=False, trial=False
        )
        layers = len(engine._parts.units.layers)
        results.append([(r.loss, r.grad_norm) for r in (engine.train_step(batches, 1e-3) for _ in range(2))])
        engine.close()
    assert results[0] == results[1]
    assert len(built) == (0 if count == 1 else 2 * 2 * layers * count)

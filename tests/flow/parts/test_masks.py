"""Masks that wait are held small, are the same bits again, and are not there at all where none is needed."""

from dataclasses import replace

import pytest
import torch

from outcore.engine.stream.build import build_stream_engine
from outcore.flow.parts import discover_units, shell
from outcore.flow.parts.shell import BitMask, MaskShrinker, restored
from tests.data.layout.isolation import packed_attention_mask
from tests.engine.inside import parts_of
from tests.flow.models import TINY_SETTINGS, packed_batch, padded_batch, plain_batch, tiny_loaded

POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7, 0, 1]])


def mask_in(call):
    """The mask that a layer is called with, by position or by name; None without one."""
    found = [
        value
        for value in (*call.args, *call.kwargs.values())
        if isinstance(value, BitMask) or (isinstance(value, torch.Tensor) and value.ndim == 4)
    ]
    assert len(found) <= 1
    return found[0] if found else None


def masks_of(log) -> list:
    return [mask_in(call) for call in log.calls]


@pytest.mark.parametrize("length", [1, 3, 7, 8, 9, 16])
def test_a_mask_comes_back_bit_for_bit(length):
    mask = torch.rand(2, 1, length, length, generator=torch.Generator().manual_seed(length)) < 0.5
    held = BitMask.of(mask)
    assert torch.equal(held.mask(), mask) and held.mask().stride() == mask.stride()
    assert held.bits.numel() == -(-mask.numel() // 8)


def test_a_mask_expanded_over_the_batch_is_held_once():
    expanded = (torch.rand(10, 10, generator=torch.Generator().manual_seed(0)) < 0.5).expand(5, 1, 10, 10)
    held = BitMask.of(expanded)
    assert held.bits.numel() == 13
    assert torch.equal(held.mask(), expanded) and held.mask().stride() == expanded.stride()


def test_only_large_boolean_masks_are_shrunk():
    bias = packed_attention_mask(POSITIONS).float()
    assert MaskShrinker(1).shrunk(bias) is bias
    mask = packed_attention_mask(POSITIONS)
    assert MaskShrinker(mask.numel() + 1).shrunk(mask) is mask
    shrinker = MaskShrinker(mask.numel())
    assert isinstance(shrinker.shrunk(mask), BitMask) and shrinker.shrunk(mask) is shrinker.shrunk(mask)
    assert torch.equal(restored(shrinker.shrunk(mask)), mask)
    assert shrinker.shrunk("eager") == "eager" and restored(bias) is bias


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt2"])
def test_a_log_that_waits_gives_every_layer_its_own_mask(model_type):
    units = discover_units(tiny_loaded(model_type))
    batch = packed_batch(2, 20)
    before, log = units.record(batch), units.record(batch)
    log.shrink_masks(1)
    assert all(isinstance(mask, BitMask) for mask in masks_of(log))
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
        log = units.record(batch)
        assert masks_of(log) == [None] * len(units.layers)
        log.shrink_masks(1)
        assert all(log.call(index) is call for index, call in enumerate(log.calls))
    for batch in (padded_batch(2, 12), packed_batch(2, 12)):
        assert all(mask is not None for mask in masks_of(units.record(batch)))


@pytest.mark.parametrize("count", [1, 3])
def test_training_with_shrunk_masks_is_the_same(monkeypatch, count):
    """Held small only while other micro-batches run."""
    batches = [packed_batch(2, 18, seed=s) for s in range(count - 1)] + [padded_batch(2, 18, seed=9)]
    results, built = [], []
    whole = BitMask.mask
    monkeypatch.setattr(BitMask, "mask", lambda self: built.append(1) or whole(self))
    for min_numel in (1 << 40, 1):
        monkeypatch.setattr(shell.CallLog.shrink_masks, "__defaults__", (min_numel,))
        engine = build_stream_engine(
            tiny_loaded("mistral"), replace(TINY_SETTINGS, seed=1, packed_attention="masks"), device="cpu",
            pinned_grant=False, trial=False,
        )  # fmt: skip
        layers = len(parts_of(engine).units.layers)
        results.append([(r.loss, r.grad_norm) for r in (engine.train_step(batches, 1e-3) for _ in range(2))])
        engine.close()
    assert results[0] == results[1]
    assert len(built) == (0 if count == 1 else 2 * 2 * layers * count)

"""Packing told from the host: the same masks as transformers' own search, and no search where masks go nowhere."""

from __future__ import annotations

import pytest
import torch
from transformers import masking_utils

from outcore.flow.parts import DeviceBatch, discover_units
from outcore.flow.parts.units import QUESTION, document_numbers, packing_known
from tests.flow.models import packed_batch, plain_batch, tiny_loaded
from tests.refused import failing, refused

CPU = torch.device("cpu")


def test_document_numbers_are_those_of_transformers():
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5], [3, 4, 0, 1, 2, 3]])
    assert torch.equal(document_numbers(positions), getattr(masking_utils, QUESTION)(positions))
    assert getattr(masking_utils, QUESTION)(positions[1:2]) is None


def test_a_batch_knows_whether_it_is_packed():
    assert DeviceBatch(packed_batch(), CPU).is_packed
    assert not DeviceBatch(plain_batch(), CPU).is_packed
    straight = {**plain_batch(1, 6), "position_ids": torch.arange(6)[None]}
    assert not DeviceBatch(straight, CPU).is_packed


@pytest.mark.parametrize("model", ["llama", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("make", [packed_batch, plain_batch])
def test_layers_get_the_same_masks(model, make):
    units = discover_units(tiny_loaded(model))
    batch = make()
    asked, told = units.record(batch), units.record(DeviceBatch(batch, CPU))
    for one, other in zip(asked.calls, told.calls, strict=True):
        masks = [call.kwargs.get("attention_mask") for call in (one, other)]
        assert (masks[0] is None) == (masks[1] is None)
        assert masks[0] is None or torch.equal(*masks)


def test_nobody_asks_the_device_during_a_step(monkeypatch):
    units = discover_units(tiny_loaded("llama"))
    monkeypatch.setattr(masking_utils, QUESTION, failing(AssertionError("a wait for the device")))
    batch = DeviceBatch(packed_batch(), CPU)
    log = units.record(batch)
    units.finish(log.hidden.detach(), batch, log)
    units.record(batch, with_masks=False)
    refused(AssertionError, "a wait", lambda: units.record(packed_batch()))


def test_the_function_comes_back_after_a_failure():
    before = getattr(masking_utils, QUESTION)
    with pytest.raises(KeyError), packing_known(False):
        raise KeyError
    assert getattr(masking_utils, QUESTION) is before

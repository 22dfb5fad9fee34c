"""Compiled layers on packed bytes: the stands compute what the layer does with its values."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

from outcore.flow import discover_units
from outcore.flow.layers import with_packed_linears
from outcore.flow.weights import InPlaceProducts
from outcore.model import ModelSettings, load_model
from tests.flow.models import tiny_loaded

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None


def packed_units():
    return units_of(load_model(ModelSettings(preset="tiny", precision="fp32", seq_length=2, quantize="int8")))


def units_of(loaded):
    loaded.model.requires_grad_(False)
    return discover_units(loaded)


@pytest.mark.skipif(not IS_INTERPRETED, reason="TRITON_INTERPRET=1 and triton")
def test_a_layer_on_packed_bytes_is_near_the_expanded_one():
    units = packed_units()
    unit, layer = units.layer_units[0], units.layers[0]
    names = {id(p): name for name, p in layer.named_parameters()}
    log = units.record({"input_ids": torch.arange(5)[None]})
    assert len(unit.layout.packed_slots) == 6  # columns of the seventh do not divide into blocks
    home, slab = torch.zeros(unit.layout.home_bytes, dtype=torch.uint8), torch.zeros(unit.layout.numel)
    for slot, view in zip(unit.layout.slots, unit.layout.home_views(home), strict=True):
        value = torch.randn(slot.shape) / 16
        view.copy_(value if slot.packed is None else slot.packed.pack(value))
    unit.layout.expand(home, slab)
    found = []
    stand = with_packed_linears(layer, unit)
    assert stand is not None
    for module, views in ((layer, unit.layout.views(slab)), (stand, unit.layout.home_views(home))):
        given = {names[id(p)]: view for p, view in zip(unit.parameters, views, strict=True)}
        call = log.call(0)
        with torch.no_grad():
            output = functional_call(module, given, (log.hidden, *call.args), call.kwargs)
        found.append(output if isinstance(output, torch.Tensor) else output[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_only_plain_linear_layers_can_take_bytes():
    units = packed_units()
    assert with_packed_linears(units.layers[0], units.layer_units[0]) is not None
    assert InPlaceProducts.multiplies(units.layer_units[0]) and not InPlaceProducts.multiplies(units.embed)
    for family in ("gpt2", "mixtral"):  # transposed as Conv1D has them, and in stacks
        other = units_of(replace(tiny_loaded(family), quantize="nf4"))
        assert any(slot.packed for slot in other.layer_units[0].layout.slots)
        assert with_packed_linears(other.layers[0], other.layer_units[0]) is None
        assert not InPlaceProducts.multiplies(other.layer_units[0])

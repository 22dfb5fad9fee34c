"""Weights that travel: the next pass's uploads begin while tokens of this one are chosen."""

from types import SimpleNamespace

import torch

from outcore.flow import Call, Flow, Head, PartRunner, discover_units
from outcore.flow.weights import HandOver, InPlaceProducts, PackedWeight, WeightHomes
from outcore.formats import PackedProducts
from outcore.infer.opening.arrival import ResidentWeights
from outcore.model import ModelSettings, load_model
from outcore.staging.pool import HostMemory
from tests.flow.models import tiny_loaded
from tests.infer.models import AsksHere


class Noted:
    """A `WeightArrival` that notes what it is told."""

    def __init__(self) -> None:
        self.said: list = []
        self.stalls, self.device_bytes = SimpleNamespace(), 0

    def begin(self, sequence):
        self.said.append(("begin", *(part.index for part in sequence)))

    def acquire(self, at):
        self.said.append(("acquire", at))
        return torch.zeros(0)

    def release(self, at):
        self.said.append(("release", at))

    def abort(self, deadline=None):
        self.said.append(("abort",))


def test_the_next_pass_is_begun_ahead_and_given_up_where_it_is_another():
    units = discover_units(tiny_loaded("llama"))
    homes = WeightHomes(units.all, HostMemory(), {part.index: part.layout.home_numel for part in units.all}, None)
    homes.adopt()
    one, two = units.layer_units[:2]
    noted = Noted()
    weights = ResidentWeights([p for p in units.all if p not in (one, two)], homes, noted, torch.device("cpu"))
    assert weights.stays(units.embed) and not weights.stays(one)

    def run(sequence) -> list:
        noted.said.clear()
        weights.begin(sequence)
        for at in range(len(sequence)):
            weights.acquire(at)
            weights.release(at)
        return [entry for entry in noted.said if entry[0] in ("begin", "abort")]

    begin = ("begin", one.index, two.index)
    whole = [units.embed, one, two, units.head]
    assert run(whole) == [begin, begin], "and once more, ahead"
    assert run(whole) == [begin], "what was begun ahead is used"
    assert run(whole[:3]) == [begin], "the head stays, so this is the same to the lanes"
    assert run([units.embed, one]) == [("abort",), ("begin", one.index), ("begin", one.index)]
    weights.abort()
    assert run(whole) == [begin, begin], "after a failure nothing is taken for begun"


def test_small_passes_get_packed_bytes_as_they_are_and_larger_ones_values():
    loaded = load_model(ModelSettings(preset="tiny", precision="fp32", seq_length=2, quantize="nf4"))
    loaded.model.requires_grad_(False)
    units = discover_units(loaded)
    homes = WeightHomes(units.all, HostMemory(), {part.index: part.layout.home_numel for part in units.all}, None)
    homes.adopt()
    cpu, layer = torch.device("cpu"), units.layer_units[0]
    assert layer.layout.packed_slots
    products = InPlaceProducts(None, {}, cpu, device_tokens=4)
    weights = ResidentWeights(units.all, homes, None, cpu, products)
    weights.multiply_there(units.all)
    home = homes.ram(layer)
    for tokens, is_packed in ((1, True), (4, True), (5, False), (None, False)):
        weights.expect(tokens)
        assert weights.stays(layer)
        weights.begin([layer])
        slab = weights.acquire(0)
        weights.release(0)
        assert (slab.data_ptr() == home.data_ptr()) is is_packed
        views = layer.layout.home_views(slab) if is_packed else layer.layout.views(slab)
        for slot, view in zip(layer.layout.slots, views, strict=True):
            assert view.shape == ((slot.packed.size_bytes,) if slot.packed and is_packed else slot.shape)


def test_layers_in_16_bits_are_asked_of_the_cpu_and_the_rest_lies_on_the_device():
    loaded = load_model(ModelSettings(preset="tiny", precision="bf16", seq_length=2))
    loaded.model.eval().requires_grad_(False)
    units, cpu = discover_units(loaded), torch.device("cpu")
    homes = WeightHomes(units.all, HostMemory(), {part.index: part.layout.home_numel for part in units.all}, None)
    homes.adopt()
    there = units.layer_units[1:]
    call = Call({"input_ids": torch.tensor([[3, 5, 8, 13]])})

    def logits(weights: ResidentWeights, in_place: InPlaceProducts | None = None) -> torch.Tensor:
        runner = PartRunner(units, in_place=in_place)
        weights.expect(4)
        (found,) = Flow(runner, Head(runner, vocab_size=loaded.facts.vocab_size), weights, cpu).run([call])
        assert found.logits is not None
        return found.logits

    expected = logits(ResidentWeights(units.all, homes, None, cpu))
    with PackedProducts(2) as products:
        in_place = InPlaceProducts(products, {"bf16": 8}, cpu, HandOver(products, cpu, AsksHere()))
        assert all(map(in_place.takes_all, there)), "a graph may hold them"
        stays = [part for part in units.all if part not in there]
        weights = ResidentWeights(stays, homes, None, cpu, in_place, there, lambda tokens: [p.name for p in there])
        found = logits(weights, in_place)
        assert products.answered()[0] == 7 * len(there)
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
        home = homes.ram(there[0]).view(torch.uint8)
        values = there[0].layout.views(home.view(torch.bfloat16))
        for slot, one, value in zip(there[0].layout.slots, in_place.tensors(there[0], home), values, strict=True):
            assert isinstance(one, PackedWeight) is (len(slot.shape) == 2)
            assert torch.equal(one.expanded() if isinstance(one, PackedWeight) else one, value)
        in_place.most_rows.clear()
        assert not any(isinstance(one, PackedWeight) for one in in_place.tensors(there[0], home)), "no kernel"

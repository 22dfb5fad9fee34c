"""Which layers the CPU takes where they are, as trials and rates say."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outcore.flow import discover_units
from outcore.formats import PackedProducts, PackedSpec, packed_format
from outcore.infer.opening import in_place
from outcore.infer.passes import SmallPasses
from outcore.sizing.inference import (
    InferenceLimits,
    InferenceNeeds,
    InPlaceRates,
    KvSize,
    LayerSize,
    PartSize,
    compute_in_place,
    place_inference,
)
from outcore.sizing.inference.placement import PartHome
from outcore.staging import PinnedPool
from tests.flow.models import tiny_loaded
from tests.infer.models import MIXTURE, TinyEngine

CPU = torch.device("cpu")
GB = 10**9


def a_part(name, *specs):
    slots = [SimpleNamespace(packed=spec, numel=1) for spec in specs]
    layout = SimpleNamespace(slots=slots, packed_slots=slots, home_bytes=8, numel=8)
    return SimpleNamespace(name=name, layout=layout, owners=[[]] * len(slots), dtype=torch.float32)


def test_layers_of_16_bits_may_move_where_kernels_have_nearly_all_of_them():
    for family, fields, expected in (
        ("llama", {}, {"layer 0", "layer 1"}),
        ("llama", {"precision": "fp32"}, set()),
        ("mixtral", {}, set()),  # stacks of experts
    ):
        loaded = tiny_loaded(family, dtype=torch.float32 if fields else torch.bfloat16, **MIXTURE)
        loaded.model.requires_grad_(False)
        units = discover_units(loaded)
        placement: Any = SimpleNamespace(
            parts=[SimpleNamespace(part=p.name, home="ram") for p in units.layer_units[:2]]
        )
        found = in_place._candidates(units, placement)
        assert set(found) == ({p.name for p in units.layer_units[:2]} if expected else set()), family
        tried = in_place._tried(units, found)
        assert (tried is None) if not expected else tried.format.name == "bf16"


def test_a_format_is_tried_on_a_matrix_of_the_layers_that_may_move():
    def part(name, *packed):
        return a_part(name, *(PackedSpec(packed_format(kind), shape) for kind, shape in packed))

    layers = [part("moves", ("q4_k", (8, 256)), ("q6_k", (4, 256))), part("stays", ("q8_0", (64, 256))), part("none")]
    units = SimpleNamespace(layer_units=layers, all=[part("head", ("q6_k", (1000, 256))), *layers])
    assert in_place._tried(units, {"moves": 1}) == PackedSpec(packed_format("q4_k"), (8, 256))
    assert in_place._tried(units, {"none": 1}) is None


def test_stacks_that_are_multiplied_together_stay_with_the_gpu():
    def part(name, *shapes):
        return a_part(name, *(SimpleNamespace(shape=shape) for shape in shapes))

    parts = [part("dense", (8, 64)), part("mixture", (8, 64), (4, 8, 64)), part("plain"), part("stays", (8, 64))]
    placement = SimpleNamespace(parts=[SimpleNamespace(part=p.name, home="ram") for p in parts[:3]])
    for grouping, expected in (["config"], {"dense": 8}), ([], {"dense": 8, "mixture": 8}):
        units = SimpleNamespace(layer_units=parts, grouping_configs=lambda found=grouping: found)
        assert in_place._candidates(units, placement) == expected


def a_placement():
    layers = tuple(PartSize(f"layer {n}", GB, True, 4 * GB) for n in range(12))
    needs = InferenceNeeds(
        (*layers, PartSize("head", GB, False)), KvSize(((None, 1000),)), LayerSize(1000, 4000, ()), 1000, 2
    )
    return place_inference(needs, InferenceLimits(12 * GB, 64 * GB), "latency")


def test_the_cpu_takes_its_share_of_what_travels():
    placement = a_placement()
    travel = {home.part: home.size_bytes for home in placement.parts if home.home == "ram"}
    rates = InPlaceRates({1: 40.0, 2: 40.0, 4: 20.0, 8: 4.0, 16: 0.1}, 20.0, 0.0)
    found = compute_in_place(placement, travel, rates)
    numbers = {tokens: len(parts) for tokens, parts in found.cpu_parts.items()}
    assert len(travel) == 9 and numbers == {1: 6, 2: 6, 4: 4, 8: 1} and found.cpu_tokens == 8
    assert set(found.on_cpu(1)) <= set(travel) and "where they are" in found.lines()[-1]
    assert [len(found.on_cpu(tokens)) for tokens in (3, 8, 9)] == [numbers[4], numbers[8], 0]
    assert compute_in_place(placement, travel, rates, 0) is placement
    least = compute_in_place(placement, travel, rates, 3)
    assert least.cpu_tokens == 3 and len(least.on_cpu(3)) == numbers[4] and not least.on_cpu(4)
    slow = compute_in_place(placement, travel, dataclasses.replace(rates, part_s=60.0))
    assert not slow.cpu_parts and "computed on the GPU" in slow.lines()[-1] and slow.cpu_rates is not None


def test_whole_passes_correct_the_rates_either_way():
    rates, one = InPlaceRates({1: 40.0, 4: 40.0, 16: 40.0}, 20.0, 0.001), GB
    slow = rates.as_tried(8 * one, {1: (6, 6 * one, 0.3)})
    assert slow.link_gb_per_s == 20 and slow.pass_s(6, 6 * one, 2 * one, 1) == pytest.approx(0.3)
    assert slow.gb_per_s(16) < 40
    fast = rates.as_tried(8 * one, {1: (4, 4 * one, 0.125)})
    assert fast.pass_s(4, 4 * one, 4 * one, 1) == pytest.approx(0.125) and fast.cpu_gb_per_s == rates.cpu_gb_per_s


@pytest.mark.parametrize(
    ("layer_s", "expected"), [((0.05, 0.05), (6, 6)), ((0.05, 0.1), (6, 4)), ((0.1, 0.4), (4, 1)), ((1, 1), (0, 0))]
)
def test_whole_passes_decide_how_many_layers_the_cpu_keeps(layer_s, expected, monkeypatch):
    """The rates say 0.05 s a layer, on the CPU or over the link; `layer_s`: what passes of 1 and 4 tokens show."""
    names = [f"layer {n}" for n in range(12)]
    homes = tuple(PartHome(name, "ram", GB, GB) for name in names)
    placement = dataclasses.replace(a_placement(), parts=homes)
    monkeypatch.setattr(in_place, "_candidates", lambda units, placement: dict.fromkeys(names, GB))
    rates = InPlaceRates(dict.fromkeys((1, 2, 4), 20.0), 20.0, 0.0)
    placement = compute_in_place(placement, dict.fromkeys(names, GB), rates)
    assert {len(placement.on_cpu(tokens)) for tokens in (1, 2, 4)} == {6}  # 0.3 s instead of 0.6
    arrival: Any = SimpleNamespace()
    arrival.compute = lambda names: setattr(arrival, "names", names)
    units: Any = None

    def pass_s(tokens):
        on_cpu = len(arrival.names(tokens))
        return max(on_cpu * dict(zip((1, 2, 4), (layer_s[0], *layer_s), strict=True))[tokens], (12 - on_cpu) * 0.05)

    engine: Any = SimpleNamespace(pass_s=pass_s)
    keeps: list[Any] = []
    small: Any = SimpleNamespace(forget=keeps.append)
    found = in_place.try_in_place(engine, arrival, units, placement, small)
    assert [on_cpu for on_cpu in range(12) if keeps[0](1, on_cpu)] == [expected[0]], "graphs of the way that won"
    assert (len(found.on_cpu(1)), len(found.on_cpu(4))) == expected and arrival.names(1) == found.on_cpu(1)
    assert bool(found.cpu_tokens) is bool(expected[0]) and "whole passes were tried" in found.lines()[-1]
    assert sum("the CPU computes" in line for line in found.lines()) == bool(expected[0]), (
        "one answer, not each trial's"
    )


def test_passes_of_the_way_that_lost_are_let_go():
    tiny, on_cpu = TinyEngine("llama"), set()
    tiny.runner.small = small = SmallPasses(
        tiny.runner.flow, tiny.runner.attention, tiny.cache, CPU, is_captured=False,
        is_on_cpu=lambda part: part.name in on_cpu,
    )  # fmt: skip
    try:
        made = []
        for step, names in enumerate([set(), {"layer 0"}, set(), {"layer 0"}]):
            on_cpu |= names
            on_cpu &= names
            if step == 2:
                small.forget(lambda rows, count: count == 0)
            tiny.greedy([[5]], 1)
            made.append(small.is_first)
        assert made == [True, True, False, True]
    finally:
        tiny.close()


def test_the_trial_of_the_link_takes_its_memory_from_a_pool_and_gives_it_back(monkeypatch):
    """64 MiB were pinned beside the pool, in torch's cache, for as long as the process lived."""
    pools = []

    class Seen(PinnedPool):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            pools.append(self)

        def lease(self, n_bytes, owner, *args, **more):
            assert owner == "trial of the link" and n_bytes == self.asked_bytes == in_place.LINK_BYTES
            return super().lease(n_bytes, owner, *args, **more)

    monkeypatch.setattr(in_place, "PinnedPool", Seen)
    monkeypatch.setattr(in_place, "LINK_BYTES", 1 << 16)
    monkeypatch.setattr(in_place, "ROWS", (1, 4))
    with PackedProducts(1) as products:
        rates, link = in_place._rates(products, PackedSpec(packed_format("q8_0"), (64, 128)), CPU)
    assert set(rates) == {1, 4} and min(*rates.values(), link) > 0
    (pool,) = pools
    assert pool.capacity_bytes == 0

"""Planner and engine ask one rule what is computed in tiles, and get one answer."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from outcore.common.quantities import KIB
from outcore.engine.stream.blueprint import work_of_step
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.parts import discover_units
from outcore.flow.tiles import plan_tiles
from outcore.model import shape_from_config
from outcore.plan.profile import RunRequest
from outcore.plan.stream.memory import tiling_of
from outcore.plan.terms import Case
from outcore.sizing.layouts import StreamLayout
from outcore.sizing.tiles import Holding, Model, TilingWork, UnitSize, choose_holding, held_bytes
from tests.flow.models import tiny_loaded
from tests.plan.fakes import server

SLOW = pytest.mark.slow
FIELDS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@pytest.mark.parametrize(("model", "fields"), [
    ("llama", {"vocab_size": 4096, "intermediate_size": 128}),
    pytest.param("llama", {"vocab_size": 4096, "intermediate_size": 128, "tie_word_embeddings": True}, marks=SLOW),
    pytest.param("qwen3", {"vocab_size": 256, "intermediate_size": 2048}, marks=SLOW),
])  # fmt: skip
def test_shapes_and_models_lead_to_the_same_tiles(model: str, fields: dict) -> None:
    """From room for everything whole down to room for no layer."""
    loaded = tiny_loaded(model, **FIELDS, **fields)
    shape, units = shape_from_config(model, loaded.config), discover_units(loaded)
    assert shape.total_params == sum(unit.layout.num_params for unit in units.all)
    settings = StreamSettings(step_tokens=(48, 48), row_tokens=24, activations="ram", compile="off")
    work_of = partial(work_of_step, loaded, settings, torch.device("cpu"), compiled=False)
    seen: dict[tuple[int, bool], set[tuple[int, int]]] = {}
    for device_bytes in [size * KIB for size in range(400, 24_000, 500)]:
        layout = StreamLayout(2, 2, "ram", device_bytes=device_bytes, tile_bytes=4 * KIB, compiled=False)
        planned = tiling_of(Case(shape, RunRequest(precision="fp32"), server(), 24, layout))
        # gaps between parameters are not planned with: within half a percent of a step of the ladder both are right
        near = [device_bytes, device_bytes * 995 // 1000, device_bytes * 1005 // 1000]
        builts = [plan_tiles(units, "auto", n_bytes, 4 * KIB, 3, work_of=work_of) for n_bytes in near]
        assert planned.holding in [built.holding for built in builts], device_bytes
        built = next(built for built in builts if built.holding == planned.holding)
        layers = {unit.index - 1 for unit in units.layer_units if unit.index in built.indices}
        ends = bool({units.embed.index, units.head.index} & built.indices)
        assert (planned.layers, planned.ends) == (layers, ends), device_bytes
        seen.setdefault((len(layers), ends), set()).add((built.holding.layer_buffers, built.holding.ship_buffers))
    assert (0, False) in seen and len(seen) >= 3
    assert {(2, 2), (2, 1), (1, 1)} & set().union(*seen.values())  # less is held before more is tiled


UNITS = (
    UnitSize(0, False, 800, 400, True), UnitSize(1, True, 200, 100, True), UnitSize(2, True, 200, 100, True),
    UnitSize(3, True, 200, 100, True), UnitSize(4, True, 120, 60, True), UnitSize(5, False, 810, 405, True),
)  # fmt: skip
"""Of 16-bit parameters, all of them trained."""


@pytest.mark.slow
def test_the_cheapest_saving_comes_first() -> None:
    """From ample room down: parts, two layers, one buffer for gradients; then tiles and one layer at a time."""
    big = Model(
        tuple(replace(u, size_bytes=u.size_bytes << 18, trainable_numel=u.trainable_numel << 18) for u in UNITS), 2
    )
    needs = {
        "checkpoints": 10, "between": 5, "masks": 5, "layer": 500, "tiled_layer": 100, "head": 300, "tiled_head": 200,
    }  # fmt: skip
    work = TilingWork(**{name: n_bytes << 18 for name, n_bytes in needs.items()}, evaluation=0)
    found: list[Holding] = []
    for device_bytes in range(8000 << 18, 500 << 18, -(1 << 18)):
        holding = choose_holding(big, device_bytes, 1, work=work)
        if holding not in found:
            found.append(holding)
    ends, large = {0, 5}, {1, 2, 3}
    ladder = [(set(), 3, 2, False), (set(), 3, 2, True), (set(), 2, 2, True), (set(), 2, 1, True)]
    ladder += [(ends, 3, 2, False), (ends, 2, 2, True), (ends, 2, 1, True), (ends, 1, 1, True)]
    ladder += [(ends | large, 3, 2, False), (ends | large, 2, 1, True), (ends | large | {4}, 3, 2, False)]
    assert found == [Holding(frozenset(tiled), layers, leaving, parts) for tiled, layers, leaving, parts in ladder]


def test_bytes_held_by_hand() -> None:
    """The sum of an untied vocabulary is a unit's like any other; a tied one's stays beside a layer's."""
    held = held_bytes(Model(UNITS, 2), Holding())
    assert (held.weights, held.sums, held.leaving) == (3 * 200 + 810, 4 * 405, 2 * 2 * 405)
    assert held.total == held.buffers + 2 * 405
    tied = held_bytes(Model(UNITS[:5], 2, tied=True), Holding(layer_buffers=2, ship_buffers=1))
    assert (tied.weights, tied.sums, tied.leaving) == (2 * 200 + 800, 4 * (400 + 100), 2 * 400)
    tiled = held_bytes(Model(UNITS, 2), Holding(frozenset({0, 5})), tile_bytes=7)
    assert (tiled.weights, tiled.sums, tiled.leaving, tiled.tiles) == (600, 400, 400, 70)


def test_without_knowing_the_step_a_fixed_share_is_left_to_it() -> None:
    model = Model(UNITS, 2)
    whole = held_bytes(model, Holding()).total
    assert choose_holding(model, whole * 100 // 60 + 2, 1) == Holding()
    assert choose_holding(model, whole * 100 // 60 - 2, 1) != Holding()


def test_an_evaluation_that_takes_more_than_a_step_has_to_fit_too() -> None:
    model, work = Model(UNITS, 2), TilingWork(10, 10, 10, 10, 10, 10, 10, evaluation=0)
    assert choose_holding(model, 10**5, 1, work=work) == Holding()
    assert choose_holding(model, 10**5, 1, work=replace(work, evaluation=10**5)) != Holding()


def test_where_nothing_fits_the_least_is_held_and_off_tiles_nothing() -> None:
    model, work = Model(UNITS, 2), TilingWork(10**6, 0, 0, 0, 0, 0, 0, 0)
    least = choose_holding(model, 1000, 1, work=work)
    assert least.tiled == {0, 1, 2, 3, 4, 5}
    off = choose_holding(model, 1000, 1, work=work, may_tile=False)
    assert off == Holding(frozenset(), 1, 1, True)

"""Planner and engine ask one rule what is computed in tiles, and get one answer."""

from __future__ import annotations

import pytest
from plan_fakes import server
from stream_models import tiny_loaded

from outcore.engine.stream.tiles_plan import plan_tiles
from outcore.engine.stream.units import discover_units
from outcore.plan.request import RunRequest
from outcore.plan.shape_source import shape_from_config
from outcore.plan.stream_layout import StreamLayout
from outcore.plan.stream_tiles import tiling_of
from outcore.units import KIB

FIELDS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@pytest.mark.parametrize(
    ("model", "fields"),
    [
        ("llama", {"vocab_size": 4096, "intermediate_size": 128}),
        ("llama", {"vocab_size": 4096, "intermediate_size": 128, "tie_word_embeddings": True}),
        ("qwen3", {"vocab_size": 256, "intermediate_size": 2048}),
    ],
)
def test_shapes_and_models_lead_to_the_same_tiles(model: str, fields: dict) -> None:
    """From room for everything whole down to room for no layer."""
    loaded = tiny_loaded(model, **FIELDS, **fields)
    shape, units = shape_from_config(model, loaded.config), discover_units(loaded)
    assert shape.total_params == sum(unit.layout.num_params for unit in units.all)
    seen = set()
    for device_bytes in [size * KIB for size in range(400, 24_000, 200)]:
        layout = StreamLayout(1, 1, device_bytes=device_bytes, tile_bytes=4 * KIB)
        planned = tiling_of(shape, RunRequest(precision="fp32"), server(), layout)
        built = plan_tiles(units, "auto", device_bytes, 4 * KIB, 3)
        layers = {unit.index - 1 for unit in units.layer_units if unit.index in built.indices}
        ends = bool({units.embed.index, units.head.index} & built.indices)
        assert (planned.layers, planned.ends) == (layers, ends), device_bytes
        assert planned.chunk_bytes == built.chunk_bytes or not planned.any
        seen.add((len(layers), ends))
    assert (0, False) in seen and len(seen) >= 3

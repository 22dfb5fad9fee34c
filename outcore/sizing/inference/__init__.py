"""Sizes and decisions of inference: where everything lives, by preset and machine."""

from outcore.sizing.inference.in_place import InPlaceRates, compute_in_place
from outcore.sizing.inference.pass_bytes import (
    DRAWN_ROWS,
    GRAPH_ROWS,
    AttentionLimits,
    AttentionSize,
    LayerSize,
    PassSize,
    pass_bytes,
)
from outcore.sizing.inference.placement import (
    PRESETS,
    DoesNotFit,
    InferenceLimits,
    InferenceNeeds,
    KvSize,
    PartSize,
    Placement,
    place_inference,
)
from outcore.sizing.inference.row_cost import RowCost, pairs, row_cost_of

__all__ = [
    "DRAWN_ROWS",
    "GRAPH_ROWS",
    "PRESETS",
    "AttentionLimits",
    "AttentionSize",
    "DoesNotFit",
    "InPlaceRates",
    "InferenceLimits",
    "InferenceNeeds",
    "KvSize",
    "LayerSize",
    "PartSize",
    "PassSize",
    "Placement",
    "RowCost",
    "compute_in_place",
    "pairs",
    "pass_bytes",
    "place_inference",
    "row_cost_of",
]

"""Sizes and decisions of inference: where everything lives, by preset and machine."""

from outcore.sizing.inference.in_place import InPlaceRates, compute_in_place
from outcore.sizing.inference.pass_bytes import (
    DRAWN_ROWS,
    GRAPH_ROWS,
    GUESSED_TOKENS,
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
    PartHome,
    PartSize,
    Placement,
    PresetRule,
    place_inference,
)
from outcore.sizing.inference.row_cost import RowCost, pairs, row_cost_of

__all__ = [
    "DRAWN_ROWS",
    "GRAPH_ROWS",
    "GUESSED_TOKENS",
    "PRESETS",
    "AttentionLimits",
    "AttentionSize",
    "DoesNotFit",
    "InPlaceRates",
    "InferenceLimits",
    "InferenceNeeds",
    "KvSize",
    "LayerSize",
    "PartHome",
    "PartSize",
    "PassSize",
    "Placement",
    "PresetRule",
    "RowCost",
    "compute_in_place",
    "pairs",
    "pass_bytes",
    "place_inference",
    "row_cost_of",
]

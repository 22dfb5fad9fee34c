"""Sizes and decisions of inference: where everything lives, by preset and machine."""

from outcore.sizing.inference.in_place import InPlaceRates, compute_in_place
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
    "PRESETS",
    "DoesNotFit",
    "InPlaceRates",
    "InferenceLimits",
    "InferenceNeeds",
    "KvSize",
    "PartHome",
    "PartSize",
    "Placement",
    "PresetRule",
    "RowCost",
    "compute_in_place",
    "pairs",
    "place_inference",
    "row_cost_of",
]

"""Sizes and decisions of inference: where everything lives, by preset and machine."""

from outcore.sizing.inference.in_place import compute_in_place
from outcore.sizing.inference.needs import PRESETS, InferenceLimits, InferenceNeeds, KvSize, PartSize
from outcore.sizing.inference.pass_bytes import (
    GRAPH_KEYS,
    GRAPH_ROWS,
    AttentionLimits,
    AttentionSize,
    LayerSize,
    PassSize,
)
from outcore.sizing.inference.placement import Placement
from outcore.sizing.inference.rates import InPlaceRates, RowCost, pairs, row_cost_of
from outcore.sizing.inference.rule import DoesNotFit, place_by_experts, place_inference

"""Sizes and decisions of inference: where everything lives, by preset and machine."""

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

__all__ = [
    "PRESETS",
    "DoesNotFit",
    "InferenceLimits",
    "InferenceNeeds",
    "KvSize",
    "PartHome",
    "PartSize",
    "Placement",
    "PresetRule",
    "place_inference",
]

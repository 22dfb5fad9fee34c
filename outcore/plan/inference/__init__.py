"""`outcore plan --infer`: where a model would live while it answers, and how fast, before anything loads."""

from outcore.plan.inference.needs import needs_of, state_bytes_of
from outcore.plan.inference.speed import CPU_LAYER_S, CPU_SPAN_S, KEY_S, KV_LINK_SHARE, InferencePlan, PassTime
from outcore.plan.inference.words import changes, plan_inference, plan_of, to_json, words_of
from outcore.sizing.inference import DoesNotFit

__all__ = [
    "CPU_LAYER_S",
    "CPU_SPAN_S",
    "KEY_S",
    "KV_LINK_SHARE",
    "DoesNotFit",
    "InferencePlan",
    "PassTime",
    "changes",
    "needs_of",
    "plan_inference",
    "plan_of",
    "state_bytes_of",
    "to_json",
    "words_of",
]

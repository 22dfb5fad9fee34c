"""Passes over all layers: work laid out in rows, run by flow."""

from outcore.infer.passes.choice import TokenChoice
from outcore.infer.passes.draft_model import DraftModel
from outcore.infer.passes.graphs import SmallPasses
from outcore.infer.passes.runner import Found, PagedRunner, PassRunner, RunnerLimits
from outcore.infer.passes.scores import TextScores, TokenScore
from outcore.infer.passes.seeing import SeeingRunner
from outcore.infer.passes.states import StatesOfCall, StatesRunner, cache_argument, fresh_layers
from outcore.infer.passes.streamed import StreamedRunner
from outcore.infer.passes.texts import OnScores, OnVectors, Texts, WaitingTexts
from outcore.infer.passes.whole import WholeRunner

__all__ = [
    "DraftModel",
    "Found",
    "OnScores",
    "OnVectors",
    "PagedRunner",
    "PassRunner",
    "RunnerLimits",
    "SeeingRunner",
    "SmallPasses",
    "StatesOfCall",
    "StatesRunner",
    "StreamedRunner",
    "TextScores",
    "Texts",
    "TokenChoice",
    "TokenScore",
    "WaitingTexts",
    "WholeRunner",
    "cache_argument",
    "fresh_layers",
]

"""A mixture's experts apart from their layers: read as tokens choose them, in slots on the device, run from there."""

from outcore.flow.experts.cache import ExpertCache, ExpertCounts
from outcore.flow.experts.chosen import ChosenLayers, run_chosen
from outcore.flow.experts.few_tokens import NAME as BY_PAIRS
from outcore.flow.experts.few_tokens import FewTokens
from outcore.flow.experts.form import experts_apart, experts_of, form_of

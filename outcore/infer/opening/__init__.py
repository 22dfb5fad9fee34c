"""A model opened by name: found, tried, placed, its weights brought home."""

from outcore.infer.opening.build import OpenedModel, device_of, open_engine, open_found, precision_of
from outcore.infer.opening.check import PagedLayers, implementations_of, paged_layers, use_attention
from outcore.infer.opening.forecast import AgainstPlan, against_plan, plan_as_opened, taken_bytes
from outcore.infer.opening.model import FoundModel, ModelPlace, find_place, open_model
from outcore.infer.opening.pages import model_hash
from outcore.infer.opening.settings import InferSettings
from outcore.infer.opening.weights import HostShare

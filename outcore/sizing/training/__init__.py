"""Sizes and decisions of training: what a run keeps, and where everything of it lives."""

from outcore.sizing.training.needs import PartNeeds, TrainingNeeds, checkpoint_ends, needs_of_shape, parts_of_shape
from outcore.sizing.training.placement import Pins, TrainingLimits, TrainingPlacement
from outcore.sizing.training.rule import cut_homes, least_gradients, place_training

"""Values of parameters: initial ones, those of a checkpoint group by group, shares under ZeRO-3."""

from outcore.model.weights.feed import WeightFeed
from outcore.model.weights.initialise import meta_skeleton, seeded_cpu
from outcore.model.weights.standin import is_stand_in, stand_in
from outcore.model.weights.zero3 import full_numel, full_shape, settle

"""Values of parameters: initial ones, those of a checkpoint group by group, shares under ZeRO-3."""

from outcore.model.weights.feed import (
    InitialWeights,
    TrainedWeights,
    WeightFeed,
    by_layer,
    shard_files,
    target_names,
)
from outcore.model.weights.initialise import (
    Gather,
    check_weight_files,
    initialise_weights,
    is_stand_in,
    meta_skeleton,
    seeded_cpu,
    stand_in,
    without_memory,
)
from outcore.model.weights.zero3 import (
    full_numel,
    full_shape,
    gathered,
    partition_while_loading,
    settle,
    without_partitioning,
)

"""Checkpoints on a drive: folders, shards, manifests; `export` makes of them models that others load."""

from outcore.checkpoint.folders import (
    SPACE_MARGIN_BYTES,
    Checkpoint,
    changed_settings,
    check_same_run,
    differences,
    go_back_to,
    list_checkpoints,
    newest_checkpoint,
    open_checkpoint,
    save_checkpoint,
    step_folder,
)
from outcore.checkpoint.shards import (
    MAX_SHARD_BYTES,
    CheckpointError,
    ShardReader,
    TensorPlan,
    plan_shards,
    write_shard,
)

"""Checkpoints on a drive: folders, shards, manifests; `export` makes of them models that others load."""

from outcore.checkpoint.folders import (
    SPACE_MARGIN_BYTES,
    Checkpoint,
    go_back_to,
    list_checkpoints,
    mend_export,
    newest_checkpoint,
    open_checkpoint,
    save_checkpoint,
    step_folder,
)
from outcore.checkpoint.manifest import CheckpointError
from outcore.checkpoint.same_run import changed_settings, check_same_run, config_sha256, differences, model_fingerprint
from outcore.checkpoint.shards import MAX_SHARD_BYTES, ShardReader, TensorPlan, plan_shards, write_shard

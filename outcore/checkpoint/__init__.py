"""Checkpoints on a drive: folders, shards, manifests, and how they become models that others load."""

from outcore.checkpoint.folders import Checkpoint, list_checkpoints, open_checkpoint
from outcore.checkpoint.shards import CheckpointError, ShardReader

__all__ = ["Checkpoint", "CheckpointError", "ShardReader", "list_checkpoints", "open_checkpoint"]

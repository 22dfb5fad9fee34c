"""Published checkpoints with packed weights: safetensors by their quantization_config, and GGUF files."""

from outcore.formats.checkpoint.entries import Entry, ExpandedEntry, PackedEntry, PlainEntry
from outcore.formats.checkpoint.index import PackedCheckpoint, open_safetensors

__all__ = ["Entry", "ExpandedEntry", "PackedCheckpoint", "PackedEntry", "PlainEntry", "open_safetensors"]

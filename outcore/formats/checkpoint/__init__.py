"""Published checkpoints with packed weights: safetensors by their quantization_config."""

from outcore.formats.checkpoint.entries import Entry, ExpandedEntry, PackedEntry, PlainEntry
from outcore.formats.checkpoint.index import PackedCheckpoint, open_safetensors, usual_format, why_not_read

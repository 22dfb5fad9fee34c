"""Published checkpoints with packed weights: safetensors by their quantization_config."""

from outcore.formats.checkpoint.index import (
    GGUF,
    KEPT,
    PackedCheckpoint,
    formats_of_ends,
    method_of,
    notes_on,
    open_safetensors,
    usual_format,
    why_not_read,
)
from outcore.formats.checkpoint.places import (
    TYPES,
    Entry,
    ExpandedEntry,
    PackedEntry,
    PlainEntry,
    TensorPlace,
    safetensors_places,
)

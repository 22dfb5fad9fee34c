"""Can this model be streamed? Found out on a tiny copy of it."""

from outcore.flow.check.trial import (
    TOLERANCE,
    Batch,
    Trial,
    attention_to_packed_rows,
    config_of_type,
    sharing_holds,
    slab_of,
    tiny_copy,
    try_tiny_copy,
    why_config_not_streamed,
    why_not_streamed,
)

"""Layouts of a chunk's optimizer states in one buffer: fp32, split, 8-bit, compressed on a drive."""

from outcore.optim.formats.chunk_state import STATE_NAMES, ChunkState, StateName
from outcore.optim.formats.compressed import Tail, tail_of
from outcore.optim.formats.state_format import (
    BLOCK_NUMEL,
    CHUNK_BYTES,
    FORMATS,
    PARAM_DTYPES,
    StateFormat,
    state_format,
)

"""Homes of masters and moments live, chunk by chunk, and how they flow past the CPU optimizer; both engines use it.

`placement` cuts states into chunks and says which live on NVMe, `buffers` holds them, `homes` are those of a model's
parts beside the parameters, `ring` takes chunks on NVMe past the optimizer, `window` reads and writes them for
checkpoints, `second` has homes for updates that may be taken back."""

from outcore.states.homes import Homes, SecondHomes, StateBuffers, open_store
from outcore.states.placement import ChunkHomes, GradPlace, StateChunk, Updatable, cut_states, spill
from outcore.states.ring import BEFORE_ALL_UNITS, RingSize, RingTicket, StateRing

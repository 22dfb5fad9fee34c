"""The CPU optimizer that both engines share: AdamW over chunks of states in RAM or passing through it.

`OptimizerPool` updates units of `ChunkJob`s in the background; `StateFormat` (fp32, split, fp32_m8, split8, fp24_m8)
says how a chunk's states lie in one buffer, `ChunkState` reads and writes them by name. A small C++ extension, built
once by `build_extension`, does the work at DRAM speed; without a compiler torch gives the same bits, slower."""

from outcore.optim.backend import Backend, BackendName, GradStats
from outcore.optim.build import BuildFailed, CompilerMissing, ExtensionUnavailable, build_extension
from outcore.optim.choice import open_backend
from outcore.optim.digest import DigestFound, find_digest
from outcore.optim.formats import BLOCK_NUMEL, FORMATS, STATE_NAMES, ChunkState, StateFormat, state_format
from outcore.optim.formats.state_format import FP24_M8, FP32, FP32_M8, SPLIT, SPLIT8
from outcore.optim.gpu import MatrixJob, MatrixUpdates, update_on_device, updates_on_device
from outcore.optim.hyper import AdamWHyper, check_eps
from outcore.optim.jobs import ChunkJob, JobBatch
from outcore.optim.pool import (
    ChunkResult,
    OptimizerPool,
    PoolClosed,
    Ticket,
    UnitResult,
    UpdateFailed,
    default_num_threads,
)
from outcore.optim.reference import LARGEST_GRAD

"""Pinned memory: the pool that owns it, leases of exact sizes, and homes in it or beside it."""

from outcore.staging.pool.allocator import ALIGNMENT_BYTES, ExtentAllocator, Lease, LeaseError, PoolExtent
from outcore.staging.pool.cuda_runtime import CudaRuntime, PinRefused, load_libcudart
from outcore.staging.pool.pinned_grant import PinnedGrant, probe_pinned_memory, refusal_is_harmless
from outcore.staging.pool.pool import (
    HomeMemory,
    HostMemory,
    PinnedPool,
    PinnedPoolFull,
    SmallCopies,
    device_view,
    pageable,
)
from outcore.staging.pool.slab import MappedSlab

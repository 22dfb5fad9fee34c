"""Pinned memory and the lanes through it: the pool that owns it, leases, and transfers between homes and the device."""

from outcore.staging.lanes.copy_streams import CopyStreams
from outcore.staging.lanes.directions import DownloadLane, UploadLane
from outcore.staging.lanes.gate import Gate
from outcore.staging.lanes.lane import AT_ONCE
from outcore.staging.lanes.stats import LaneStats
from outcore.staging.lanes.transfer import LaneClosed, LaneTransfer
from outcore.staging.pool.lease import Lease, LeaseError
from outcore.staging.pool.pinned_grant import PinnedGrant, probe_pinned_memory
from outcore.staging.pool.pool import PinnedPool, PinnedPoolFull

__all__ = [
    "AT_ONCE",
    "CopyStreams",
    "DownloadLane",
    "Gate",
    "LaneClosed",
    "LaneStats",
    "LaneTransfer",
    "Lease",
    "LeaseError",
    "PinnedGrant",
    "PinnedPool",
    "PinnedPoolFull",
    "UploadLane",
    "probe_pinned_memory",
]

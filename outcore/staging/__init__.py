"""Pinned memory and the lanes through it: the pool that owns it, leases, and transfers between homes and the device."""

from outcore.staging.copy_streams import CopyStreams
from outcore.staging.gate import Gate
from outcore.staging.lane import AT_ONCE
from outcore.staging.lane_stats import LaneStats
from outcore.staging.lane_transfer import LaneClosed, LaneTransfer
from outcore.staging.lanes import DownloadLane, UploadLane
from outcore.staging.lease import Lease, LeaseError
from outcore.staging.pinned_grant import PinnedGrant, probe_pinned_memory
from outcore.staging.pool import PinnedPool, PinnedPoolFull

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

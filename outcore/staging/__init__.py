"""Pinned memory and the lanes through it: the pool that owns it, leases, and transfers between homes and the device."""

from outcore.staging.drive_speed import NvmePerformance, check_nvme_performance, performance
from outcore.staging.lanes import (
    AT_ONCE,
    CopyStreams,
    DownloadLane,
    Gate,
    LaneClosed,
    LaneSettings,
    LaneTransfer,
    UploadLane,
    whole_device,
)
from outcore.staging.pool import Lease, LeaseError, PinnedGrant, PinnedPool, PinnedPoolFull, probe_pinned_memory

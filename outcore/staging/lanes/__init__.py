"""Transfers between homes and the device through pinned slots, in order, each with a receipt."""

from outcore.staging.lanes.copy_streams import CopyEvent, CopyStreams, whole_device
from outcore.staging.lanes.lane import AT_ONCE, DownloadLane, LaneSettings, UploadLane
from outcore.staging.lanes.slots import Gate
from outcore.staging.lanes.transfer import LaneClosed, LaneTransfer

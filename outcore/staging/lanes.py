"""`UploadLane` and `DownloadLane`: the two directions of a `Lane` (see there for ordering and lifetime)."""

from __future__ import annotations

import torch

from outcore.staging.lane import After, Lane
from outcore.staging.lane_transfer import LaneTransfer
from outcore.storage.block_file import BlockFile


class UploadLane(Lane):
    """Drive or RAM to device. Its slots may be write-combined, because the CPU only ever writes them."""

    direction = "upload"

    def submit(self, file: BlockFile, offset: int, out: torch.Tensor, *, after: After = None) -> LaneTransfer:
        """Fills `out` (contiguous, on the lane's device, any dtype and shape) from `file` at byte `offset`.

        Returns at once. Raises ValueError for unsuitable arguments; I/O errors (StorageError) come from the transfer.
        """
        return self._submit_file(out, file, offset, after)

    def submit_host(self, src: torch.Tensor, out: torch.Tensor, *, after: After = None) -> LaneTransfer:
        """Fills `out` from `src`, a contiguous CPU tensor of as many bytes, pinned (direct) or pageable (slots)."""
        return self._submit_host(out, src, after)


class DownloadLane(Lane):
    """Device to drive or RAM. Its slots are default memory: the CPU reads them."""

    direction = "download"

    def submit(self, src: torch.Tensor, file: BlockFile, offset: int, *, after: After = None) -> LaneTransfer:
        """Writes `src` (contiguous, on the lane's device) to `file` at byte `offset`; returns at once.

        `src` may be overwritten by work on a stream after `wait_stream(stream)`; the data is in the file after `wait`
        (durable after the file's `sync`).
        """
        return self._submit_file(src, file, offset, after)

    def submit_host(self, src: torch.Tensor, dst: torch.Tensor, *, after: After = None) -> LaneTransfer:
        """Writes `src` into `dst`, a contiguous CPU tensor of as many bytes, pinned (direct) or pageable (slots)."""
        return self._submit_host(src, dst, after)

"""`UploadLane` and `DownloadLane`: the two directions of a `Lane` (see there for ordering and lifetime).

`label` says whose bytes they are ("layer 3"), in messages and in a trace."""

from __future__ import annotations

import torch

from outcore.staging.lanes.lane import After, Lane
from outcore.staging.lanes.transfer import LaneTransfer
from outcore.storage import BlockFile
from outcore.storage.store import TensorStore


class UploadLane(Lane):
    """Drive or RAM to device. Its slots may be write-combined, because the CPU only ever writes them."""

    direction = "upload"

    def submit(
        self, file: BlockFile, offset: int, out: torch.Tensor, *, after: After = None, label: str = ""
    ) -> LaneTransfer:
        """Fills `out` (contiguous, on the lane's device, any dtype and shape) from `file` at byte `offset`.

        Returns at once. Raises ValueError for unsuitable arguments; I/O errors (StorageError) come from the transfer.
        """
        return self._submit_file(out, file, offset, after, label)

    def submit_stored(
        self,
        store: TensorStore,
        name: str,
        out: torch.Tensor,
        offset_bytes: int = 0,
        *,
        after: After = None,
        label: str = "",
    ) -> LaneTransfer:
        """Fills `out` from byte `offset_bytes` of the tensor `name`, over all drives of the store.

        ValueError for an unknown name, a range that does not fit, another dtype (uint8 always fits), and for a store
        with checksums on a lane that is write-combined (the CPU would read it) or has slots below 2 MiB."""
        return self._submit_stored(out, store, name, offset_bytes, after, label)

    def submit_host(
        self, src: torch.Tensor, out: torch.Tensor, *, after: After = None, label: str = "", aside: bool = False
    ) -> LaneTransfer:
        """Fills `out` from `src`, a contiguous CPU tensor of as many bytes, pinned (direct) or pageable (slots).

        `aside`: pinned memory comes past copies that still wait for their `after`, though not past those under way."""
        return self._submit_host(out, src, after, label, aside=aside)


class DownloadLane(Lane):
    """Device to drive or RAM. Its slots are default memory: the CPU reads them."""

    direction = "download"

    def submit(
        self, src: torch.Tensor, file: BlockFile, offset: int, *, after: After = None, label: str = ""
    ) -> LaneTransfer:
        """Writes `src` (contiguous, on the lane's device) to `file` at byte `offset`; returns at once.

        `src` may be overwritten by work on a stream after `wait_stream(stream)`; the data is in the file after `wait`
        (durable after the file's `sync`)."""
        return self._submit_file(src, file, offset, after, label)

    def submit_stored(
        self,
        src: torch.Tensor,
        store: TensorStore,
        name: str,
        offset_bytes: int = 0,
        *,
        after: After = None,
        label: str = "",
    ) -> LaneTransfer:
        """Writes `src` to byte `offset_bytes` of the tensor `name`; durable after the store's `commit`.

        ValueError as for `UploadLane.submit_stored`."""
        return self._submit_stored(src, store, name, offset_bytes, after, label)

    def submit_host(
        self, src: torch.Tensor, dst: torch.Tensor, *, after: After = None, label: str = ""
    ) -> LaneTransfer:
        """Writes `src` into `dst`, a contiguous CPU tensor of as many bytes, pinned (direct) or pageable (slots)."""
        return self._submit_host(src, dst, after, label)

"""Tiles of large weights on the device just in time, through a ring of a few buffers.

While a tile is computed with, the next ones come up; each buffer is written to again once the work that read it is over
(an event). Behind the last tile of a matrix the ring goes on with the one that followed it the last time, which it
learns as it goes: a wrong guess costs an upload, never a result. Nothing is kept from one use of a unit to the next,
so a tile is never older than the unit's last update. Cost: the buffers, and every weight's bytes each time it is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from outcore.common.deadline import Deadline, after
from outcore.flow.parts import Part
from outcore.flow.tiles.matrix import TiledMatrix
from outcore.flow.trace import Stalls
from outcore.flow.weights import RangeUpload, SlabRanges, settle
from outcore.staging import AT_ONCE

NUM_BUFFERS = 3  # one is computed with, the others arrive behind it


@dataclass
class _Coming:
    """A tile on its way up."""

    matrix: TiledMatrix
    tile: int
    buffer: int
    transfers: list[RangeUpload]


class TileRing:
    """A few device buffers through which tiles of these matrices, all of one type, come up."""

    def __init__(self, ranges: SlabRanges, matrices: Iterable[TiledMatrix], *, stalls: Stalls | None = None) -> None:
        self._ranges, lane = ranges, ranges.lane
        self._lane = lane
        matrices = list(matrices)
        dtype, numel = matrices[0].unit.layout.dtype, max(matrix.buffer_numel for matrix in matrices)
        self._buffers = [torch.zeros(numel, dtype=dtype, device=lane.device) for _ in range(NUM_BUFFERS)]
        expanded = max((matrix.tile_numel for matrix in matrices if matrix.packed is not None), default=0)
        self._expanded = torch.zeros(expanded, dtype=dtype, device=lane.device)
        """Values of the packed tile that is held."""
        self._over: list[Any] = [lane.streams.now()] * NUM_BUFFERS
        """Events after the last use of each; at first after its allocation, which is work of that stream."""
        self._turn = 0
        self._coming: deque[_Coming] = deque()
        self._held = 0
        self._unit: Part | None = None
        self._last: tuple[Any, ...] = ()
        self._follower: dict[tuple[Any, ...], TiledMatrix] = {}
        self._stalls = stalls or Stalls(lane.device)

    @property
    def device(self) -> torch.device:
        return self._lane.device

    @property
    def device_bytes(self) -> int:
        return self._expanded.nbytes + sum(buffer.nbytes for buffer in self._buffers)

    def open(self, unit: Part) -> None:
        """Start using this part, with its parameters as they are now."""
        self.drop()
        self._unit = unit

    def restart(self, phase: str) -> None:
        """The unit's work begins again (another micro-batch, or backward): what follows what is learned by phase."""
        self._last = (phase,)

    def drop(self) -> None:
        """Wait for tiles that were guessed and not used, so that their buffers are free. TimeoutError when they are
        not."""
        if not self.give_up():
            raise TimeoutError("tiles that were guessed and are not needed are still on their way into their buffers")

    def give_up(self, deadline: Deadline | None = None) -> bool:
        """Drop after a failure: False when a tile is still on its way, and the ring must not be used again."""
        coming = [transfer for coming in self._coming for transfer in coming.transfers]
        self._coming.clear()
        return settle(coming, deadline)

    def tiles(self, matrix: TiledMatrix, use: str) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (number, tile [rows, num_cols]). A tile may be read until the next one is asked for."""
        assert self._unit is matrix.unit, f"{matrix.slot.name} is used while {matrix.unit.name} is not open"
        assert not self._held, "tiles of one matrix at a time"
        self._follower[self._last] = matrix
        self._last = (self._last[0] if self._last else "", matrix.key, use)
        if self._coming and self._coming[0].matrix.key != matrix.key:
            self.drop()
        next_tile = len(self._coming)  # what was guessed, from its first tile on
        try:
            for number in range(matrix.num_tiles):
                while next_tile < matrix.num_tiles and self._has_room():
                    self._upload(matrix, next_tile)
                    next_tile += 1
                if next_tile == matrix.num_tiles:
                    self._guess(matrix.num_tiles - number)
                yield from self._hold(number)
        except BaseException as error:
            self.give_up(None if isinstance(error, GeneratorExit) else after(error))
            raise
        self._guess(0)

    def _hold(self, number: int) -> Iterator[tuple[int, torch.Tensor]]:
        coming = self._coming.popleft()
        link = "nvme" if any(transfer.is_from_drive for transfer in coming.transfers) else "pcie"
        with self._stalls.until(f"a tile of {coming.matrix.slot.name}", link):
            for transfer in coming.transfers:
                transfer.wait_stream()
        first, last = coming.matrix.rows(number)
        buffer, is_packed = self._buffers[coming.buffer], coming.matrix.packed is not None
        tile = (self._expanded if is_packed else buffer)[: (last - first) * coming.matrix.num_cols]
        tile = tile.view(last - first, -1)
        self._held += 1
        try:
            if is_packed:
                coming.matrix.expand(number, buffer, tile)
            yield number, tile
        finally:
            self._held -= 1
            self._over[coming.buffer] = self._lane.streams.now()

    def _guess(self, num_own: int) -> None:
        """Bring up the matrix that followed the last time, behind `num_own` tiles of the present one."""
        follower = self._follower.get(self._last)
        if follower is None or follower.unit is not self._unit:
            return
        while len(self._coming) - num_own < follower.num_tiles and self._has_room():
            self._upload(follower, len(self._coming) - num_own)

    def _has_room(self) -> bool:
        return len(self._coming) + self._held < len(self._buffers)

    def _upload(self, matrix: TiledMatrix, tile: int) -> None:
        buffer, self._turn = self._turn, (self._turn + 1) % len(self._buffers)
        after = AT_ONCE if self._over[buffer] is None else self._over[buffer]
        transfers = [
            self._ranges.submit(matrix.unit, start, stop, self._buffers[buffer][at : at + stop - start], after=after)
            for start, stop, at in matrix.pieces(tile)
        ]
        self._coming.append(_Coming(matrix, tile, buffer, transfers))

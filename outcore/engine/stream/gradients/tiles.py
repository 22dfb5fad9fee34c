"""Gradients of tiles on their way down: added up over micro-batches, rounded, counted into the norm, sent home.

The gradient of a large weight never exists whole on the device. Each tile's goes down as it is made; where more parts
of it are to come (another micro-batch, another chunk of tokens), what there is waits in RAM and comes up again to be
added to, in fp32 as untiled: the first part as it is in the gradient's own home, sums of several in an fp32 home that
all tiled units share. Cost over the link, in bytes per parameter of a tiled layer in 16-bit: 2 down with one
micro-batch; 6 with two (2 down, 2 up, 2 down); 8 more for each further one (4 up, 4 down). RAM: 4 B per parameter of
the largest tiled layer, taken when the first step with three or more parts needs it. Embedding and head do all
micro-batches tile by tile, so theirs go down once.

Gradients of an embedding too large for the device: only the rows whose tokens occur, summed in RAM in fp32.

A step's rows are known once every micro-batch has been looked up. With tied weights the head's gradient of the same
matrix goes down tile by tile before; its part of these rows is kept here in fp32, unrounded, until the embedding's is
added, so that each value is rounded once, as it is when everything is added up on the device. Cost: 4 B x rows that
occur x hidden size of RAM, instead of 4 B x vocabulary x hidden size of device memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from outcore.engine.stream.gradients.download import (
    GradAccumulator,
    GradientDownload,
    GradientShipping,
    ShippingBefore,
    TransferGroup,
)
from outcore.flow.parts import Part
from outcore.flow.tiles import TiledMatrix, TiledPart
from outcore.flow.weights import settle
from outcore.staging import AT_ONCE, DownloadLane, LaneTransfer, UploadLane
from outcore.staging.pool import HostMemory


class RowSums:
    """Sums of one matrix in one step. Ids are int64 on the CPU, unique within a call."""

    def __init__(self, num_cols: int) -> None:
        self.num_cols = num_cols
        self._seen: list[torch.Tensor] = []
        self._open = True
        self._ids: torch.Tensor | None = None
        self._sums = torch.zeros((0, num_cols))

    def begin(self) -> None:
        """Start a step."""
        self._seen, self._ids, self._open = [], None, True

    def note(self, ids: torch.Tensor) -> None:
        """Note rows that are looked up; in a step before its first gradient, that is to be taken note of."""
        if self._open:
            self._seen.append(ids)

    @property
    def ids(self) -> torch.Tensor:
        """Rows that were looked up, ascending; no more may be noted from now on."""
        if self._ids is None:
            self._ids = torch.cat(self._seen).unique() if self._seen else torch.zeros(0, dtype=torch.long)
            self._sums = torch.zeros((len(self._ids), self.num_cols))
            self._open = False
        return self._ids

    def take_from(self, rows: tuple[int, int], grad: torch.Tensor, rounded: torch.Tensor) -> None:
        """Add the noted rows among [first, last) of the head's `grad` here, and clear them in `rounded`."""
        first, last = rows
        low, high = torch.searchsorted(self.ids, torch.tensor([first, last])).tolist()
        if low == high:
            return
        inside = (self.ids[low:high] - first).to(grad.device)
        self._sums[low:high] += grad[inside].float().cpu()
        rounded[inside] = 0

    def add(self, ids: torch.Tensor, grad: torch.Tensor) -> None:
        """Add a micro-batch's gradient [len(ids), num_cols] of these rows."""
        places = torch.searchsorted(self.ids, ids)
        self._sums.index_add_(0, places, grad.float().cpu())

    def write(self, home: torch.Tensor) -> torch.Tensor:
        """Round the sums into the rows of `home`, which is zero there; they are also returned, rounded."""
        rounded = self._sums[: len(self.ids)].to(home.dtype)
        home[self.ids] = rounded
        return rounded


NUM_BUFFERS = 2  # one tile leaves while the next is made
SUM_DTYPE = torch.float32


@dataclass
class _TileState:
    """Progress of a tile's gradient: what has come so far, and where it waits."""

    where: Literal["none", "home", "sums", "sent"] = "none"
    parts: int = 0
    transfer: LaneTransfer | None = None


class TileGradients:
    """Gradients of tiles on their way. Serves one step at a time: `begin`, per unit `add`..., `finish`."""

    def __init__(
        self,
        tiled: Sequence[TiledPart],
        download: GradientDownload,
        up: UploadLane,
        down: DownloadLane,
        memory: HostMemory,
    ) -> None:
        self._download, self._up, self._down, self._memory = download, up, down, memory
        tile_numel = max((unit.tile_numel for unit in tiled if unit.unit.is_trainable), default=0)
        n_bytes = SUM_DTYPE.itemsize * tile_numel
        self._ship = [torch.zeros(n_bytes, dtype=torch.uint8, device=up.device) for _ in range(NUM_BUFFERS)]
        self._leaving: list[LaneTransfer | None] = [None] * NUM_BUFFERS
        self._turn = 0
        self._back: list[torch.Tensor] = []
        """Buffers for what comes up again, made when there is such a thing."""
        self._back_over: list[Any] = [None] * NUM_BUFFERS
        self._back_turn = 0
        self._sums = torch.zeros(0, dtype=SUM_DTYPE)
        self._states: dict[tuple[int, int, int], _TileState] = {}
        self._sent: dict[int, list[LaneTransfer]] = {}
        self._expected: dict[tuple[int, int], int] = {}
        self._forwards: Counter[int] = Counter()
        self._backwards: Counter[int] = Counter()
        self.counting = True
        """Off while a chunk of tokens is recomputed: its uses have been counted."""
        self.rows: dict[tuple[int, int], RowSums] = {}
        """Sums by matrix, for those that have been used as an embedding."""

    @property
    def device_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in (*self._ship, *self._back))

    def begin(self) -> None:
        """Start a step; what a failed one left under way is waited for."""
        settle(state.transfer for state in self._states.values() if state.transfer is not None)
        settle(transfer for sent in self._sent.values() for transfer in sent)
        self._states, self._sent, self._expected = {}, {}, {}
        self._forwards.clear()
        self._backwards.clear()
        self.counting = True
        for rows in self.rows.values():
            rows.begin()

    def begin_forward(self, unit: Part) -> None:
        """A micro-batch goes through the unit: as many will come back."""
        self._forwards[unit.index] += 1

    def begin_backward(self, unit: Part) -> None:
        """A micro-batch comes back."""
        self._backwards[unit.index] += 1

    def expect(self, matrix: TiledMatrix) -> None:
        """The matrix has been used once more in a forward that will be differentiated."""
        if self.counting:
            self._expected[matrix.key] = self._expected.get(matrix.key, 0) + 1

    def row_sums(self, matrix: TiledMatrix) -> RowSums:
        """Sums of rows of a matrix that is used as an embedding."""
        return self.rows.setdefault(matrix.key, RowSums(matrix.num_cols))

    def add(self, matrix: TiledMatrix, tile: int, grad: torch.Tensor) -> None:
        """One part of a tile's gradient, [rows, num_cols]."""
        state = self._states.setdefault((*matrix.key, tile), _TileState())
        flat = grad.reshape(-1)
        state.parts += 1
        index = matrix.unit.index
        is_last = self._backwards[index] == self._forwards[index]
        complete = is_last and state.parts == self._expected.get(matrix.key)
        if complete and state.where == "none":
            self._send(matrix, tile, flat, state)
            return
        is_first = state.where == "none"
        if not is_first:
            flat = self._come_back(matrix, tile, state).to(SUM_DTYPE).add_(flat)
        if complete:
            self._send(matrix, tile, flat, state)
        else:
            self._set_aside(matrix, tile, flat, state)
        if not is_first:
            self._free_back()

    def complete(self, matrix: TiledMatrix, tile: int, grad: torch.Tensor) -> None:
        """The whole gradient of a tile, [rows, num_cols]."""
        self._send(matrix, tile, grad.reshape(-1), self._states.setdefault((*matrix.key, tile), _TileState()))

    def finish(self, tiled: TiledPart, resident: GradAccumulator) -> TransferGroup:
        """Send what has not been sent yet; the unit's gradient is at home when the group is done."""
        unit, home = tiled.unit, self._download.home(tiled.unit)
        for start, stop in unit.layout.gaps():
            home[start:stop] = 0
        sent = self._sent.setdefault(unit.index, [])
        for matrix in tiled.all_matrices if unit.is_trainable else ():
            for tile in range(matrix.num_tiles) if matrix.slot.trainable else ():
                self._finish_tile(matrix, tile)
            if (rows := self.rows.get(matrix.key)) is not None and matrix.slot.trainable:
                for transfer in sent:  # they write into the same rows
                    transfer.wait()
                start, stop = matrix.start, matrix.start + matrix.num_rows * matrix.num_cols
                self._download.count(rows.write(home[start:stop].view(matrix.num_rows, matrix.num_cols)))
        rounded = resident.complete().to(home.dtype, copy=True)
        self._download.count(rounded)
        for place, own in tiled.resident_homes:
            if place.trainable:
                sent.append(self._down.submit_host(rounded[own.offset : own.end], home[place.offset : place.end]))
        return TransferGroup(self._sent.pop(unit.index))

    def _finish_tile(self, matrix: TiledMatrix, tile: int) -> None:
        state = self._states.pop((*matrix.key, tile), _TileState())
        start, stop = matrix.span(tile)
        if state.where == "none":
            self._download.home(matrix.unit)[start:stop] = 0
        elif state.where != "sent":
            self._send(matrix, tile, self._come_back(matrix, tile, state), state)
            self._free_back()

    def _send(self, matrix: TiledMatrix, tile: int, flat: torch.Tensor, state: _TileState) -> None:
        assert state.where != "sent", f"{matrix.slot.name}, tile {tile}: a gradient came after the last"
        home = self._download.home(matrix.unit)
        start, stop = matrix.span(tile)
        target = self._take_buffer(stop - start, home.dtype)
        target.copy_(flat)
        rows = self.rows.get(matrix.key)
        if rows is not None:  # tied: these rows get the embedding's part, too, before they are rounded
            rows.take_from(matrix.rows(tile), flat.view(-1, matrix.num_cols), target.view(-1, matrix.num_cols))
        self._download.count(target)
        transfer = self._down.submit_host(target, home[start:stop])
        self._leave(transfer)
        self._sent.setdefault(matrix.unit.index, []).append(transfer)
        state.where, state.transfer = "sent", None

    def _set_aside(self, matrix: TiledMatrix, tile: int, flat: torch.Tensor, state: _TileState) -> None:
        start, stop = matrix.span(tile)
        home = self._download.home(matrix.unit)
        if state.where == "none" and flat.dtype == home.dtype:
            state.where, waits = "home", home[start:stop]
        else:
            state.where, waits = "sums", self._sum_home(matrix)[start:stop]
        target = self._take_buffer(stop - start, waits.dtype)
        target.copy_(flat)
        state.transfer = self._down.submit_host(target, waits)
        self._leave(state.transfer)

    def _come_back(self, matrix: TiledMatrix, tile: int, state: _TileState) -> torch.Tensor:
        """Bring sums that wait in RAM back to the device, until `_free_back`."""
        assert state.transfer is not None
        state.transfer.wait()
        home = self._download.home(matrix.unit) if state.where == "home" else self._sum_home(matrix)
        if not self._back:
            self._back = [torch.empty_like(buffer) for buffer in self._ship]
            # Their memory may have been that of work which is still queued on this stream.
            self._back_over = [self._up.streams.now()] * NUM_BUFFERS
        start, stop = matrix.span(tile)
        found = self._back[self._back_turn][: (stop - start) * home.dtype.itemsize].view(home.dtype)
        event = self._back_over[self._back_turn]
        self._up.submit_host(home[start:stop], found, after=AT_ONCE if event is None else event).wait_stream()
        return found

    def _free_back(self) -> None:
        self._back_over[self._back_turn] = self._up.streams.now()
        self._back_turn = (self._back_turn + 1) % NUM_BUFFERS

    def _sum_home(self, matrix: TiledMatrix) -> torch.Tensor:
        numel = matrix.unit.layout.trainable_numel
        if len(self._sums) < numel:
            n_bytes = numel * SUM_DTYPE.itemsize
            self._sums = self._memory.take(n_bytes, "sums of tiles' gradients", pinned=False).view(SUM_DTYPE)
        return self._sums

    def _take_buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        leaving = self._leaving[self._turn]
        if leaving is not None:
            leaving.wait_stream()
            self._leaving[self._turn] = None
        return self._ship[self._turn][: numel * dtype.itemsize].view(dtype)

    def _leave(self, transfer: LaneTransfer) -> None:
        self._leaving[self._turn] = transfer
        self._turn = (self._turn + 1) % len(self._ship)


class TiledDownload(ShippingBefore):
    """The `GradientShipping` of a model with tiled parts: of these, only resident parameters' gradients are added up
    here."""

    def __init__(
        self,
        inner: GradientShipping,
        tiled: Sequence[TiledPart],
        gradients: TileGradients,
        accumulate_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(inner)
        self._gradients, self._accumulate_dtype, self._device = gradients, accumulate_dtype, device
        self._tiled = {unit.unit.index: unit for unit in tiled}

    @property
    def device_bytes(self) -> int:
        return super().device_bytes + self._gradients.device_bytes

    def begin(self) -> None:
        super().begin()
        self._gradients.begin()

    def accumulator(self, unit: Part, *, only_once: bool = False) -> GradAccumulator:
        tiled = self._tiled.get(unit.index)
        if tiled is None:
            return super().accumulator(unit, only_once=only_once)
        flat = torch.zeros(tiled.resident.trainable_numel, dtype=self._accumulate_dtype, device=self._device)
        return GradAccumulator(tiled.resident, flat)

    def ship(self, unit: Part, accumulator: GradAccumulator) -> Any:
        tiled = self._tiled.get(unit.index)
        return super().ship(unit, accumulator) if tiled is None else self._gradients.finish(tiled, accumulator)

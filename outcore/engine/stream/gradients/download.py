"""Gradients on their way down: rounded to their home's type, counted into the global norm, sent through a lane.

Two device buffers take turns, so that a unit's gradient goes down while the next one is computed; with one, it must
have gone when the next one is complete. A unit whose gradient is larger than a buffer (embedding and head, where memory
is short) goes down in parts. The norm is of the rounded values, which are those that the optimizer will read, and so an
overflow of the rounding (fp16) is seen, too. Embedding's and head's are counted piece by piece, in parts or not, so the
norm has the same bits however they go down.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch

from outcore.engine.stream.gradients.arena import GradientArena, gradient_bytes_of
from outcore.flow.parts import ModelParts, Part, SlabLayout
from outcore.flow.trace import Stalls
from outcore.sizing.tiles import Holding
from outcore.staging import DownloadLane, LaneTransfer


class GradientShipping(Protocol):
    """Place where a step's gradients are added up on the device, counted and sent from; see `GradientDownload`."""

    @property
    def device_bytes(self) -> int: ...
    def begin(self) -> None: ...
    def accumulator(self, unit: Part, *, only_once: bool = False) -> GradAccumulator: ...
    def ship(self, unit: Part, accumulator: GradAccumulator) -> Any: ...
    def norm_of(self, unit: Part) -> float | None: ...
    def norm(self) -> torch.Tensor: ...


class ShippingBefore:
    """A `GradientShipping` that stands before another: what it does not change goes there."""

    def __init__(self, inner: GradientShipping) -> None:
        self._inner = inner

    @property
    def device_bytes(self) -> int:
        return self._inner.device_bytes

    def begin(self) -> None:
        self._inner.begin()

    def accumulator(self, unit: Part, *, only_once: bool = False) -> GradAccumulator:
        return self._inner.accumulator(unit, only_once=only_once)

    def ship(self, unit: Part, accumulator: GradAccumulator) -> Any:
        return self._inner.ship(unit, accumulator)

    def norm_of(self, unit: Part) -> float | None:
        return self._inner.norm_of(unit)

    def norm(self) -> torch.Tensor:
        return self._inner.norm()


class GradientDownload:
    """`accumulate_dtype`: in what the gradients of micro-batches are added up on the device. `make_room` waits for an
    update and gives its gradient's memory back.

    Gradients of units in tiles (of `holding`) never come in whole: no buffer has room for them, but what `count` is
    told of them is part of the norm. `norm_per_unit`: each shipped unit's own norm comes down before its gradient, so
    that nobody has to read the gradient once more to see whether it is finite. Where embedding's and head's leave in
    parts, the buffers are as large as the largest layer's gradient.
    """

    def __init__(
        self,
        units: ModelParts,
        arena: GradientArena,
        lane: DownloadLane,
        holding: Holding,
        *,
        make_room: Callable[[], None],
        accumulate_dtype: torch.dtype = torch.float32,
        stalls: Stalls | None = None,
        norm_per_unit: bool = False,
    ) -> None:
        self._arena, self._lane, self._make_room = arena, lane, make_room
        self._stalls = stalls or Stalls(lane.device)
        trainable = [unit for unit in units.all if unit.is_trainable and unit.index not in holding.tiled]
        self._ends = {units.embed.index, units.head.index}
        self._part_numel = holding.part_numel
        ship_bytes = max(
            (
                min(gradient_bytes_of(unit), holding.part_numel * unit.layout.dtype.itemsize)
                if holding.ends_in_parts and unit.index in self._ends
                else gradient_bytes_of(unit)
                for unit in trainable
            ),
            default=0,
        )
        buffers = range(holding.ship_buffers)
        self._ship = [torch.zeros(ship_bytes, dtype=torch.uint8, device=lane.device) for _ in buffers]
        # Tied weights gather gradients from the head until the embedding's backward, across all layers.
        kept = {units.embed.index} - holding.tiled if units.tied else set()
        largest = max((u.layout.trainable_numel for u in trainable if u.index not in kept), default=0)
        shared = torch.zeros(largest, dtype=accumulate_dtype, device=lane.device)
        ends = torch.zeros(
            units.embed.layout.trainable_numel if kept else 0, dtype=accumulate_dtype, device=lane.device
        )
        self._sums = {unit.index: ends if unit.index in kept else shared for unit in trainable}
        self._device_bytes = shared.nbytes + ends.nbytes + sum(buffer.nbytes for buffer in self._ship)
        self._leaving: list[LaneTransfer | None] = [None] * holding.ship_buffers
        self._turn = 0
        self._sumsq = torch.zeros((), dtype=torch.float64, device=lane.device)
        self._norms: torch.Tensor | None = None
        if norm_per_unit:
            on_gpu = lane.device.type == "cuda"
            self._norms = torch.full((len(units.all),), torch.nan, dtype=torch.float32, pin_memory=on_gpu)

    @property
    def device_bytes(self) -> int:
        return self._device_bytes

    def begin(self) -> None:
        """Start a step: nothing is counted yet."""
        self._sumsq.zero_()

    def accumulator(self, unit: Part, *, only_once: bool = False) -> GradAccumulator:
        """Place where the unit's gradients are added up. `only_once`: each comes once, so no wider type is needed."""
        sums = self._sums[unit.index]
        if not only_once:
            return GradAccumulator(unit.layout, sums)
        if len(self._ship) > 1 and not self._leaves_in_parts(unit):
            return GradAccumulator(unit.layout, self._take_buffer(unit, unit.layout.trainable_numel))
        return GradAccumulator(unit.layout, sums.view(torch.uint8)[: gradient_bytes_of(unit)].view(unit.layout.dtype))

    def ship(self, unit: Part, accumulator: GradAccumulator) -> Any:
        """Send the unit's complete gradient to its home; a `LaneTransfer`, or a `TransferGroup` of its parts."""
        complete = accumulator.complete()
        if self._leaves_in_parts(unit):
            return self._ship_in_parts(unit, complete)
        target, norm = self.rounded(unit, complete)
        return self._send(unit, target, self.home(unit), norm)

    def rounded(self, unit: Part, complete: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(a gradient that does not leave in parts, in its home's type in the buffer whose turn it is; its norm)."""
        target = self._view(unit.layout.dtype, len(complete))
        if complete.data_ptr() != target.data_ptr():
            target = self._take_buffer(unit, len(complete))
            target.copy_(complete)
        return target, self.count(target) if unit.index not in self._ends else _joined(self._counted(target))

    def _leaves_in_parts(self, unit: Part) -> bool:
        return gradient_bytes_of(unit) > len(self._ship[0])

    def _ship_in_parts(self, unit: Part, complete: torch.Tensor) -> TransferGroup:
        home, sent = self.home(unit), []
        norms: list[torch.Tensor] = []
        largest = len(self._ship[0]) // unit.layout.dtype.itemsize // self._part_numel * self._part_numel
        for start in range(0, len(complete), largest):
            part = complete[start : start + largest]
            target = self._take_buffer(unit, len(part))
            target.copy_(part)
            norms += self._counted(target)
            is_last = start + largest >= len(complete)
            sent.append(self._send(unit, target, home[start : start + largest], _joined(norms) if is_last else None))
        return TransferGroup(sent)

    def _send(self, unit: Part, rounded: torch.Tensor, home: torch.Tensor, norm: torch.Tensor | None) -> LaneTransfer:
        if self._norms is not None and norm is not None:  # queued before the copy, so it is there when that has arrived
            self._norms[unit.index].copy_(norm, non_blocking=True)
        transfer = self._lane.submit_host(rounded, home, label=unit.name)
        self._leaving[self._turn] = transfer
        self._turn = (self._turn + 1) % len(self._ship)
        return transfer

    def _counted(self, rounded: torch.Tensor) -> Iterator[torch.Tensor]:
        """Norms of the pieces of an embedding's or head's gradient, counted."""
        for start in range(0, len(rounded), self._part_numel):
            yield self.count(rounded[start : start + self._part_numel])

    def home(self, unit: Part) -> torch.Tensor:
        """Memory in RAM for the unit's gradient; waits for updates until there is room. Raises what went wrong."""
        home = self._arena.try_take(unit)
        while home is None:
            with self._stalls.until(f"room in RAM for the gradient of {unit.name}", "optimizer"):
                self._make_room()
            home = self._arena.try_take(unit)
        return home

    def count(self, rounded: torch.Tensor) -> torch.Tensor:
        """Add these values to the step's global norm; return their own L2 norm (fp32 scalar)."""
        norm = norm_of_values(rounded)
        self._sumsq += norm.double().square().to(self._sumsq.device)
        return norm.float()

    def norm_of(self, unit: Part) -> float | None:
        """L2 norm of a unit's gradient once that has arrived in its home; not finite if anything in it was not. None
        where it was not asked for, or the gradient came down in tiles."""
        if self._norms is None or unit.index not in self._sums:
            return None
        return float(self._norms[unit.index])

    def norm(self) -> torch.Tensor:
        """fp64 scalar on the device: L2 norm of everything shipped in this step; not finite if anything was not."""
        return self._sumsq.sqrt()

    def _view(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        return self._ship[self._turn][: numel * dtype.itemsize].view(dtype)

    def _take_buffer(self, unit: Part, numel: int) -> torch.Tensor:
        """The buffer whose turn it is, once what it held has left."""
        leaving = self._leaving[self._turn]
        if leaving is not None:
            with self._stalls.until(f"room for the gradient of {unit.name}", "pcie"):
                leaving.wait_stream()
            self._leaving[self._turn] = None
        return self._view(unit.layout.dtype, numel)


def norm_of_values(rounded: torch.Tensor) -> torch.Tensor:
    """L2 norm, a scalar beside the values."""
    # On the CPU torch adds up squares one after another: in fp32 the norm of 10^8 values comes out 1 % too small. A GPU
    # adds them up in a tree, where fp32 is exact enough.
    return torch.linalg.vector_norm(rounded, dtype=torch.float32 if rounded.is_cuda else torch.float64)


def _joined(norms: Iterable[torch.Tensor]) -> torch.Tensor:
    """fp32 scalar: the L2 norm of all pieces together."""
    return torch.stack([norm.double() for norm in norms]).square().sum().sqrt().float()


class GradAccumulator:
    """Gradients of the layout's trainable range in `flat` (1-D, fp32 or the parameters' type, at least that long).

    The first gradient of each parameter is copied, later ones are added, in `flat`'s type. A parameter that got none
    counts as zero. `flat` is shared by units one after another: make a new accumulator for each."""

    def __init__(self, layout: SlabLayout, flat: torch.Tensor) -> None:
        self.layout = layout
        self.flat = flat[: layout.trainable_numel]
        self._views = layout.grad_views(self.flat)
        self._empty = [True] * len(self._views)
        for start, end in layout.gaps():
            self.flat[start:end].zero_()

    @torch.no_grad()
    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """`grads`: one per trainable slot; None where the parameter was not used."""
        first: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        later: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for index, (view, grad) in enumerate(zip(self._views, grads, strict=True)):
            if grad is not None:
                views, values = first if self._empty[index] else later
                views.append(view)
                values.append(grad)
                self._empty[index] = False
        if first[0]:
            torch._foreach_copy_(*first)  # pyright: ignore[reportPrivateImportUsage]
        if later[0]:
            torch._foreach_add_(*later)  # pyright: ignore[reportPrivateImportUsage]

    def sums(self) -> list[torch.Tensor]:
        """Views, one per trainable slot, for whoever adds to them himself; those without a gradient so far are zero."""
        if all(self._empty):
            self.flat.zero_()
        else:
            for view, is_empty in zip(self._views, self._empty, strict=True):
                if is_empty:
                    view.zero_()
        self._empty = [False] * len(self._views)
        return self._views

    def complete(self) -> torch.Tensor:
        """The sum [trainable_numel]; parameters without a gradient are zero in it."""
        for view, is_empty in zip(self._views, self._empty, strict=True):
            if is_empty:
                view.zero_()
        return self.flat


class TransferGroup:
    """Several transfers that a caller treats as one `LaneTransfer`. A failure is the first one's."""

    def __init__(self, transfers: Sequence[LaneTransfer]) -> None:
        self._transfers = list(transfers)
        self._left = len(self._transfers)
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Any], object]] = []
        for transfer in self._transfers:
            transfer.add_done_callback(self._one_ended)

    @property
    def error(self) -> BaseException | None:
        errors = [transfer.error for transfer in self._transfers]
        return next((error for error in errors if error is not None), None)

    def done(self) -> bool:
        return self._left == 0

    def wait(self, timeout_s: float | None = None) -> int:
        """Blocks until all are done; the bytes moved."""
        return sum(transfer.wait(timeout_s) for transfer in self._transfers)

    def add_done_callback(self, fn: Callable[[Any], object]) -> None:
        with self._lock:
            if self._left:
                self._callbacks.append(fn)
                return
        fn(self)

    def _one_ended(self, transfer: LaneTransfer) -> None:
        with self._lock:
            self._left -= 1
            callbacks = [] if self._left else self._callbacks
        for fn in callbacks:
            fn(self)

"""The parts that are computed in tiles, as whoever runs a pass sees them.

A pass acquires a part's slab and hands it to the runner, tiled or not: `TiledParts` tells the runner what to bind in
place of a part's parameters; `TiledArrival` stands before the prefetcher, looks after tiled parts and passes everything
else on.

A large weight that is not on the device, in the place of a module's parameter: products with it go tile by tile.

The model's own code calls `F.linear`, `torch.addmm` (Conv1D) or `F.embedding` with it, or picks one expert of a stack;
torch hands such calls over (`__torch_function__`), so that no module is known by name. With W [R, C] cut into blocks
of rows there are two products: x W^T gives a block of the result's columns per tile (rounded as untiled), x W sums over
the tiles, in fp32, rounded once at the end. Each is the backward of the other, and the tile of the weight's gradient is
a product of its block of one side with all of the other, as untiled. Anything else that is done with it is refused.
Cost: each product brings the weight up once; backward brings it up again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from outcore.common.deadline import Deadline
from outcore.flow.parts import Part, StreamUnsupported
from outcore.flow.tiles.chunks import RowSink, TileSink, TokenChunks
from outcore.flow.tiles.matrix import TiledMatrix, TiledPart, TilePlan
from outcore.flow.tiles.ring import TileRing
from outcore.flow.weights import SlabRanges, WeightArrival, WeightSource
from outcore.staging import UploadLane

SUM_DTYPE = torch.float32


class TileWork:
    """Resources of tiled products: tiles coming up, gradients going down. `gradients` None: nothing is trained."""

    def __init__(self, ring: TileRing, source: WeightSource, lane: UploadLane, gradients: TileSink | None) -> None:
        self.ring, self.source, self.lane, self.gradients = ring, source, lane, gradients


class _NotInTiles(StreamUnsupported, AttributeError):
    """An AttributeError as well: code that only asks whether a weight has something gets its answer."""


class StreamedWeight:
    """Stands for a parameter of shape [R, C], or [E, R, C], of which `matrices` are the rows' homes."""

    def __init__(self, work: TileWork, shape: Sequence[int], matrices: Sequence[TiledMatrix]) -> None:
        self.work, self.matrices = work, list(matrices)
        self.shape = torch.Size(shape)
        self.dtype = matrices[0].unit.layout.dtype
        self.device = work.ring.device
        self.name = matrices[0].slot.name
        self.requires_grad = matrices[0].slot.trainable
        packed = matrices[0].packed
        self.is_transposed = packed is not None and packed.is_transposed
        """Whether the matrices at home are this weight's the other way round (gpt-oss, packed)."""
        self.anchor: torch.Tensor | None = None
        """Place where an embedding's result gets its place in autograd's graph from; None outside backward."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(name)
        raise _NotInTiles(
            f"{self.name} does not fit on the device, and its model's code takes its {name!r}, which is not there in "
            "tiles"
        )

    @property
    def matrix(self) -> TiledMatrix:
        if self.ndim != 2:
            raise StreamUnsupported(f"{self.name} {tuple(self.shape)} is used whole, and does not fit on the device")
        return self.matrices[0]

    def __getitem__(self, index: Any) -> StreamedWeight:
        """One expert of a stack."""
        if self.ndim != 3 or isinstance(index, (slice, tuple)) or (isinstance(index, torch.Tensor) and index.ndim):
            raise StreamUnsupported(
                f"{self.name} {tuple(self.shape)} does not fit on the device, and its model's code takes other parts "
                "of it than one expert after another"
            )
        return StreamedWeight(self.work, self.shape[1:], [self.matrices[int(index)]])

    def __len__(self) -> int:
        return self.shape[0]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None:
            name = next(
                (a.name for a in (*args, *(kwargs or {}).values()) if isinstance(a, StreamedWeight)), "a weight"
            )
            raise StreamUnsupported(
                f"{name} does not fit on the device, and its model's code calls {getattr(func, '__name__', func)} with "
                "it, which is not done in tiles"
            )
        return handler(*args, **(kwargs or {}))


class _Expand(torch.autograd.Function):
    """x [n, C] -> x W^T + b [n, R], of the matrix as it is at home."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, weight: StreamedWeight) -> torch.Tensor:
        matrix, work = weight.matrix, weight.work
        ctx.weight, ctx.has_bias = weight, bias is not None
        ctx.save_for_backward(x)
        if weight.requires_grad and any(ctx.needs_input_grad) and work.gradients is not None:
            work.gradients.expect(matrix)
        output = x.new_empty((len(x), matrix.num_rows))
        for number, tile in work.ring.tiles(matrix, "expand"):
            first, last = matrix.rows(number)
            output[:, first:last] = F.linear(x, tile, None if bias is None else bias[first:last])
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (grad,), (x,) = grads, ctx.saved_tensors
        grad_x = _sum_over_tiles(ctx.weight, grad, each=lambda number: _send_grad(ctx.weight, number, grad, x))
        return grad_x, grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[1] else None, None


class _Reduce(torch.autograd.Function):
    """x [n, R] -> x W + b [n, C], of the matrix as it is at home."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, weight: StreamedWeight) -> torch.Tensor:
        ctx.weight, ctx.has_bias = weight, bias is not None
        ctx.save_for_backward(x)
        if weight.requires_grad and any(ctx.needs_input_grad) and weight.work.gradients is not None:
            weight.work.gradients.expect(weight.matrix)
        return _sum_over_tiles(weight, x, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (grad,), (x,) = grads, ctx.saved_tensors
        weight: StreamedWeight = ctx.weight
        matrix = weight.matrix
        grad_x = x.new_empty(x.shape)
        for number, tile in weight.work.ring.tiles(matrix, "expand"):
            first, last = matrix.rows(number)
            grad_x[:, first:last] = grad @ tile.t()
            _send_grad(weight, number, x, grad)
        return grad_x, grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[1] else None, None


def _sum_over_tiles(
    weight: StreamedWeight,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    each: Callable[[int], None] = lambda number: None,
) -> torch.Tensor:
    """x [n, R] -> x W (+ b) [n, C]; with one tile exactly as untiled. `each` is called for every tile."""
    matrix = weight.matrix
    total: torch.Tensor | None = None
    for number, tile in weight.work.ring.tiles(matrix, "reduce"):
        first, last = matrix.rows(number)
        if matrix.num_tiles == 1:
            total = x @ tile if bias is None else torch.addmm(bias, x, tile)
        else:
            part = x[:, first:last] @ tile
            total = part.to(SUM_DTYPE) if total is None else total.add_(part)
        each(number)
    assert total is not None
    return (total if bias is None or matrix.num_tiles == 1 else total.add_(bias)).to(x.dtype)


def _send_grad(weight: StreamedWeight, number: int, by_rows: torch.Tensor, by_cols: torch.Tensor) -> None:
    """A tile of the weight's gradient by_rows[n, R]^T by_cols[n, C]."""
    gradients, matrix = weight.work.gradients, weight.matrix
    if gradients is not None and weight.requires_grad:
        first, last = matrix.rows(number)
        gradients.add(matrix, number, by_rows[:, first:last].t() @ by_cols)


class _Rows(torch.autograd.Function):
    """Rows of an embedding; their gradient goes to `sums`."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor | None,
        rows: torch.Tensor,
        places: torch.Tensor,
        ids: torch.Tensor,
        padding: int,
        sums: RowSink | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.num_rows, ctx.ids, ctx.padding, ctx.sums = len(rows), ids, padding, sums
        return F.embedding(places, rows)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (places,) = grads, ctx.saved_tensors
        if ctx.sums is not None:
            dense = torch.ops.aten.embedding_dense_backward(grad, places, ctx.num_rows, ctx.padding, False)
            ctx.sums.add(ctx.ids, dense)
        return (grad.new_zeros(()), None, None, None, None, None)


def _linear(x: torch.Tensor, weight: StreamedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    function: Any = _Reduce if weight.is_transposed else _Expand
    flat = function.apply(x.reshape(-1, x.shape[-1]), bias, weight)
    return flat.view(*x.shape[:-1], weight.shape[0])  # named: an expert may get no token at all


def _matmul(x: torch.Tensor, weight: StreamedWeight) -> torch.Tensor:
    function: Any = _Expand if weight.is_transposed else _Reduce
    flat = function.apply(x.reshape(-1, x.shape[-1]), None, weight)
    return flat.view(*x.shape[:-1], weight.shape[1])


def _addmm(bias: torch.Tensor, x: torch.Tensor, weight: StreamedWeight) -> torch.Tensor:
    if bias.ndim != 1:
        raise StreamUnsupported(f"{weight.name} is used in a sum with a matrix, which is not done in tiles")
    function: Any = _Expand if weight.is_transposed else _Reduce
    return function.apply(x, bias, weight)


def _embedding(
    ids: torch.Tensor,
    weight: StreamedWeight,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    if max_norm is not None or scale_grad_by_freq:
        raise StreamUnsupported(f"{weight.name} is an embedding with max_norm or scale_grad_by_freq")
    matrix, work = weight.matrix, weight.work
    unique, places = torch.unique(ids, return_inverse=True)
    wanted = unique.cpu()  # waits for the ids, the first thing of a pass
    home = work.source.ram(matrix.unit)[matrix.start : matrix.start + matrix.num_rows * matrix.num_cols]
    found = home.view(matrix.num_rows, matrix.num_cols)[wanted]
    rows = torch.empty(found.shape, dtype=found.dtype, device=weight.device)
    work.lane.submit_host(found, rows).wait_stream()
    sums, padding = None, -1
    if work.gradients is not None and weight.requires_grad:
        sums = work.gradients.row_sums(matrix)
        sums.note(wanted)
        if padding_idx is not None:  # gets no gradient
            at = (wanted == padding_idx % matrix.num_rows).nonzero()
            padding = int(at) if len(at) else -1
    return _Rows.apply(weight.anchor, rows, places, wanted, padding, sums)  # pyright: ignore[reportReturnType]


_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.mm: _matmul,
    F.embedding: _embedding,
}


class TiledParts:
    """Tensors in place of the parameters of each tiled part."""

    def __init__(self, tiled: Sequence[TiledPart], work: TileWork, chunk_bytes: int | None = None) -> None:
        self.work = work
        self.chunks = TokenChunks(chunk_bytes, work.gradients)
        self._tiled = {unit.unit.index: unit for unit in tiled}
        self._weights: dict[str, StreamedWeight] = {}
        for unit in tiled:
            for slot in unit.unit.layout.slots:
                if slot.name in unit.matrices:
                    self._weights[slot.name] = StreamedWeight(work, slot.shape, unit.matrices[slot.name])

    def __contains__(self, unit: Part) -> bool:
        return unit.index in self._tiled

    def __getitem__(self, unit: Part) -> TiledPart:
        return self._tiled[unit.index]

    def tensors(self, unit: Part, slab: torch.Tensor) -> list[Any]:
        """Tensor in place of each parameter, in slot order: a view of the resident slab, or a `StreamedWeight`."""
        return self._bind(unit, self[unit].resident.views(slab), None)

    def leaves(self, unit: Part, slab: torch.Tensor) -> tuple[list[Any], list[torch.Tensor]]:
        """(stand-ins for all parameters in a backward pass, those that autograd differentiates)."""
        resident = self[unit].resident
        views = [
            view.detach().requires_grad_(slot.trainable)
            for slot, view in zip(resident.slots, resident.views(slab), strict=True)
        ]
        anchor = torch.zeros((), device=self.work.ring.device, requires_grad=True)
        return self._bind(unit, views, anchor), [view for view in views if view.requires_grad]

    def _bind(self, unit: Part, views: Sequence[torch.Tensor], anchor: torch.Tensor | None) -> list[Any]:
        by_name: dict[str, Any] = dict(zip((slot.name for slot in self[unit].resident.slots), views, strict=True))
        for name in self[unit].matrices:
            by_name[name] = self._weights[name]
            self._weights[name].anchor = anchor
        return [by_name[slot.name] for slot in unit.layout.slots]

    def anchors(self, unit: Part) -> list[torch.Tensor]:
        """Further tensors that autograd must be asked about, so that gradients of an embedding's rows are computed."""
        found = [self._weights[name].anchor for name in self[unit].matrices]
        return [anchor for anchor in found[:1] if anchor is not None]

    def begin_forward(self, unit: Part) -> None:
        """The runner starts on a unit, with one micro-batch."""
        self.work.ring.restart("forward")
        if self.work.gradients is not None:
            self.work.gradients.begin_forward(unit)

    def begin_backward(self, unit: Part) -> None:
        """The runner starts on a unit's recomputation and backward, with one micro-batch."""
        self.work.ring.restart("backward")
        if self.work.gradients is not None:
            self.work.gradients.begin_backward(unit)


class TiledArrival:
    """The `WeightArrival` of a model with tiled parts: their use brings up the resident slab."""

    def __init__(self, inner: WeightArrival, tiled: Sequence[TiledPart], ranges: SlabRanges, ring: TileRing) -> None:
        self._inner, self._ranges, self._ring = inner, ranges, ring
        self.stalls = inner.stalls
        self._tiled = {unit.unit.index: unit for unit in tiled}
        numel = max((unit.resident.numel for unit in tiled), default=0)
        self._resident = torch.zeros(numel, dtype=tiled[0].unit.layout.dtype, device=ranges.lane.device)
        self._places: list[tuple[Part, int | None]] = []
        """Unit of each use, and the use's place among the uses of units that come in whole."""

    @property
    def device_bytes(self) -> int:
        return self._inner.device_bytes + self._ring.device_bytes + self._resident.nbytes

    def begin(self, sequence: Sequence[Part]) -> None:
        whole = [unit for unit in sequence if unit.index not in self._tiled]
        self._places, at = [], 0
        for unit in sequence:
            self._places.append((unit, None if unit.index in self._tiled else at))
            at += unit.index not in self._tiled
        self._inner.begin(whole)

    def acquire(self, at: int) -> torch.Tensor:
        unit, place = self._places[at]
        if place is not None:
            return self._inner.acquire(place)
        tiled = self._tiled[unit.index]
        with self.stalls.until(f"small weights of {unit.name}", "pcie"):
            self._ranges.source.wait_current(unit)
            self._ring.open(unit)
            uploads = [
                self._ranges.submit(unit, home.offset, home.end, self._resident[own.offset : own.end])
                for home, own in tiled.resident_homes
            ]
            for upload in uploads:
                upload.wait_stream()
        return self._resident[: tiled.resident.numel]

    def release(self, at: int) -> None:
        _, place = self._places[at]
        if place is None:
            self._ring.drop()
        else:
            self._inner.release(place)

    def abort(self, deadline: Deadline | None = None) -> None:
        deadline = deadline if self._ring.give_up(deadline) else Deadline(0.0)
        self._inner.abort(deadline)


@dataclass(frozen=True)
class Tiles:
    """Parts in tiles, and how their weights arrive together with those of the other parts."""

    parts: TiledParts
    arrival: TiledArrival


def open_tiles(
    plan: TilePlan,
    source: WeightSource,
    upload: UploadLane,
    drive_lane: UploadLane | None,
    inner: WeightArrival,
    gradients: TileSink | None = None,
) -> Tiles:
    """Buffers for a plan with tiled parts. `inner`: brings the other parts; `gradients`: takes those of tiles, None:
    nothing is trained; `drive_lane`: for tiled parts' parameters on NVMe, nobody else's; None when all are in RAM."""
    ranges = SlabRanges(source, upload, drive_lane)
    ring = TileRing(ranges, [matrix for unit in plan.tiled for matrix in unit.all_matrices], stalls=inner.stalls)
    parts = TiledParts(plan.tiled, TileWork(ring, source, upload, gradients), plan.chunk_bytes)
    return Tiles(parts, TiledArrival(inner, plan.tiled, ranges, ring))

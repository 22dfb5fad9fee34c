"""CUDA graphs of layers: the twenty to forty launches of a compiled layer, the hundreds of an eager one become one.

A layer of a 1 B model on a fast GPU takes a millisecond, about as long as the host needs to launch its kernels while it
also feeds lanes and optimizer, so the GPU waits for the host. A function whose arguments have come in the same shapes a
few times is timed in a rehearsal; from then on a graph is captured at the first call with each weight buffer, and
replayed. Inputs are copied into the graphs' own tensors first. Graphs hold the memory of one layer's intermediate
results for good, in a pool that all of them share (they never run at the same time). Ordinary calls of these shapes
come before the first capture only, and what they needed goes back then, so the device does not hold it twice. Calls
that take the device longer than `GRAPH_LONG_S` gain nothing, unless the host takes half as long to launch them, so they
stay as they are, at no memory, and so does all when the device is rather full. Measured side by side with eager layers
(H200, 1.2 B parameters, 16,384 tokens a step): 0.803 s a step
without, 0.497 s with graphs, which take 0.698 GB of the device. By their sizes: inputs and results, nine tensors of a
micro-batch's hidden states, 0.151; cuBLAS's workspaces of the two threads that launch, 0.067; and intermediate results,
0.479, which the head cannot use for its logits.

Results are those of the captured kernels: the same bits as without graphs. When a capture fails, layers run without
graphs and the reason is said once."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from outcore.common.errors import line_of
from outcore.flow.tiles import free_device_bytes
from outcore.flow.trace import Moment, elapsed_s, moment, wait_for
from outcore.sizing.streaming import GRAPH_FREE_SHARE, is_worth_a_graph

logger = logging.getLogger(__name__)

CALLS_BEFORE, REHEARSALS = 4, 2
"""Calls of the same function and shapes before the first capture, and how many of them, the last ones, are rehearsals
(the first may compile): shapes that come once or twice are not captured."""
MAX_GRAPHS = 32
"""Three weight buffers, forward and backward, are six per shape; long-tailed shapes beyond run without. The shape that
a function had first has no limit: where layers stay on the device, each of them is a buffer of its own."""

Function = Callable[..., torch.Tensor]
"""(weights, hidden, args, kwargs[, grad, sums]) -> tensor; adds to the tensors in `sums`, which stay where they are."""


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    output: torch.Tensor


@dataclass
class _Shapes:
    """Graph of one function for arguments of one shape, and whether it pays."""

    calls: int = 0
    static: list[torch.Tensor] = field(default_factory=list)
    """Inputs of all its graphs."""
    begin: Moment | None = None
    end: Moment | None = None
    """Moment of the last rehearsal."""
    launch_s: float = 0.0
    """Seconds of the host in it."""
    is_worth_it: bool | None = None
    """Whether the graph pays; None: not decided yet."""


@dataclass(frozen=True)
class _Call:
    """One call, taken apart."""

    function: Function
    weights: list[torch.Tensor]
    inputs: list[torch.Tensor]
    """hidden, the gradient if there is one, then every tensor in args and kwargs."""
    leaves: list[Any]
    spec: TreeSpec
    sums: list[torch.Tensor] | None

    def on(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """Make the same call with `tensors` in place of `inputs`."""
        num_tensors = sum(isinstance(leaf, torch.Tensor) for leaf in self.leaves)
        rest = iter(tensors[len(tensors) - num_tensors :])
        args, kwargs = tree_unflatten(
            [next(rest) if isinstance(t, torch.Tensor) else t for t in self.leaves], self.spec
        )
        more = [] if self.sums is None else [tensors[1], self.sums]
        return self.function(self.weights, tensors[0], args, kwargs, *more)


class GraphPool:
    """Memory and stream of one device's graphs that never run at the same time. `gives_back`: freed memory that torch
    keeps goes back before each capture, because the device does not hold it twice; later calls ask for it anew."""

    def __init__(self, device: torch.device, *, gives_back: bool = True) -> None:
        self._device, self._gives_back = device, gives_back
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def capture(self) -> Iterator[torch.cuda.CUDAGraph]:
        """Have a graph of what the block queues, which does not run. Waits for the device."""
        if self._stream is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), _capture_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        own = torch.cuda.current_stream(self._device)
        torch.cuda.synchronize(self._device)
        torch.cuda.current_blas_handle()  # each thread has its own, and none can be made within a capture
        if self._gives_back:
            torch.cuda.empty_cache()
        try:
            with torch.cuda.stream(self._stream):
                # Other threads wait for copies meanwhile, which a capture of the whole process would forbid.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    yield graph
                finally:
                    graph.capture_end()
        finally:  # torch stays in the capture's stream where a capture cannot be ended
            torch.cuda.set_stream(own)


@functools.lru_cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for each device: torch's own is one for the process, of the device that captured first, so work of another
    would run at once beside it and the graph be empty. No more, because cuBLAS keeps 32 MiB for each for good.

    Of a priority that nothing else has: torch hands out 32 streams of each in turn, and a copy must never be queued on
    the stream of a capture."""
    return torch.cuda.Stream(device, priority=-2)


class LayerGraphs:
    """Runs functions through graphs where it can. Use from one thread, under no_grad."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.why_not = ""
        """Why nothing is captured any more."""
        self._graphs: dict[Hashable, _Graph] = {}
        self._shapes: dict[Hashable, _Shapes] = {}
        self._first: dict[Hashable, Hashable] = {}
        """The shapes that each function had first."""
        self._pool = GraphPool(device)

    @property
    def num_graphs(self) -> int:
        return len(self._graphs)

    def run(
        self,
        name: Hashable,
        function: Function,
        weights: list[torch.Tensor],
        hidden: torch.Tensor,
        args: tuple,
        kwargs: dict,
        grad: torch.Tensor | None = None,
        sums: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """`function(weights, hidden, args, kwargs)`, or with `grad` and `sums` behind; the result is the caller's."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        inputs = [hidden, *tensors] if grad is None else [hidden, grad, *tensors]
        call = _Call(function, weights, inputs, leaves, spec, None if grad is None else sums or [])
        others = tuple(leaf for leaf in leaves if not isinstance(leaf, torch.Tensor))
        shapes = (name, spec, others, tuple((t.shape, t.stride(), t.dtype) for t in inputs))
        key = (shapes, weights[0].data_ptr(), (sums[0].data_ptr(), sums[0].dtype) if sums else 0)
        try:
            graph = self._graphs.get(key)
        except TypeError:  # an argument that cannot be compared
            return call.on(inputs)
        if graph is not None:
            return self._replay(graph, inputs)
        if self.why_not or any(t.device != hidden.device for t in inputs):  # a graph would keep the CPU's values
            return call.on(inputs)
        known, first = self._shapes.setdefault(shapes, _Shapes()), self._first.setdefault(name, shapes)
        if known.is_worth_it is False or (len(self._graphs) >= MAX_GRAPHS and shapes != first):
            return call.on(inputs)
        known.calls += 1
        if known.calls <= CALLS_BEFORE - REHEARSALS:
            return call.on(inputs)
        if known.calls <= CALLS_BEFORE:
            return self._rehearse(known, call)
        if known.is_worth_it is None:
            assert known.begin is not None and known.end is not None
            wait_for(known.end, "the layers before its first CUDA graph")
            device_s = elapsed_s(known.begin, known.end)
            known.is_worth_it = is_worth_a_graph(device_s, known.launch_s)
        if not known.is_worth_it:
            known.static = []
            return call.on(inputs)
        try:
            graph = self._graphs[key] = self._capture(call, known.static)
        except (RuntimeError, torch.OutOfMemoryError) as error:  # nothing has run: the call can still be made
            self.give_up(line_of(error))
            return call.on(inputs)
        return self._replay(graph, inputs)

    def _replay(self, graph: _Graph, inputs: list[torch.Tensor]) -> torch.Tensor:
        torch._foreach_copy_(graph.inputs, inputs)  # pyright: ignore[reportPrivateImportUsage]
        graph.graph.replay()
        return graph.output.clone()

    def _rehearse(self, known: _Shapes, call: _Call) -> torch.Tensor:
        """The call, on the tensors that graphs will read, so that whatever has to be compiled for them is; timed."""
        if not self._has_room():
            known.is_worth_it = False
            return call.on(call.inputs)
        known.static = known.static or [empty_like(t) for t in call.inputs]
        torch._foreach_copy_(known.static, call.inputs)  # pyright: ignore[reportPrivateImportUsage]
        # Behind a full queue the host would wait for the device, and that count as launching.
        wait_for(moment(self.device), "the layers before a rehearsal")
        known.begin, begin_s = moment(self.device), time.perf_counter()
        output = call.on(known.static)
        known.end, known.launch_s = moment(self.device), time.perf_counter() - begin_s
        return output

    def _capture(self, call: _Call, static: list[torch.Tensor]) -> _Graph:
        with self._pool.capture() as graph:
            output = call.on(static)
        return _Graph(graph, static, output)

    def _has_room(self) -> bool:
        free = free_device_bytes(self.device)
        return free is None or free >= GRAPH_FREE_SHARE * (free + torch.cuda.memory_allocated(self.device))

    def give_up(self, reason: str) -> None:
        """Capture nothing any more; what was captured is let go."""
        self.why_not = reason
        self._graphs.clear()
        self._shapes.clear()
        self._first.clear()
        logger.warning("layers run without CUDA graphs: %s", reason)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """Make a tensor with the same strides (dense where it was expanded, to be written to), values undefined."""
    if 0 in tensor.stride():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

"""CUDA graphs of compiled layers: a layer's twenty to forty launches become one.

A layer of a 1 B model on a fast GPU takes a millisecond, about as long as the host needs to launch its kernels while it
also feeds lanes and optimizer, so the GPU waits for the host. A graph is captured once per (function, weight buffer,
shapes), after a few ordinary calls, and replayed from then on; inputs are copied into the graph's own tensors first. It
holds the memory of one layer's intermediate results for good, in a pool that all graphs share (they never run at the
same time). Calls that take the device longer than `LONG_S` gain nothing, so they stay as they are, at no memory, and so
does everything when the device is rather full. Seen on one H200 (1.2 B parameters, 16,384 tokens a step, no clipping):
0.46 s a step without, 0.39 s with graphs, in two runs.

Results are those of the captured kernels: the same bits as without graphs. When a capture fails, layers run without
graphs and the reason is said once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from outcore.engine.stream.tiles_plan import free_device_bytes

logger = logging.getLogger(__name__)

CALLS_BEFORE = 4
"""Ordinary calls of the same kind before a capture: compilation and tuning are over, and shapes that come once or twice
are not captured."""
LONG_S = 5e-3
"""A call that keeps the device busy this long hides its launches many times over."""
FREE_SHARE = 0.4
"""Of the device's memory (under the allocator's cap) must be free for a capture: graphs keep theirs for good, 1.1 GiB
for layers of 44 M parameters and 4,096 tokens (M), and a step must never fail for want of it."""
MAX_GRAPHS = 32
"""Three weight buffers, forward and backward, are six per shape; long-tailed shapes beyond run without."""

Function = Callable[..., torch.Tensor]
"""(weights, hidden, args, kwargs[, grad, sums]) -> tensor; adds to the tensors in `sums`, which stay where they are."""


@dataclass
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]
    output: torch.Tensor


class LayerGraphs:
    """Runs functions through graphs where it can. Use from one thread, under no_grad."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.why_not = ""
        """Why nothing is captured any more."""
        self._graphs: dict[Hashable, _Graph | None] = {}
        """None: not worth it, or no room."""
        self._calls: dict[Hashable, int] = {}
        self._static: dict[Hashable, list[torch.Tensor]] = {}
        self._pool: Any = None

    @property
    def num_graphs(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

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
        more: list[Any] = [] if grad is None else [grad, sums or []]
        leaves, spec = tree_flatten((args, kwargs))
        inputs = [
            hidden,
            *([] if grad is None else [grad]),
            *(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)),
        ]
        others = tuple(leaf for leaf in leaves if not isinstance(leaf, torch.Tensor))
        shapes = (name, spec, others, tuple((t.shape, t.stride(), t.dtype) for t in inputs))
        key = (shapes, weights[0].data_ptr(), sums[0].data_ptr() if sums else 0)
        try:
            found = self._graphs.get(key, False)
        except TypeError:  # an argument that cannot be compared
            return function(weights, hidden, args, kwargs, *more)
        if isinstance(found, _Graph):
            return self._replay(found, inputs)
        if found is None or self.why_not or any(t.device != hidden.device for t in inputs):  # a graph would keep values
            return function(weights, hidden, args, kwargs, *more)
        self._calls[key] = self._calls.get(key, 0) + 1
        if self._calls[key] <= CALLS_BEFORE or len(self._graphs) >= MAX_GRAPHS:
            return function(weights, hidden, args, kwargs, *more)
        graph = self._graphs[key] = self._captured(shapes, function, weights, inputs, leaves, spec, sums)
        return function(weights, hidden, args, kwargs, *more) if graph is None else self._replay(graph, inputs)

    def _replay(self, graph: _Graph, inputs: list[torch.Tensor]) -> torch.Tensor:
        torch._foreach_copy_(graph.inputs, inputs)  # pyright: ignore[reportPrivateImportUsage]
        graph.graph.replay()
        return graph.output.clone()

    def _captured(
        self,
        shapes: Hashable,
        function: Function,
        weights: list[torch.Tensor],
        inputs: list[torch.Tensor],
        leaves: list[Any],
        spec: TreeSpec,
        sums: list[torch.Tensor] | None,
    ) -> _Graph | None:
        if not self._has_room():  # not even for the trial
            return None
        static = self._static.get(shapes) or [empty_like(t) for t in inputs]
        call = call_on(function, weights, static, leaves, spec)
        try:
            torch._foreach_copy_(static, inputs)  # pyright: ignore[reportPrivateImportUsage]
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            unused = None if sums is None else [empty_like(t) for t in sums]  # the trial's gradients count for nothing
            call(unused)  # whatever is still to be compiled for these tensors
            begin.record()
            call(unused)
            end.record()
            end.synchronize()
            del unused
            if begin.elapsed_time(end) > LONG_S * 1e3:
                return None
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            # Other threads wait for copies meanwhile, which a capture of the whole process would forbid.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                output = call(sums)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            self.give_up(f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")
            return None
        self._static[shapes] = static
        return _Graph(graph, static, output)

    def _has_room(self) -> bool:
        free = free_device_bytes(self.device)
        return free is None or free >= FREE_SHARE * (free + torch.cuda.memory_allocated(self.device))

    def give_up(self, reason: str) -> None:
        """Capture nothing any more; what was captured is let go."""
        self.why_not = reason
        self._graphs.clear()
        self._static.clear()
        logger.warning("layers run without CUDA graphs: %s", reason)


def empty_like(tensor: torch.Tensor) -> torch.Tensor:
    """With the same strides (dense where it was expanded, so that it can be written to), values undefined."""
    if 0 in tensor.stride():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def call_on(
    function: Function, weights: list[torch.Tensor], static: list[torch.Tensor], leaves: list[Any], spec: TreeSpec
) -> Callable[[list[torch.Tensor] | None], torch.Tensor]:
    """The function on a graph's own inputs, given the sums it adds to (None: a forward)."""
    num_tensors = sum(isinstance(leaf, torch.Tensor) for leaf in leaves)
    tensors = iter(static[len(static) - num_tensors :])
    args, kwargs = tree_unflatten([next(tensors) if isinstance(t, torch.Tensor) else t for t in leaves], spec)

    def call(sums: list[torch.Tensor] | None) -> torch.Tensor:
        return function(weights, static[0], args, kwargs, *([] if sums is None else [static[1], sums]))

    return call

"""Tensor parallel groups laid inside islands, pipeline stages across them, and layers shared out among stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from outcore.machine.topology.islands import PlacedGpu, Topology


@dataclass(frozen=True)
class ParallelLayout:
    """Who computes what: one group of tensor parallel GPUs for each pipeline stage."""

    stages: tuple[tuple[PlacedGpu, ...], ...]

    @property
    def tensor_parallel(self) -> int:
        return len(self.stages[0])

    @property
    def pipeline_parallel(self) -> int:
        return len(self.stages)

    @property
    def gpus(self) -> tuple[PlacedGpu, ...]:
        """In the order of ranks: stage by stage."""
        return tuple(gpu for stage in self.stages for gpu in stage)

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(gpu.host for gpu in self.gpus))


def lay_out(topology: Topology, tensor_parallel: int, pipeline_parallel: int) -> ParallelLayout:
    """Stages on the fewest islands, in order. ValueError with the reason and the way out where a tensor parallel group
    would cross islands or GPUs are too few."""
    for name, count in (("tensor_parallel", tensor_parallel), ("pipeline_parallel", pipeline_parallel)):
        if count < 1:
            raise ValueError(f"{name} is {count}, but must be at least 1.")
    total, wanted = len(topology.gpus), tensor_parallel * pipeline_parallel
    if wanted > total:
        raise ValueError(
            f"tensor_parallel {tensor_parallel} x pipeline_parallel {pipeline_parallel} needs {wanted} GPUs, and there "
            f"are {total} (by {topology.source})."
        )
    groups = [
        island[start : start + tensor_parallel]
        for island in sorted(topology.islands, key=len, reverse=True)
        for start in range(0, len(island) - tensor_parallel + 1, tensor_parallel)
    ]
    if len(groups) < pipeline_parallel:
        raise ValueError(_why_not(topology, tensor_parallel, pipeline_parallel, len(groups)))
    order = {gpu: number for number, gpu in enumerate(topology.gpus)}
    return ParallelLayout(tuple(sorted(groups[:pipeline_parallel], key=lambda group: order[group[0]])))


def _why_not(topology: Topology, tensor_parallel: int, pipeline_parallel: int, num_groups: int) -> str:
    sizes = ", ".join(str(len(island)) for island in topology.islands)
    largest = max(topology.islands, key=len)
    if tensor_parallel > len(largest):
        other = next(gpu for gpu in topology.gpus if gpu not in largest)
        link = topology.between(largest[0], other)
        crossing = (
            f"a group of {tensor_parallel} would cross from the island of {largest[0].words} into that of "
            f"{other.words} ({link}), where each layer's two sums would wait for the slower link"
        )
    else:
        crossing = f"only {num_groups} of {pipeline_parallel} groups of {tensor_parallel} fit inside islands"
    wanted = tensor_parallel * pipeline_parallel
    fit = [
        (t, wanted // t)
        for t in range(min(len(largest), wanted), 0, -1)
        if wanted % t == 0 and sum(len(island) // t for island in topology.islands) >= wanted // t
    ]
    tensor, pipeline = fit[0]  # 1 x wanted always fits: there are enough GPUs
    return (
        f"tensor_parallel {tensor_parallel} x pipeline_parallel {pipeline_parallel}: islands have {sizes} GPUs, and "
        f"{crossing}. Take tensor_parallel {tensor} and pipeline_parallel {pipeline}; where the islands are really "
        "one, say so in a cluster file."
    )


def balanced_stages(costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers of each stage so that the dearest stage is as cheap as can be. `costs`: bytes or measured seconds of each
    layer; `first`, `last`: what the embedding and the head add to their stages. ValueError for too few layers."""
    num = len(costs)
    if not 1 <= num_stages <= num:
        raise ValueError(f"{num} layers cannot be shared out among {num_stages} stages: each needs one at least.")
    sums = [0.0, *accumulate(costs)]

    def cost(start: int, stop: int) -> float:
        return sums[stop] - sums[start] + first * (start == 0) + last * (stop == num)

    # best[stop]: (dearest stage, where the last one begins) of the first `stop` layers, for each number of stages.
    best = [[(cost(0, stop), 0) for stop in range(num + 1)]]
    for stage in range(1, num_stages):
        before = best[-1]
        best.append(
            [
                min(((max(before[s][0], cost(s, stop)), s) for s in range(stage, stop)), default=(float("inf"), 0))
                for stop in range(num + 1)
            ]
        )
    cuts, stop = [], num
    for stage in reversed(best):
        start = stage[stop][1]
        cuts.append(stop - start)
        stop = start
    return tuple(reversed(cuts))

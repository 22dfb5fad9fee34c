"""The vertical schedule: each unit runs all micro-batches before the next one, so weights cross the link twice a step.

Forward is flow's; of each layer only its input is kept (activation checkpoint). The head
gives loss and gradient chunk by chunk; backward goes down the layers, each recomputed from its checkpoint, gradients of
all micro-batches added up on the device and sent down as soon as a unit's are complete (tied weights: once, after the
embedding's backward). Weights arrive ahead of their use (`prefetch`), checkpoints wait where `activations` puts them,
what happens to gradients is the caller's (`on_gradient`). Bytes over the link per step: twice the 16-bit parameters up,
the gradients down, independent of the number of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from outcore.common.deadline import after
from outcore.engine.stream.activations.memory import Activations
from outcore.engine.stream.backward.head import StreamedHeadGradient
from outcore.engine.stream.backward.layer import BackwardRunner
from outcore.engine.stream.gradients.download import GradAccumulator, GradientShipping
from outcore.engine.stream.state import PartRandom, generators_kept
from outcore.flow import Flow, Passage, PassWatch
from outcore.flow.layers import Batch, HeadInput
from outcore.flow.parts import Part
from outcore.flow.trace import PhaseClock
from outcore.staging import LaneTransfer

OnGradient = Callable[[Part, LaneTransfer], None]


@dataclass
class _MicroBatch(Passage):
    """State that one micro-batch carries through a step."""

    routers: list[torch.Tensor] = field(default_factory=list)
    router_counts: list[int] = field(default_factory=list)
    grad: torch.Tensor | None = None
    grad_routers: list[torch.Tensor] = field(default_factory=list)

    def take_grad(self) -> torch.Tensor:
        grad, self.grad = self.grad, None
        assert grad is not None
        return grad

    def take_router_grads(self) -> list[torch.Tensor]:
        """Take the router gradients of the topmost layer whose backward has not run yet."""
        count = self.router_counts.pop() if self.router_counts else 0
        cut = len(self.grad_routers) - count
        taken, self.grad_routers = self.grad_routers[cut:], self.grad_routers[:cut]
        return taken


@dataclass(frozen=True)
class PassSums:
    """Sums over a pass's micro-batches, fp64 scalars on the device."""

    ce_sum: torch.Tensor
    aux_sum: torch.Tensor
    """Auxiliary loss times the tokens that it counts by."""
    n_tokens: torch.Tensor

    @classmethod
    def zero(cls, device: torch.device) -> PassSums:
        return cls(*(torch.zeros((), dtype=torch.float64, device=device) for _ in range(3)))

    def plus(self, ce_sum: torch.Tensor, n_tokens: torch.Tensor, aux_sum: torch.Tensor | float = 0.0) -> PassSums:
        """Make the schedule with one micro-batch more."""
        return PassSums(self.ce_sum + ce_sum, self.aux_sum + aux_sum, self.n_tokens + n_tokens)


class _Keeping(PassWatch):
    """Watches the forward of a step: seeds dropout by place, and keeps what backward needs."""

    def __init__(self, micro: list[_MicroBatch], random: PartRandom, schedule: VerticalSchedule) -> None:
        super().__init__()
        self._micro, self._random, self._schedule = micro, random, schedule
        self._sizes_bytes: list[int] = []

    def before(self, part: Part, number: int) -> None:
        self._random.at(number, part.index)

    def embedded(self, number: int, hidden: torch.Tensor) -> None:
        self._sizes_bytes.append(hidden.nbytes)
        if len(self._sizes_bytes) == len(self._micro) and self._schedule.lowest is not None:
            self._schedule.activations.reserve(self._sizes_bytes)

    def passed(
        self, layer: int, number: int, given: torch.Tensor, hidden: torch.Tensor, routers: list[torch.Tensor]
    ) -> None:
        item, schedule = self._micro[number], self._schedule
        item.routers += routers
        item.router_counts.append(len(routers))
        if schedule.lowest is not None and layer >= schedule.lowest:
            with schedule.waiting_for_kept(layer, number):
                schedule.activations.keep(layer, number, given)


class VerticalSchedule:
    """Runs steps over one model: forward by `flow`, back by `backward` and `head`. One step at a time, one thread."""

    def __init__(
        self,
        flow: Flow,
        backward: BackwardRunner,
        head: StreamedHeadGradient,
        download: GradientShipping,
        activations: Activations,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.flow, self.backward, self.head, self.units = flow, backward, head, flow.units
        self.download, self.activations, self.seed = download, activations, seed
        self.rank, self.world_size = rank, world_size
        self._tied: GradAccumulator | None = None
        self.lowest = self.units.lowest_trained

    def train(
        self,
        batches: Sequence[Batch],
        *,
        step: int,
        num_tokens: int,
        loss_scale: float,
        on_gradient: OnGradient,
        clock: PhaseClock,
    ) -> PassSums:
        """Forward and backward of one step over this rank's micro-batches on the device. `num_tokens`: unmasked tokens
        of the global batch, by which the loss is divided."""
        micro = [_MicroBatch(batch) for batch in batches]
        with generators_kept(self.flow.device):
            try:
                random = PartRandom(self.flow.device, self.seed, step, self.rank, self.world_size)
                self.download.begin()
                self.flow.arrival.begin(self._train_order())
                clock.start("forward")
                at = self.flow.forward(micro, _Keeping(micro, random, self))
                sums, at = self._head_backward(micro, random, at, loss_scale, num_tokens, on_gradient)
                clock.start("backward")
                self._backward(micro, random, at, on_gradient)
                return sums
            except BaseException as error:
                self.flow.arrival.abort(after(error))
                self.activations.clear(after(error))
                self._tied = None
                raise

    # --- parts of a pass; `at` counts the uses of slabs

    def _train_order(self) -> list[Part]:
        up = [self.units.embed, *self.units.layer_units, self.units.head]
        down = [] if self.lowest is None else list(reversed(self.units.layer_units[self.lowest :]))
        return up + down + ([self.units.embed] if self.units.embed.is_trainable else [])

    def _head_backward(
        self,
        micro: list[_MicroBatch],
        random: PartRandom,
        at: int,
        loss_scale: float,
        num_tokens: int,
        on_gradient: OnGradient,
    ) -> tuple[PassSums, int]:
        head = self.units.head
        slab = self.flow.arrival.acquire(at)
        into = self.download.accumulator(head) if head.is_trainable else None
        self._prefetch_kept(len(self.units.layer_units) - 1)
        sums = PassSums.zero(self.flow.device)

        def inputs() -> Iterator[tuple[HeadInput, list[torch.Tensor]]]:
            for m, item in enumerate(micro):
                random.at(m, len(self.units.layer_units) + 1)
                routers, item.routers = item.routers, []
                yield item.at_head(), routers

        aux_tokens = None
        if self.head.is_aux_whole:
            aux_tokens = torch.tensor(num_tokens, device=self.flow.device)
        results = self.head.run(slab, inputs(), grad_scale=loss_scale / num_tokens, into=into, aux_tokens=aux_tokens)
        for m, item in enumerate(micro):
            with self.flow.compute("head", "head", m):
                result = next(results)
            item.grad, item.grad_routers = result.grad_hidden, result.grad_routers
            sums = sums.plus(result.ce_sum, result.n_tokens, result.aux_sum)
        self.flow.arrival.release(at)
        if into is not None and self.units.tied:
            self._tied = into
        elif into is not None:
            on_gradient(head, self.download.ship(head, into))
        return sums, at + 1

    def _backward(self, micro: list[_MicroBatch], random: PartRandom, at: int, on_gradient: OnGradient) -> None:
        if self.lowest is None:
            return
        for index in reversed(range(self.lowest, len(self.units.layer_units))):
            unit = self.units.layer_units[index]
            slab = self.flow.arrival.acquire(at)
            self._prefetch_kept(index - 1)
            only_once = len(micro) == 1 and self.flow.runner.long_rows is None  # whose tiles each bring a gradient
            into = self.download.accumulator(unit, only_once=only_once) if unit.is_trainable else None
            for m, item in enumerate(micro):
                hidden = self._take_kept(index, m)
                random.at(m, unit.index)
                with self.flow.compute("backward", unit.name, m):
                    item.grad = self.backward.layer(
                        index, slab, hidden, item.log.call(index), item.take_grad(), item.take_router_grads(), into
                    )
            self.flow.arrival.release(at)
            if into is not None:
                on_gradient(unit, self.download.ship(unit, into))
            at += 1
        embed = self.units.embed
        if embed.is_trainable:
            slab = self.flow.arrival.acquire(at)
            into = self._tied if self._tied is not None else self.download.accumulator(embed)
            self._tied = None
            for m, item in enumerate(micro):
                random.at(m, embed.index)
                with self.flow.compute("backward", embed.name, m):
                    self.backward.embed(slab, item.batch, item.take_grad(), into)
            self.flow.arrival.release(at)
            on_gradient(embed, self.download.ship(embed, into))

    def _prefetch_kept(self, layer: int) -> None:
        with self.waiting_for_kept(layer):
            self.activations.prefetch(layer)

    def _take_kept(self, layer: int, micro_batch: int) -> torch.Tensor:
        with self.waiting_for_kept(layer, micro_batch):
            return self.activations.take(layer, micro_batch)

    def waiting_for_kept(self, layer: int, micro_batch: int = 0) -> AbstractContextManager[None]:
        link = self.activations.link(layer, micro_batch)
        return self.flow.arrival.stalls.until(f"activations {layer}", link) if link else nullcontext()

"""The vertical schedule: each unit runs all micro-batches before the next one, so weights cross the link twice a step.

Forward, unit by unit: embedding, layers up, head. Only each layer's input is kept (activation checkpoint). The head
gives loss and gradient chunk by chunk; backward goes down the layers, each recomputed from its checkpoint, gradients of
all micro-batches added up on the device and sent down as soon as a unit's are complete (tied weights: once, after the
embedding's backward). Weights arrive ahead of their use (`prefetch`), checkpoints wait where `activations` puts them,
what happens to gradients is the caller's (`on_gradient`). Bytes over the link per step: twice the 16-bit parameters up,
the gradients down, independent of the number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

from outcore.common.deadline import after
from outcore.engine.stream.activations.memory import Activations
from outcore.engine.stream.gradients.accumulator import GradAccumulator
from outcore.engine.stream.gradients.download import GradientDownload
from outcore.engine.stream.rng import UnitRandom, generators_kept
from outcore.flow.layers.head import Batch, HeadInput
from outcore.flow.layers.runner import UnitRunner
from outcore.flow.parts.shell import CallLog
from outcore.flow.parts.units import Unit
from outcore.flow.trace.clock import PhaseClock
from outcore.flow.trace.recorder import NO_TRACE, Trace
from outcore.flow.weights.prefetch import WeightPrefetcher
from outcore.staging import LaneTransfer

OnGradient = Callable[[Unit, LaneTransfer], None]


@dataclass
class _MicroBatch:
    """What one micro-batch carries through a pass."""

    batch: Batch
    log: CallLog = field(default_factory=CallLog)
    hidden: torch.Tensor | None = None
    routers: list[torch.Tensor] = field(default_factory=list)
    router_counts: list[int] = field(default_factory=list)
    grad: torch.Tensor | None = None
    grad_routers: list[torch.Tensor] = field(default_factory=list)

    def take_hidden(self) -> torch.Tensor:
        hidden, self.hidden = self.hidden, None
        assert hidden is not None
        return hidden

    def take_grad(self) -> torch.Tensor:
        grad, self.grad = self.grad, None
        assert grad is not None
        return grad

    def take_router_grads(self) -> list[torch.Tensor]:
        """Those of the topmost layer that has not had its backward yet."""
        count = self.router_counts.pop() if self.router_counts else 0
        cut = len(self.grad_routers) - count
        taken, self.grad_routers = self.grad_routers[cut:], self.grad_routers[:cut]
        return taken


@dataclass(frozen=True)
class PassSums:
    """Sums over a pass's micro-batches, fp64 scalars on the device."""

    ce_sum: torch.Tensor
    aux_sum: torch.Tensor
    """Auxiliary loss times the micro-batch's tokens."""
    n_tokens: torch.Tensor


class VerticalSchedule:
    """Runs passes over one model. Not thread-safe; one pass at a time."""

    def __init__(
        self,
        runner: UnitRunner,
        prefetcher: WeightPrefetcher,
        download: GradientDownload,
        activations: Activations,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self.runner, self.units = runner, runner.units
        self.prefetcher, self.download, self.activations = prefetcher, download, activations
        self.device, self.seed = device, seed
        self.trace: Trace = NO_TRACE
        """Sees the work of each unit and micro-batch; replaced while steps are traced."""
        self._tied: GradAccumulator | None = None
        trainable = [unit.is_trainable for unit in self.units.layer_units]
        self._lowest = 0 if self.units.embed.is_trainable else (trainable.index(True) if any(trainable) else None)
        """Backward ends at this layer: below it nothing is trained. None: only the head is."""

    def train(
        self,
        batches: Sequence[Batch],
        *,
        step: int,
        grad_scale: float,
        on_gradient: OnGradient,
        clock: PhaseClock,
    ) -> PassSums:
        """Forward and backward of one step over micro-batches on the device.

        `grad_scale`: loss scale / unmasked tokens of the global batch.
        """
        micro = [_MicroBatch(batch) for batch in batches]
        with generators_kept(self.device):
            try:
                random = UnitRandom(self.device, self.seed, step)
                self.download.begin()
                self.prefetcher.begin(self._train_order())
                clock.start("forward")
                at = self._forward(micro, random, self.activations)
                sums, at = self._head_backward(micro, random, at, grad_scale, on_gradient)
                clock.start("backward")
                self._backward(micro, random, at, on_gradient)
                return sums
            except BaseException as error:
                self.prefetcher.abort(after(error))
                self.activations.clear(after(error))
                self._tied = None
                raise

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> PassSums:
        """Loss of micro-batches; the model should be in evaluation mode."""
        micro = [_MicroBatch(batch) for batch in batches]
        at = self._forward_only(micro)
        slab = self.prefetcher.acquire(at)
        sums = _zeros(self.device)
        results = self.runner.head.run(slab, (HeadInput(i.take_hidden(), i.batch, i.log) for i in micro))
        for m in range(len(micro)):
            with self.trace.compute("head", "head", m):
                result = next(results)
            sums = _added(sums, result.ce_sum, None, result.n_tokens)
        self.prefetcher.release(at)
        return sums

    @torch.no_grad()
    def next_logits(self, input_ids: torch.Tensor) -> torch.Tensor:
        """fp32 logits [V] after input_ids [1, T]."""
        item = _MicroBatch({"input_ids": input_ids})
        at = self._forward_only([item])
        logits = self.runner.head.next_logits(self.prefetcher.acquire(at), item.take_hidden(), item.batch, item.log)
        self.prefetcher.release(at)
        return logits

    # --- parts of a pass; `at` counts the uses of slabs

    def _train_order(self) -> list[Unit]:
        up = [self.units.embed, *self.units.layer_units, self.units.head]
        down = [] if self._lowest is None else list(reversed(self.units.layer_units[self._lowest :]))
        return up + down + ([self.units.embed] if self.units.embed.is_trainable else [])

    def _forward_only(self, micro: list[_MicroBatch]) -> int:
        self.prefetcher.begin([self.units.embed, *self.units.layer_units, self.units.head])
        with generators_kept(self.device):
            try:
                return self._forward(micro, None, None)
            except BaseException as error:
                self.prefetcher.abort(after(error))
                raise

    def _forward(self, micro: list[_MicroBatch], random: UnitRandom | None, kept: Activations | None) -> int:
        """Up to the last layer's output; returns the place of the head's use."""
        slab = self.prefetcher.acquire(0)
        for m, item in enumerate(micro):
            if random is not None:
                random.at(m, self.units.embed.index)
            with self.trace.compute("forward", self.units.embed.name, m):
                item.log = self.runner.embed(slab, item.batch)
            item.hidden = item.log.hidden
            item.log.first = None  # a checkpoint, if anything, keeps it
            if len(micro) > 1:
                item.log.shrink_masks()
        self.prefetcher.release(0)
        if kept is not None and self._lowest is not None:
            kept.reserve([item.hidden.nbytes for item in micro if item.hidden is not None])
        for index, unit in enumerate(self.units.layer_units):
            slab = self.prefetcher.acquire(index + 1)
            for m, item in enumerate(micro):
                if random is not None:
                    random.at(m, unit.index)
                hidden = item.take_hidden()
                with self.trace.compute("forward", unit.name, m):
                    item.hidden, routers = self.runner.layer(index, slab, hidden, item.log.call(index))
                if kept is not None:
                    item.routers += routers
                    item.router_counts.append(len(routers))
                    if self._lowest is not None and index >= self._lowest:
                        with self._waiting_for_kept(index, m):
                            kept.keep(index, m, hidden)
            self.prefetcher.release(index + 1)
        return len(self.units.layer_units) + 1

    def _head_backward(
        self,
        micro: list[_MicroBatch],
        random: UnitRandom,
        at: int,
        grad_scale: float,
        on_gradient: OnGradient,
    ) -> tuple[PassSums, int]:
        head = self.units.head
        slab = self.prefetcher.acquire(at)
        into = self.download.accumulator(head) if head.is_trainable else None
        self._prefetch_kept(len(self.units.layer_units) - 1)
        sums = _zeros(self.device)

        def inputs() -> Iterator[HeadInput]:
            for m, item in enumerate(micro):
                random.at(m, len(self.units.layer_units) + 1)
                routers, item.routers = item.routers, []
                yield HeadInput(item.take_hidden(), item.batch, item.log, routers)

        results = self.runner.head.run(slab, inputs(), grad_scale=grad_scale, into=into)
        for m, item in enumerate(micro):
            with self.trace.compute("head", "head", m):
                result = next(results)
            item.grad, item.grad_routers = result.grad_hidden, result.grad_routers
            sums = _added(sums, result.ce_sum, result.aux_loss, result.n_tokens)
        self.prefetcher.release(at)
        if into is not None and self.units.tied:
            self._tied = into
        elif into is not None:
            on_gradient(head, self.download.ship(head, into))
        return sums, at + 1

    def _backward(self, micro: list[_MicroBatch], random: UnitRandom, at: int, on_gradient: OnGradient) -> None:
        if self._lowest is None:
            return
        for index in reversed(range(self._lowest, len(self.units.layer_units))):
            unit = self.units.layer_units[index]
            slab = self.prefetcher.acquire(at)
            self._prefetch_kept(index - 1)
            into = self.download.accumulator(unit, only_once=len(micro) == 1) if unit.is_trainable else None
            for m, item in enumerate(micro):
                hidden = self._take_kept(index, m)
                random.at(m, unit.index)
                with self.trace.compute("backward", unit.name, m):
                    item.grad = self.runner.layer_backward(
                        index, slab, hidden, item.log.call(index), item.take_grad(), item.take_router_grads(), into
                    )
            self.prefetcher.release(at)
            if into is not None:
                on_gradient(unit, self.download.ship(unit, into))
            at += 1
        embed = self.units.embed
        if embed.is_trainable:
            slab = self.prefetcher.acquire(at)
            into = self._tied if self._tied is not None else self.download.accumulator(embed)
            self._tied = None
            for m, item in enumerate(micro):
                random.at(m, embed.index)
                with self.trace.compute("backward", embed.name, m):
                    self.runner.embed_backward(slab, item.batch, item.take_grad(), into)
            self.prefetcher.release(at)
            on_gradient(embed, self.download.ship(embed, into))

    def _prefetch_kept(self, layer: int) -> None:
        with self._waiting_for_kept(layer):
            self.activations.prefetch(layer)

    def _take_kept(self, layer: int, micro_batch: int) -> torch.Tensor:
        with self._waiting_for_kept(layer, micro_batch):
            return self.activations.take(layer, micro_batch)

    def _waiting_for_kept(self, layer: int, micro_batch: int = 0) -> AbstractContextManager[None]:
        link = self.activations.link(layer, micro_batch)
        return self.prefetcher.stalls.until(f"activations {layer}", link) if link else nullcontext()


def _zeros(device: torch.device) -> PassSums:
    return PassSums(*(torch.zeros((), dtype=torch.float64, device=device) for _ in range(3)))


def _added(sums: PassSums, ce_sum: torch.Tensor, aux: torch.Tensor | None, n_tokens: torch.Tensor) -> PassSums:
    aux_sum = sums.aux_sum if aux is None else sums.aux_sum + aux.double() * n_tokens
    return PassSums(sums.ce_sum + ce_sum, aux_sum, sums.n_tokens + n_tokens)

"""Calls through a model whose weights arrive part by part: each part takes all calls before the next one comes.

So the weights cross the link once a pass, whatever the number of calls. Flow keeps no gradient, optimizer or request;
who trains listens to the same forward loop (`PassWatch`), and goes back through the parts himself.

What goes into a pass and what comes out: calls, hooks between parts, outputs.

B: rows, T: tokens of a row, H: hidden size, V: vocabulary, N = B x T."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from outcore.common.deadline import after
from outcore.flow.layers import Batch, Head, HeadInput, PartRunner
from outcore.flow.parts import CallLog, ModelParts, Part
from outcore.flow.trace import NO_TRACE, Trace
from outcore.flow.weights import WeightArrival

Want = Literal["nothing", "hidden", "logits", "labels", "loss", "logprobs"]
"""nothing: the pass ends below the head. hidden: the decoder's result. logits: of the positions asked for. labels:
the same by the head's matrix alone, without what a language model does to its logits. loss: the
sum over the tokens that have a label. logprobs: how likely each token with a label was after those before it."""
OnPart = Callable[[Part, int, torch.Tensor], torch.Tensor | None]
"""(part, call number, hidden_BTH on flow's compute stream), after the embedding and after each layer. The tensor is
flow's until the hook returns; a returned tensor replaces it; an exception aborts the pass."""


@dataclass(frozen=True)
class Call:
    """Rows that go through the model together."""

    batch: Mapping[str, torch.Tensor]
    """On the device: input_ids [B, T], perhaps position_ids, attention_mask, labels (for loss or logprobs) [B, T]."""
    want: Want = "logits"
    positions: torch.Tensor | None = None
    """Places among the N tokens whose logits are wanted. None: the last token of each row."""
    num_top: int = 1
    """Likeliest tokens that are returned at each position, with logprobs."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """More arguments for the decoder, such as a cache of keys and values. They win over the batch's."""


@dataclass
class Output:
    """Result of one call."""

    number: int
    """The call's place among the calls of its pass."""
    hidden: torch.Tensor | None = None
    """[B, T, H'], after whatever the decoder does behind its last layer."""
    logits: torch.Tensor | None = None
    """fp32 [positions, V]."""
    ce_sum: torch.Tensor | None = None
    """fp32 scalar: loss summed over the tokens that count."""
    n_tokens: torch.Tensor | None = None
    """int64 scalar: the tokens that count."""
    logprobs: torch.Tensor | None = None
    """fp32 [B, T]: natural logarithm of each token's probability; 0 where it has no label."""
    top_ids: torch.Tensor | None = None
    """int64 [B, T, num_top]: the likeliest tokens there, and in `top_logprobs` their logarithms."""
    top_logprobs: torch.Tensor | None = None
    ranks: torch.Tensor | None = None
    """int64 [B, T]: 1 for the likeliest token at its place; 0 throughout where `num_top` is 1."""


@dataclass
class Passage:
    """One call on its way through the parts."""

    batch: Batch
    inputs: Mapping[str, Any] | None = None
    log: CallLog = field(default_factory=CallLog)
    hidden: torch.Tensor | None = None

    def take_hidden(self) -> torch.Tensor:
        """The hidden states, which are the taker's from then on."""
        hidden, self.hidden = self.hidden, None
        assert hidden is not None
        return hidden

    def at_head(self) -> HeadInput:
        """Input of the head for this call."""
        return HeadInput(self.take_hidden(), self.batch, self.log)


class PassWatch:
    """Sees each part run on each call, and may put another tensor in place of what a part gave; this one does not."""

    def before(self, part: Part, number: int) -> None:
        """The part is about to run on this call."""

    def embedded(self, number: int, hidden: torch.Tensor) -> torch.Tensor | None:
        """The embedding gave `hidden`."""

    def passed(
        self, layer: int, number: int, given: torch.Tensor, hidden: torch.Tensor, routers: list[torch.Tensor]
    ) -> torch.Tensor | None:
        """The layer made `hidden` out of `given`."""


class HookWatch(PassWatch):
    """Has a hook see what each part gives."""

    def __init__(self, units: ModelParts, on_part: OnPart) -> None:
        super().__init__()
        self._units, self._on_part = units, on_part

    def embedded(self, number: int, hidden: torch.Tensor) -> torch.Tensor | None:
        return self._on_part(self._units.embed, number, hidden)

    def passed(
        self, layer: int, number: int, given: torch.Tensor, hidden: torch.Tensor, routers: list[torch.Tensor]
    ) -> torch.Tensor | None:
        return self._on_part(self._units.layer_units[layer], number, hidden)


class Flow:
    """One model's parts in passage through one device. One pass at a time, from one thread.

    The model should be in evaluation mode for `run`."""

    def __init__(self, runner: PartRunner, head: Head, arrival: WeightArrival, device: torch.device) -> None:
        self.runner, self.head, self.arrival, self.device = runner, head, arrival, device
        self.units = runner.units
        self.trace: Trace = NO_TRACE
        """Sees the work of each part and call; replaced while steps are traced."""
        self._at = ""

    def compute(self, phase: str, part: str, number: int) -> AbstractContextManager[None]:
        """Work on the device by one part for one call or micro-batch, told to the trace and by `doing`."""
        self._at = f"{phase}, {part}"
        return self.trace.compute(phase, part, number)

    def doing(self) -> str:
        """Stage that was begun last: 'forward, layer 3', and whether it waits for the compiler. From any thread."""
        compiled = self.runner.compiled
        return self._at + (" (being compiled)" if compiled is not None and compiled.is_compiling else "")

    @torch.no_grad()
    def run(self, calls: Sequence[Call], *, on_part: OnPart | None = None) -> Iterator[Output]:
        """One pass of all calls; an output for each, in their order.

        The pass begins when the first output is asked for. The iterator must be exhausted or closed before the next
        pass; a failure or a close aborts the pass, and the flow can be used again."""
        needs_head = any(call.want != "nothing" for call in calls)
        ends = [self.units.head] if needs_head else []
        try:
            self.arrival.begin([self.units.embed, *self.units.layer_units, *ends])
            passages = [Passage(call.batch, call.inputs) for call in calls]
            watch = PassWatch() if on_part is None else HookWatch(self.units, on_part)
            at = self.forward(passages, watch)
            if not needs_head:
                yield from (Output(number) for number in range(len(calls)))
                return
            yield from self._outputs(self.arrival.acquire(at), calls, passages)
            self.arrival.release(at)
        except BaseException as error:
            self.arrival.abort(None if isinstance(error, GeneratorExit) else after(error))
            raise

    def forward(self, passages: Sequence[Passage], watch: PassWatch) -> int:
        """Up to the last layer's output, in a pass that has begun; returns the number of the head's use."""
        slab = self.arrival.acquire(0)
        for number, item in enumerate(passages):
            watch.before(self.units.embed, number)
            with self.compute("forward", self.units.embed.name, number):
                item.log = self.runner.embed(slab, item.batch, item.inputs)
            given = item.log.hidden
            item.log.first = None  # who wants to keep it does
            replaced = watch.embedded(number, given)
            item.hidden = given if replaced is None else replaced
            if len(passages) > 1:
                item.log.shrink_masks()
        self._expect_first(passages)
        self.arrival.release(0)
        for index, part in enumerate(self.units.layer_units):
            slab = self.arrival.acquire(index + 1)
            for number, item in enumerate(passages):
                watch.before(part, number)
                given = item.take_hidden()
                with self.compute("forward", part.name, number):
                    hidden, routers = self.runner.layer(index, slab, given, item.log.call(index))
                replaced = watch.passed(index, number, given, hidden, routers)
                item.hidden = hidden if replaced is None else replaced
                del hidden, replaced
            self._expect_first(passages)
            self.arrival.release(index + 1)
        return len(self.units.layer_units) + 1

    def _expect_first(self, passages: Sequence[Passage]) -> None:
        for item in passages[:1]:
            if item.hidden is not None:
                self.runner.expect(item.hidden)

    def _outputs(self, slab: torch.Tensor, calls: Sequence[Call], passages: Sequence[Passage]) -> Iterator[Output]:
        losses = self.head.losses(
            slab, (item.at_head() for call, item in zip(calls, passages, strict=True) if call.want == "loss")
        )
        for number, (call, item) in enumerate(zip(calls, passages, strict=True)):
            output = Output(number)
            with self.compute("head", "head", number):
                if call.want == "loss":
                    output.ce_sum, output.n_tokens = next(losses)
                elif call.want == "logits":
                    output.logits = self.head.logits(slab, item.at_head(), call.positions)
                elif call.want == "labels":
                    assert call.positions is not None
                    output.logits = self.head.labels(slab, item.at_head(), call.positions)
                elif call.want == "logprobs":
                    found = self.head.logprobs(slab, item.at_head(), call.num_top)
                    output.logprobs, output.top_ids, output.top_logprobs, output.ranks = found
                elif call.want == "hidden":
                    output.hidden = self.head.finish(slab, item.at_head())
            yield output

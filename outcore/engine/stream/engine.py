"""The streaming engine behind the `Engine` protocol: one GPU, decoder-only models, states in RAM or on NVMe.

A step: the vertical schedule computes gradients and sends them to RAM; the CPU optimizer updates each unit there. With
clipping (or fp16) updates wait for the global norm and then run in the order in which the next forward needs them,
while that forward is already under way; a non-finite norm skips the whole step. Without clipping each unit is updated
as soon as its gradient has arrived. Same mathematics either way: AdamW on fp32 masters, loss averaged over all unmasked
tokens. Everything deferred is drained before evaluation, sampling, saving and export.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from outcore.checkpoint.export import export_model
from outcore.engine.base import (
    LOWER_RATE,
    NO_TARGETS,
    EngineError,
    EngineFacts,
    EvalResult,
    MicroBatch,
    NonFiniteLossError,
    StepResult,
    TracePlan,
    check_optimizer,
)
from outcore.engine.stream.parts import EngineParts
from outcore.engine.stream.ranks.reduce import SlowRank
from outcore.engine.stream.schedule import PassSums
from outcore.engine.stream.settings import StreamSettings
from outcore.engine.stream.state import LossScaler, StreamState, generators_kept
from outcore.engine.stream.trace_window import NoTracing, StepTracing, TraceWindow
from outcore.engine.stream.updates import is_usable
from outcore.flow import Call
from outcore.flow.parts import DeviceBatch, Part
from outcore.flow.trace import PhaseClock, moment, wait_for
from outcore.model import LoadedModel, context_length_of
from outcore.model.facts import checkpoint_name
from outcore.model.forward import count_target_tokens, unwrap
from outcore.optim import AdamWHyper
from outcore.sizing.streaming import EVAL_TOKENS
from outcore.staging import LaneTransfer

logger = logging.getLogger(__name__)
_Result = TypeVar("_Result")

CLIP_EPS = 1e-6
"""Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does."""
MAX_SKIPS = 8
"""Steps in a row with non-finite gradients after which training without loss scaling stops: it would go on for ever."""


class StreamEngine:
    """The `Engine` of one GPU, or of one rank of several. Made by `outcore.engine.stream.build.build_stream_engine`."""

    name = "stream"

    def __init__(self, loaded: LoadedModel, settings: StreamSettings, parts: EngineParts) -> None:
        self.loaded, self.settings = loaded, settings
        self.device = parts.device
        self.updates = 0
        self._parts, self._ranks = parts, parts.ranks
        self.rank, self.world_size = parts.ranks.rank, parts.ranks.world_size
        self._dtype = parts.units.embed.layout.dtype
        self._deferred = settings.is_deferred(self._dtype)
        self._scaler = LossScaler(
            self._dtype == torch.float16,
            settings.initial_loss_scale,
            settings.loss_scale_window,
            settings.loss_scale_hysteresis,
            settings.min_loss_scale,
        )
        self._state = StreamState(loaded, parts.homes, parts.ranks, parts.save_buffer)
        self._state_bytes = self._state.size_bytes()
        self._slow_rank = SlowRank(parts.ranks)
        self._attempts = 0
        """Steps tried since the run began, skipped ones too: the key of dropout."""
        self._was_whole = False
        """Whether the last step clipped nothing."""
        self._skips_in_a_row = 0
        self._closed = self._failed = False
        self._tracing: StepTracing = NoTracing()

    def trace(self, plan: TracePlan, say: Callable[[str], None]) -> None:
        """Write a timeline of some steps; see `trace_window`."""
        if self.rank == 0:
            self._tracing = TraceWindow(self._parts, plan, self.loaded.words, say)

    # --- training

    def train_step(self, micro_batches: Sequence[MicroBatch], lr: float) -> StepResult:
        """Make one optimizer step; see `Engine`. After an exception other than `NO_TARGETS` training needs a resume."""
        self._ranks.doing(f"step {self._attempts + 1}")
        own = sum(count_target_tokens(batch) for batch in micro_batches)
        total = int(self._ranks.sums([own], "tokens of the step")[0])
        if total == 0:
            raise ValueError(NO_TARGETS)
        with self._ranks.failing():
            return self._train_step(micro_batches, total, lr)

    def _train_step(self, micro_batches: Sequence[MicroBatch], total: int, lr: float) -> StepResult:
        parts, self._failed = self._parts, True
        self._tracing.step_begins()
        clock = PhaseClock(self.device)
        shipped: list[tuple[Part, LaneTransfer]] = []
        scale = self._scaler.cur_scale
        immediate = None if self._deferred else self._hyper(lr, 1.0)
        ahead = self._hyper(lr, 1.0 / scale) if self._deferred and parts.updates.ahead.may_begin else None
        parts.updates.begin_step()

        def on_gradient(unit: Part, transfer: LaneTransfer) -> None:
            shipped.append((unit, transfer))
            if immediate is not None:
                parts.updates.submit(unit, transfer, immediate, guard=True, norm_of=parts.download.norm_of)
            elif ahead is not None:
                parts.updates.submit_ahead(unit, transfer, ahead)

        def run() -> PassSums:
            if shipped:
                parts.updates.settle(None, ahead)
            shipped.clear()
            return parts.schedule.train(
                [self._to_device(batch) for batch in micro_batches],
                step=self._attempts + 1,
                num_tokens=total,
                loss_scale=scale,
                on_gradient=on_gradient,
                clock=clock,
            )

        parts.residents.step_begins([batch["labels"].numel() for batch in micro_batches])
        # Gradients of other ranks wait for those that were shipped: a second pass of one rank would be out of step.
        may_repeat = self._deferred and self.world_size == 1
        sums = self._with_room(run, changed_none=lambda: may_repeat or not shipped)
        clock.stop()
        self._attempts += 1
        clock.wait()
        norm = float(parts.download.norm()) / scale
        begin_s = time.perf_counter()
        ce_sum, aux_sum = self._ranks.sums([float(sums.ce_sum), float(sums.aux_sum)], "losses of the step")
        if ahead is not None and not math.isfinite(ce_sum + aux_sum):
            parts.updates.settle(None, ahead)
        self._check_loss(ce_sum + aux_sum, total)
        skipped = self._settle(shipped, norm, scale, lr, ahead) if self._deferred else self._settle_immediate(norm)
        phase_s = clock.seconds() | {"optimizer": time.perf_counter() - begin_s} | parts.stalls.seconds()
        parts.updates.ahead.step_ended(phase_s, self._was_whole)
        if self.world_size > 1:
            phase_s["stall_ranks"] = self._slow_rank.step(sum(phase_s[name] for name in ("forward", "backward")))
            phase_s |= self._slow_rank.collective_s | self._slow_rank.waited_s
        self._tracing.step_ends()
        said = parts.residents.step_ended(parts.updates.drain, phase_s)
        self._failed = False
        return StepResult(ce_sum / total, aux_sum / total, norm, total, skipped, phase_s, said)

    def _with_room(self, run: Callable[[], _Result], changed_none: Callable[[], bool] = lambda: True) -> _Result:
        """Result of `run`; once more with less memory kept where that left it none, if it had changed no state."""
        while True:
            short: torch.OutOfMemoryError
            try:
                return run()
            except torch.OutOfMemoryError as error:
                short = error.with_traceback(None)
            # Outside of the handler: the failed pass, whose tensors the error's traceback holds, must be gone.
            if not changed_none() or not self._gives_way("memory was short beside them"):
                raise short

    def _gives_way(self, why: str) -> bool:
        """Give memory of the device back: what stays there first, then graphs of layers. False when there is none."""
        compiled = self._parts.flow.runner.compiled
        graphs = None if compiled is None else compiled.graphs
        if self._parts.residents.give_way(why):
            return True
        if graphs is None or not graphs.num_graphs:
            return False
        graphs.give_up(why)
        torch.cuda.empty_cache()
        return True

    def _settle(
        self,
        shipped: list[tuple[Part, LaneTransfer]],
        norm: float,
        scale: float,
        lr: float,
        ahead: AdamWHyper | None,
    ) -> bool:
        """Deferred: hand every unit to the optimizer, first needed first, or none of them. True when skipped."""
        limit = self.settings.max_grad_norm
        clip = min(1.0, limit / (norm + CLIP_EPS)) if limit else 1.0
        usable = is_usable(norm * clip)
        self._scaler.update(overflow=not usable)
        self._was_whole = usable and clip == 1.0
        hyper = self._hyper(lr, clip / scale) if usable else None
        if ahead is not None:
            self._parts.updates.settle(hyper, ahead)
        if hyper is None:
            for _, transfer in shipped:
                transfer.wait()  # the homes are written to again in the next step
            self._count_skip(norm)
            return True
        for unit, transfer in sorted(shipped, key=lambda pair: pair[0].index):
            self._parts.updates.submit(unit, transfer, hyper)
        self.updates += 1
        self._skips_in_a_row = 0
        return False

    def _settle_immediate(self, norm: float) -> bool:
        if not is_usable(norm):
            raise NonFiniteLossError(
                f"the gradients' norm became {norm:.3g}. Layers with usable gradients have already been updated, so "
                "this model is no longer one that a step made: resume from the last checkpoint with gradient clipping "
                f"(--max_grad_norm), under which such a step is skipped whole, or {LOWER_RATE}."
            )
        self.updates += 1
        return False

    def _count_skip(self, norm: float) -> None:
        self._skips_in_a_row += 1
        if not self._scaler.enabled and self._skips_in_a_row >= MAX_SKIPS:
            raise NonFiniteLossError(
                f"the gradients could not be used in {MAX_SKIPS} steps in a row (their norm is {norm:.3g}; no state "
                f"was updated with them): {LOWER_RATE}."
            )

    def _check_loss(self, loss_sum: float, total: int) -> None:
        loss = loss_sum / total
        if not self._scaler.enabled and not math.isfinite(loss):
            updated = "no state was updated with it" if self._deferred else "no layer with such gradients was updated"
            raise NonFiniteLossError(
                f"the loss became {loss} and {updated}: {LOWER_RATE}; or look for damaged rows in the data."
            )

    def _hyper(self, lr: float, grad_scale: float) -> AdamWHyper:
        settings = self.settings
        return AdamWHyper(
            lr=lr,
            step=self.updates + 1,
            beta1=settings.betas[0],
            beta2=settings.betas[1],
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            grad_scale=grad_scale,
            seed=settings.seed,
        )

    def _to_device(self, batch: MicroBatch) -> MicroBatch:
        return DeviceBatch(batch, self.device)

    # --- looking at the model

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """No dropout, every update applied; random numbers go on as if nothing had been drawn."""
        self._drain()
        was_training = self.loaded.model.training
        self.loaded.model.eval()
        try:
            with generators_kept(self.device):
                yield
        finally:
            self.loaded.model.train(was_training)

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> EvalResult:
        """Mean loss over an evaluation set; see `Engine`."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        group: list[MicroBatch] = []

        def run() -> None:
            nonlocal sums
            found = PassSums.zero(self.device)
            for output in self._parts.flow.run([Call(batch, "loss") for batch in group]):
                assert output.ce_sum is not None and output.n_tokens is not None
                found = found.plus(output.ce_sum, output.n_tokens)
            sums = sums + torch.stack([found.ce_sum, found.n_tokens])
            group.clear()

        with self._evaluating():
            for batch in micro_batches:
                group.append(self._to_device(batch))
                tokens = sum(one["labels"].numel() for one in group)
                if len(group) == self.settings.eval_group or tokens >= EVAL_TOKENS:
                    self._with_room(run)
            if group:
                self._with_room(run)
            wait_for(moment(self.device), "the evaluation")
        loss_sum, tokens = self._ranks.sums(sums.tolist(), "losses of the evaluation")
        return EvalResult(loss_sum / tokens if tokens else float("nan"), int(tokens))

    def sample(self, prompt_ids: list[int], max_new_tokens: int, end_tokens: Collection[int] | None) -> list[int]:
        """Greedy continuation; every token is one pass over the weights."""
        if not prompt_ids:
            raise ValueError("sampling continues a prompt of at least one token, got none.")
        tokens = list(prompt_ids)
        length = context_length_of(self.loaded.model)
        with self._evaluating():
            for _ in range(max_new_tokens):
                ids = torch.tensor([tokens[-length:]], dtype=torch.long, device=self.device)
                (output,) = self._with_room(lambda ids=ids: list(self._parts.flow.run([Call({"input_ids": ids})])))
                assert output.logits is not None
                token = output.logits[0].argmax()
                wait_for(moment(self.device), "the next token")
                tokens.append(int(token))
                if end_tokens and tokens[-1] in end_tokens:
                    break
        return tokens[len(prompt_ids) :]

    # --- checkpoints

    def facts(self) -> EngineFacts:
        """Pinned: the lanes' slots and the homes in the staging pool; see `Engine`."""
        parts = self._parts
        return EngineFacts(
            self._state_bytes,
            parts.staging.pinned_bytes,
            parts.memory.pinned_bytes + parts.memory.pageable_bytes,
            parts.scratch.size_bytes if parts.scratch is not None else 0,
            parts.tile_plan.reason if parts.tile_plan.tiled else "",
            parts.residents.device_bytes,
            parts.updates.ahead.seconds.real_bytes,
            parts.flow.doing(),
        )

    def save(self, folder: Path, on_file: Callable[[Path, int], None]) -> dict:
        """Write shards; see `Engine` and `state`."""
        self._ranks.doing("saving")
        with self._ranks.failing():
            self._drain()
            self._state.save(folder, on_file)
        return {
            "engine": self.name,
            "updates": self.updates,
            "optimizer": self.settings.optimizer,
            "optimizer_state": True,
            "loss_scaler": self._scaler.state(),
            "attempts": self._attempts,
        }

    def load(self, folder: Path, state: dict) -> None:
        """Restore what `save` of this engine or of DeepSpeed's wrote; see `Engine`."""
        check_optimizer(folder, state, self.settings.optimizer)
        self._ranks.doing("loading a checkpoint")
        with self._ranks.failing():
            self._drain()
            self._state.load(folder, state)
            self._parts.residents.forget()
            self._parts.arena.forget_weights()
        self.updates = int(state["updates"])
        self._attempts = int(state.get("attempts", self.updates))
        self._skips_in_a_row = 0
        self._scaler.restore(state.get("loss_scaler", {}))

    def export(self, folder: Path, tokenizer: Any = None, adapter_only: bool = False) -> None:
        """Write the 16-bit model for `from_pretrained`; see `outcore.checkpoint.export`."""
        self._drain()
        names = {id(p): checkpoint_name(name) for name, p in unwrap(self.loaded.model).named_parameters()}

        def weight_of(parameter: torch.nn.Parameter) -> torch.Tensor:
            return self._parts.homes.weights.read(names[id(parameter)])

        self._ranks.doing("exporting")
        with self._ranks.failing():
            if self.rank == 0:
                export_model(
                    folder,
                    self.loaded.model,
                    weight_of,
                    tokenizer=tokenizer,
                    adapter_only=adapter_only,
                    origin=self.loaded.origin,
                )
            self._ranks.barrier("export by rank 0", timeout_s=math.inf)

    def describe(self) -> str:
        """Lines for people: what was chosen."""
        return self._parts.describe(self.settings, deferred=self._deferred)

    def _drain(self) -> None:
        """Block until every update is applied. After a failure, here or in a step, `close` skips this wait."""
        failed, self._failed = self._failed, True
        self._parts.updates.drain()
        self._parts.residents.write_back()
        self._failed = failed

    def close(self) -> None:
        """Apply what is pending, unless something has failed, then release lanes, threads and staging memory; safe to
        call twice. After a failure it takes no longer than `CLOSE_TIMEOUT_S`."""
        if self._closed:
            return
        self._closed = True
        try:
            if not self._failed:
                self._drain()
        except (EngineError, RuntimeError, TimeoutError, OSError) as error:
            # Nothing that was saved depends on it, and whatever made the caller close must stay in sight.
            logger.error("while the engine was closed: %s", error)
        self._tracing.close()
        self._ranks.close()
        self._parts.close()

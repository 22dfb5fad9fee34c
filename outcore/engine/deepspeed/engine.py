"""The DeepSpeed engine: ZeRO stages none to infinity on one or several ranks, behind the `Engine` protocol.

The loss is a sum over unmasked tokens divided by the token count of the whole global batch, so the result does not
depend on how tokens fall over micro-batches and ranks; DeepSpeed's own division by accumulation steps is switched off
and its average over ranks is undone by a factor of world_size. Checkpoints go parameter by parameter through
`StateAccess`, so that any stage and number of ranks can resume them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.checkpoint import MAX_SHARD_BYTES, CheckpointError, ShardReader, TensorPlan, plan_shards, write_shard
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
from outcore.engine.deepspeed.state import FAMILIES, open_state
from outcore.flow.parts import DeviceBatch
from outcore.flow.trace import PhaseClock
from outcore.model import LoadedModel
from outcore.model.facts import named_checkpoint_parameters, persistent_buffers
from outcore.model.forward import count_target_tokens
from outcore.model.weights import settle


class DeepSpeedEngine:
    """DeepSpeed behind the engines' interface. Made by `outcore.engine.deepspeed.build.build_engine`."""

    name = "deepspeed"

    def __init__(self, engine: Any, loaded: LoadedModel, *, check_finite: bool, takes_borders: bool = False) -> None:
        """`takes_borders`: the model attends to packed rows by documents' borders, given to each forward."""
        self.ds = engine
        self.takes_borders = takes_borders
        self.loaded = loaded
        self.network: nn.Module = engine.module.network
        self.check_finite = check_finite
        self.rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.world_size = engine.world_size
        self.device = torch.device(engine.device)
        self.updates = 0
        self.state = open_state(engine)
        self.state.prepare(0)  # stage none takes a step of its own when it is made, and would count from 1
        self._state_bytes = self._saved_bytes()
        self._closed = False

    # --- training

    def train_step(self, micro_batches: Sequence[MicroBatch], lr: float) -> StepResult:
        """One optimizer step; see `Engine`."""
        batches = [self._to_device(batch) for batch in micro_batches]
        total = self._sum_over_ranks(
            sum(count_target_tokens(batch, self.loaded.facts.is_encoder_decoder) for batch in micro_batches)
        )
        if total == 0:
            raise ValueError(NO_TARGETS)
        for group in self.ds.optimizer.param_groups:
            group["lr"] = lr
        self.ds.train()
        clock = PhaseClock(self.device)
        sums = torch.zeros(2, dtype=torch.float32, device=self.device)
        for batch in batches:
            clock.start("forward")
            objective, loss_sum, _tokens = self._forward(batch, float(total))
            sums += torch.stack([loss_sum, objective.detach() * total - loss_sum])
            clock.start("backward")
            self.ds.backward(objective * self.world_size, scale_wrt_gas=False)
            clock.start("optimizer")
            if batch is not batches[-1]:
                self.ds.step()  # counts the micro-batch
        loss, aux_loss = self._mean(sums, total)
        norm = self._whole_grad_norm()
        self.ds.step()
        clock.stop()
        skipped = not self.ds.was_step_applied()
        if not skipped:
            self.updates += 1
        norm = float(self.ds.get_global_grad_norm()) if norm is None else norm
        if self.check_finite and not skipped and not abs(norm) < float("inf"):
            raise NonFiniteLossError(
                f"the gradient norm became {norm}, and this step's update has damaged the states in memory: nothing "
                f"more is saved. To go on, {LOWER_RATE}."
            )
        return StepResult(loss, aux_loss, norm, total, skipped, clock.seconds())

    def _whole_grad_norm(self) -> float | None:
        """The global norm where DeepSpeed keeps none (fp32, stage none: plain torch AdamW, clipped while it steps)."""
        if not isinstance(self.ds.optimizer, torch.optim.Optimizer):
            return None
        grads = [p.grad for p in self.network.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))

    def _mean(self, sums: torch.Tensor, total: int) -> tuple[float, float]:
        """Mean loss and auxiliary loss over all ranks, refused when not finite before any state is updated."""
        if self.world_size > 1:
            torch.distributed.all_reduce(sums)
        loss, aux = (sums / total).tolist()
        if self.check_finite and not (abs(loss) < float("inf") and abs(aux) < float("inf")):
            raise NonFiniteLossError(
                f"the loss became {loss + aux} and no state was updated with it: {LOWER_RATE}; or look for damaged "
                "rows in the data."
            )
        return loss, aux

    def _sum_over_ranks(self, count: int) -> int:
        if self.world_size == 1:
            return count
        total = torch.tensor(count, dtype=torch.int64, device=self.device)
        torch.distributed.all_reduce(total)
        return int(total)

    def _to_device(self, batch: MicroBatch) -> MicroBatch:
        if self.takes_borders:
            return DeviceBatch(batch, self.device)
        return {name: tensor.to(self.device, non_blocking=True) for name, tensor in batch.items()}

    def _forward(self, batch: MicroBatch, total: float) -> Any:
        if not isinstance(batch, DeviceBatch):
            return self.ds(batch, total)
        with batch.packing_known():
            return self.ds(dict(batch), total)

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> EvalResult:
        """Mean loss over an evaluation set; see `Engine`."""
        self.ds.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for cpu_batch in micro_batches:
            _objective, loss_sum, tokens = self._forward(self._to_device(cpu_batch), 1.0)
            sums += torch.stack([loss_sum.double(), tokens.double()])
        if self.world_size > 1:
            torch.distributed.all_reduce(sums)
        total_loss, total_tokens = sums.tolist()
        settle(self.ds)
        self.ds.train()
        return EvalResult(total_loss / total_tokens if total_tokens else float("nan"), int(total_tokens))

    @torch.no_grad()
    def sample(self, prompt_ids: list[int], max_new_tokens: int, end_tokens: Collection[int] | None) -> list[int]:
        """Greedy continuation; every rank computes the same."""
        from outcore.model import generate_tokens

        ids = torch.tensor([prompt_ids], dtype=torch.long)
        tokens = generate_tokens(self.ds, ids, max_new_tokens, end_tokens=end_tokens)
        settle(self.ds)
        return tokens.tolist()

    # --- checkpoints

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in named_checkpoint_parameters(self.network).items() if p.requires_grad]

    def _shape(self, param: Any) -> tuple[int, ...]:
        return tuple(param.ds_shape) if hasattr(param, "ds_shape") else tuple(param.shape)

    def _saved_bytes(self) -> int:
        """Bytes of weights, fp32 masters and two moments."""
        states = sum(torch.Size(self._shape(p)).numel() * (p.dtype.itemsize + 12) for _, p in self._trainable())
        return states + sum(t.numel() * t.dtype.itemsize for t in persistent_buffers(self.network).values())

    def facts(self) -> EngineFacts:
        """Pinned: the staged engine's pool; None with stock offload, whose buffers lie in torch's cache of pinned
        memory."""
        session = getattr(self.ds.optimizer, "session", None)
        return EngineFacts(self._state_bytes, session.memory.pinned_bytes if session is not None else None)

    def save(self, folder: Path, on_file: Callable[[Path, int], None]) -> dict:
        """Write shards; see `Engine`. Every rank takes part, rank 0 writes."""
        trainable = dict(self._trainable())
        buffers = persistent_buffers(self.network)
        plans = [TensorPlan(n, p.dtype, self._shape(p)) for n, p in trainable.items()]
        plans += [TensorPlan(n, t.dtype, tuple(t.shape)) for n, t in buffers.items()]

        def weight(name: str) -> torch.Tensor:
            return buffers[name] if name in buffers else self.state.get_weight(trainable[name])

        self._write_family(folder, "model", plans, weight, on_file)
        for family in FAMILIES:
            plans = [TensorPlan(n, torch.float32, self._shape(p)) for n, p in trainable.items()]
            self._write_family(folder, family, plans, lambda n, f=family: self.state.get(trainable[n], f), on_file)
        return {
            "engine": self.name,
            "updates": self.updates,
            "optimizer_state": True,
            "loss_scaler": self.state.scaler_state(),
        }

    def _write_family(
        self,
        folder: Path,
        stem: str,
        plans: list[TensorPlan],
        value: Callable[[str], torch.Tensor],
        on_file: Callable[[Path, int], None] | None = None,
        max_shard_bytes: int = MAX_SHARD_BYTES,
    ) -> list[tuple[str, list[TensorPlan]]]:
        shards = plan_shards(plans, stem, max_shard_bytes)
        for file_name, group in shards:
            if self.rank == 0:
                crc = write_shard(folder / file_name, group, value)
                if on_file:
                    on_file(folder / file_name, crc)
            else:
                for plan in group:  # gathering a partitioned tensor needs every rank
                    value(plan.name)
        return shards

    def load(self, folder: Path, state: dict) -> None:
        """Restore weights, fp32 master, moments, step counter and loss scale; see `Engine`."""
        if not state["optimizer_state"]:
            raise CheckpointError(
                f"{folder}: was saved with optimizer states on NVMe, which stock DeepSpeed cannot restore: it holds "
                "weights only, and training on from it would silently lose the optimizer's moments. Start a new run "
                "from its exported model, or train with --zero_stage zero3 (RAM offload), whose checkpoints resume."
            )
        check_optimizer(folder, state, "adamw")
        trainable = dict(self._trainable())
        weights = ShardReader(folder, "model")
        weights.check_holds({name: self._shape(param) for name, param in trainable.items()})
        self.state.prepare(int(state["updates"]))
        readers = {family: ShardReader(folder, family) for family in FAMILIES}
        self.state.begin_restore()
        for name, param in trainable.items():
            self.state.restore(param, weights.read(name), {f: readers[f].read(name) for f in FAMILIES})
        self.state.end_restore()
        for name, buffer in persistent_buffers(self.network).items():
            if name in weights:
                buffer.copy_(weights.read(name))
        self.updates = int(state["updates"])
        self.state.set_scaler_state(state.get("loss_scaler", {}))

    def export(self, folder: Path, tokenizer: Any = None, adapter_only: bool = False) -> None:
        """Write the 16-bit model for `from_pretrained`; see `outcore.checkpoint.export`."""
        export_model(
            folder,
            self.network,
            self._whole_weight,
            tokenizer=tokenizer,
            rank=self.rank,
            adapter_only=adapter_only,
            origin=self.loaded.origin,
        )

    def _whole_weight(self, param: nn.Parameter) -> torch.Tensor:
        return self.state.get_weight(param)

    def describe(self) -> str:
        """Line for people: what was chosen."""
        stage = self.ds.zero_optimization_stage()
        return f"DeepSpeed, ZeRO stage {stage}, {self.world_size} rank(s) on {self.device.type}"

    def trace(self, plan: TracePlan, say: Callable[[str], None]) -> None:
        """Refuse: the streaming engine alone records a timeline."""
        raise EngineError("a timeline is recorded by the streaming engine only. Leave --trace out.")

    def close(self) -> None:
        """Release what DeepSpeed holds; the process group stays until the process ends."""
        if self._closed:
            return
        self._closed = True
        self.ds.destroy()

"""Checkpoints of the streaming engine in the engine-neutral layout: safetensors shards by parameter name.

Families: `model` (trainable weights as the forward uses them, and persistent buffers), `master`, `exp_avg` and
`exp_avg_sq` (fp32). The same files as `outcore.engine.deepspeed.engine` writes, so that either engine resumes the
other's. Whatever their format, and wherever they live, states are written as fp32 and read back bit by bit. One tensor
and, of states on NVMe, one chunk in memory at a time.

Random numbers by place, not by order: dropout in a recomputed layer repeats what its forward drew.

Every call of a unit on a micro-batch starts the generators from a seed made of (run seed, step, micro-batch, unit), so
the numbers depend neither on the schedule nor on residency nor on prefetching.

Dynamic loss scaling for fp16, with DeepSpeed's rules, so that either engine goes on from the other's state.

Rules (deepspeed/runtime/fp16/loss_scaler.py): an overflow uses up one of `hysteresis` allowances, then halves the
scale; `window` steps without one double it and restore the allowances."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from outcore.checkpoint import MAX_SHARD_BYTES, CheckpointError, ShardReader, TensorPlan, plan_shards, write_shard
from outcore.engine.base import EngineError
from outcore.model import LoadedModel
from outcore.model.facts import checkpoint_name, persistent_buffers
from outcore.model.forward import unwrap
from outcore.optim import STATE_NAMES
from outcore.optim.formats import StateName
from outcore.staging.shared import Alone, Ranks
from outcore.states import Homes

OnFile = Callable[[Path, int], None]


class StreamState:
    """Reads and writes the homes of one model. No update may be under way.

    With several `ranks` all call together: rank 0 writes, and each tensor of states is put together in `buffer`, which
    they share, from what each rank keeps of it."""

    def __init__(
        self, loaded: LoadedModel, homes: Homes, ranks: Ranks | None = None, buffer: torch.Tensor | None = None
    ) -> None:
        self._loaded, self._homes = loaded, homes
        self._ranks, self._buffer = ranks or Alone(), buffer
        slots = [homes.weights.slot(checkpoint_name(name))[1] for name, _ in unwrap(loaded.model).named_parameters()]
        self._trainable = {slot.name: slot.shape for slot in slots if slot.trainable}

    def size_bytes(self) -> int:
        """Bytes of tensors that `save` writes."""
        numel = {name: torch.Size(shape).numel() for name, shape in self._trainable.items()}
        weights = sum(numel[name] * self._homes.weights.dtype(name).itemsize for name in numel)
        states = sum(4 * numel[name] * len(self._homes.families(name)) for name in numel)
        return weights + states + sum(t.nbytes for t in persistent_buffers(self._loaded.model).values())

    def save(self, folder: Path, on_file: OnFile, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        """Write every family into `folder`; `on_file(path, crc32)` for each finished file."""
        buffers = persistent_buffers(self._loaded.model)
        plans = [TensorPlan(n, self._homes.weights.dtype(n), shape) for n, shape in self._trainable.items()]
        plans += [TensorPlan(n, t.dtype, tuple(t.shape)) for n, t in buffers.items()]

        def weight(name: str) -> torch.Tensor:
            return buffers[name] if name in buffers else self._homes.weights.read(name)

        if self._ranks.rank == 0:
            for file_name, group in plan_shards(plans, "model", max_shard_bytes):
                on_file(folder / file_name, write_shard(folder / file_name, group, weight))
        for family in STATE_NAMES:
            plans = [TensorPlan(n, torch.float32, self._trainable[n]) for n in self._with(family)]
            for file_name, group in plan_shards(plans, family, max_shard_bytes):
                if self._ranks.rank == 0:
                    crc = write_shard(folder / file_name, group, lambda n, f=family: self._whole_state(n, f))
                    on_file(folder / file_name, crc)
                else:
                    for plan in group:
                        self._whole_state(plan.name, family)

    def _whole_state(self, name: str, family: StateName) -> torch.Tensor:
        """Gather a state tensor from all ranks. It belongs to rank 0 until that asks for the next one."""
        if self._buffer is None:
            return self._homes.read_state(name, family)
        self._ranks.barrier("tensor written by rank 0", timeout_s=math.inf)
        shape = torch.Size(self._trainable[name])
        value = self._buffer[: 4 * shape.numel()].view(torch.float32)
        self._homes.read_state(name, family, into=value)
        self._ranks.barrier(f"{family} of {name}")
        return value.view(shape)

    def load(self, folder: Path, state: dict) -> None:
        """Set everything from `folder`. CheckpointError, before anything is changed, when it does not fit; when a value
        in it cannot be, with the states half set."""
        if not state["optimizer_state"]:
            raise CheckpointError(
                f"{folder}: was saved with optimizer states on NVMe by stock DeepSpeed and holds weights only; "
                "training on from it would silently lose the optimizer's moments. Start a new run from its exported "
                "model."
            )
        weights = ShardReader(folder, "model")
        readers = {family: ShardReader(folder, family) for family in STATE_NAMES}
        weights.check_holds(self._trainable)
        for family in STATE_NAMES:
            readers[family].check_holds({name: self._trainable[name] for name in self._with(family)})
        for name in filter(self._homes.has_states, self._trainable):
            for families in MASTER_AND_MOMENTS:
                values: dict[StateName, torch.Tensor] = {
                    f: readers[f].read(name).to(torch.float32) for f in families if f in self._homes.families(name)
                }
                if "exp_avg_sq" in values:
                    _check_mean_of_squares(folder, name, values["exp_avg_sq"])
                self._homes.write_states(name, values)
        self._homes.flush_states()
        self._ranks.barrier("states set by every rank", timeout_s=math.inf)  # a master sets its parameter, too
        for name in self._trainable if self._ranks.rank == 0 and not self._homes.state_format.split_master else ():
            saved = weights.read(name)
            if saved.dtype == self._homes.weights.dtype(name):
                self._homes.weights.write(name, saved)
        self._ranks.barrier("parameters set by rank 0", timeout_s=math.inf)
        for name, buffer in persistent_buffers(self._loaded.model).items():
            if name in weights:
                buffer.copy_(weights.read(name))

    def _with(self, family: StateName) -> list[str]:
        """Names of parameters with these states."""
        return [name for name in self._trainable if family in self._homes.families(name)]


MASTER_AND_MOMENTS: tuple[tuple[StateName, ...], ...] = (("master",), ("exp_avg", "exp_avg_sq"))
"""States that are set together: compressed and 8-bit moments of a chunk lie together and are written together."""


def _check_mean_of_squares(folder: Path, name: str, value: torch.Tensor) -> None:
    if bool((value < 0).any()):
        raise CheckpointError(
            f"{folder}: exp_avg_sq of {name} is below zero somewhere, which a mean of squares cannot be: the file is "
            "damaged, or was written by something else. Resume from another checkpoint."
        )


def seed_of(seed: int, step: int, micro_batch: int, unit: int) -> int:
    """A 63-bit seed."""
    digest = hashlib.blake2b(f"{seed}/{step}/{micro_batch}/{unit}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class PartRandom:
    """Seeds the CPU's and the device's default generator for one step. Micro-batch m of rank r is number m *
    world_size + r of the step, so one rank that takes them all in this order draws the same."""

    def __init__(self, device: torch.device, seed: int, step: int, rank: int = 0, world_size: int = 1) -> None:
        self.device, self.seed, self.step = device, seed, step
        self.rank, self.world_size = rank, world_size

    def at(self, micro_batch: int, unit: int) -> None:
        """Start the generators for this call."""
        value = seed_of(self.seed, self.step, micro_batch * self.world_size + self.rank, unit)
        torch.default_generator.manual_seed(value)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index or 0].manual_seed(value)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """The default generators are afterwards as they were before."""
    cpu = torch.default_generator.get_state()
    cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, device)


@dataclass
class LossScaler:
    """`enabled` False: the scale is 1 and nothing changes it (bf16, fp32)."""

    enabled: bool
    cur_scale: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    min_scale: float = 1.0
    cur_iter: int = 0
    last_overflow_iter: int = -1
    cur_hysteresis: int = 2

    def __post_init__(self) -> None:
        if not self.enabled:
            self.cur_scale = 1.0
        if self.cur_scale <= 0 or self.window < 1 or self.hysteresis < 1 or self.min_scale <= 0:
            raise ValueError(
                "loss scaling needs positive scales, a window and hysteresis of at least 1; got "
                f"scale {self.cur_scale}, min_scale {self.min_scale}, window {self.window}, "
                f"hysteresis {self.hysteresis}"
            )
        self.cur_hysteresis = self.hysteresis

    def update(self, overflow: bool) -> None:
        """After a step. EngineError when the gradients overflow even at the lowest scale."""
        if not self.enabled:
            return
        if overflow:
            if self.cur_hysteresis > 1:
                self.cur_hysteresis -= 1
            elif self.cur_scale <= self.min_scale:
                raise EngineError(
                    f"fp16 gradients overflow even at the lowest loss scale ({self.min_scale:g}), so no step can be "
                    "made. Lower --learning_rate, or train in bf16; the last checkpoint is intact."
                )
            else:
                self.cur_scale = max(self.cur_scale / 2, self.min_scale)
            self.last_overflow_iter = self.cur_iter
        else:
            stable_steps = self.cur_iter - self.last_overflow_iter - 1
            if stable_steps > 0 and stable_steps % self.window == 0:
                self.cur_hysteresis = self.hysteresis
                self.cur_scale *= 2
        self.cur_iter += 1

    _SAVED = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")

    def state(self) -> dict[str, float]:
        """State for a checkpoint; empty when not enabled."""
        return {name: getattr(self, name) for name in self._SAVED} if self.enabled else {}

    def restore(self, state: dict[str, float]) -> None:
        """Take back what `state` returned; what is missing stays."""
        for name in self._SAVED if self.enabled else ():
            if name in state:
                setattr(self, name, type(getattr(self, name))(state[name]))

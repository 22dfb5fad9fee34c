"""Checkpoints of the streaming engine in the engine-neutral layout: safetensors shards by parameter name.

Families: `model` (trainable weights as the forward uses them, and persistent buffers), `master`, `exp_avg` and
`exp_avg_sq` (fp32). The same files as `outcore.engine.deepspeed.engine` writes, so that either engine resumes the
other's. Whatever their format, and wherever they live, states are written as fp32 and read back bit by bit. One tensor
and, of states on NVMe, one chunk in memory at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from outcore.checkpoint import MAX_SHARD_BYTES, CheckpointError, ShardReader, TensorPlan, plan_shards, write_shard
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
        """A tensor of states from all ranks: rank 0's until it asks for the next one."""
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
"""What is set at a time: compressed and 8-bit moments of a chunk lie together and are written together."""


def _check_mean_of_squares(folder: Path, name: str, value: torch.Tensor) -> None:
    if bool((value < 0).any()):
        raise CheckpointError(
            f"{folder}: exp_avg_sq of {name} is below zero somewhere, which a mean of squares cannot be: the file is "
            "damaged, or was written by something else. Resume from another checkpoint."
        )

"""A save of several ranks gathers parameter by parameter; memory holds one whole tensor at a time, on every rank."""

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from outcore.checkpoint import ShardReader, TensorPlan
from outcore.engine.deepspeed.engine import DeepSpeedEngine


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("max_shard_bytes", [1 << 30, 1 << 12])
def test_one_gathered_tensor_is_alive_at_a_time(tmp_path: Path, rank: int, max_shard_bytes: int) -> None:
    numels = {f"layer.{index}.weight": 700 + index for index in range(8)}
    memory: list[weakref.ref[np.ndarray]] = []
    most, gathered = 0, []

    def gather(name: str) -> torch.Tensor:
        nonlocal most
        whole = np.full(numels[name], len(gathered), dtype=np.float32)
        memory.append(weakref.ref(whole))
        gathered.append(name)
        most = max(most, sum(one() is not None for one in memory))
        return torch.from_numpy(whole)

    engine: Any = SimpleNamespace(rank=rank)
    plans = [TensorPlan(name, torch.float32, (numel,)) for name, numel in numels.items()]
    DeepSpeedEngine._write_family(engine, tmp_path, "master", plans, gather, max_shard_bytes=max_shard_bytes)
    assert gathered == list(numels) and most == 1, "every rank joins in every gathering, in one order"
    if rank == 0:
        reader = ShardReader(tmp_path, "master")
        assert [float(reader.read(name)[0]) for name in numels] == list(range(8))

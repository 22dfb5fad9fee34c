"""The planner's shares against the engine's own classes, parameter by parameter: what lives on the drive, what the ring
keeps, what a step moves. Models on the meta device; no drive is used."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import outcore.engine.deepspeed.staged.optimizer as homes_room
from outcore.common.quantities import GIB
from outcore.engine.deepspeed.build import facts_for_builder
from outcore.engine.deepspeed.config.builder import build_config
from outcore.engine.deepspeed.staged.optimizer import StagedOptimizer
from outcore.engine.deepspeed.staged.params import StagedParams
from outcore.engine.deepspeed.staged.plan import StagedPlan, make_plan
from outcore.engine.deepspeed.staged.states import Share
from outcore.model import LoraSettings, preset_shape
from outcore.model.adapters import with_adapters
from outcore.model.facts import model_class_of, skeleton_and_tied
from outcore.model.presets import preset_config
from outcore.optim import state_format
from outcore.plan.record import Plan
from outcore.sizing.ring import NEVER, worth_keeping
from outcore.sizing.shape import ModelShape
from outcore.sizing.swapping import WeightCounts, partition_numel
from outcore.states.placement import GradPlace, StateChunk, spill
from outcore.states.ring.schedule import RingSchedule
from outcore.states.ring.slots import needed_bytes, ring_slots
from tests.engine.deepspeed.config_cases import run_of
from tests.plan.fakes import plan_of, server

DTYPE = torch.bfloat16
PASSES = 4
"""Micro-batches a step."""
RAM_BYTES = 400 * GIB


class Param:
    """What the engine asks of DeepSpeed's partitioned parameter."""

    def __init__(self, weight: torch.Tensor, ranks: int) -> None:
        self.requires_grad = weight.requires_grad
        self.ds_id, self.ds_numel = id(weight), weight.numel()
        self._numel = partition_numel(weight.numel(), ranks)
        self.ds_tensor = SimpleNamespace(ds_numel=self._numel)
        self.on_drive = False

    def partition_numel(self) -> int:
        return self._numel


def meta_memory(n_bytes: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8, device="meta")


class Homes:
    """Of shares, as the ring asks for them (`ShareStates`)."""

    def __init__(self, gradients_on_drive: set[int]) -> None:
        self._gradients = gradients_on_drive

    def param_piece(self, chunk: StateChunk) -> torch.Tensor | None:
        return chunk.unit.home  # pyright: ignore[reportAttributeAccessIssue]

    def grad_place(self, chunk: StateChunk) -> GradPlace | None:
        return GradPlace(None, "", 0, DTYPE) if chunk.unit.index in self._gradients else None  # pyright: ignore


def place(params: list[Param], plan: StagedPlan, sub_group_size: int) -> None:
    """`on_drive` of each, as loading and the optimizer decide."""
    if not plan.param_store_bytes:
        return
    swapper: Any = SimpleNamespace(_element_bytes=DTYPE.itemsize)
    for param in params:
        param.on_drive = StagedParams.swappable_tensor(swapper, param)
    trained = [param for param in params if param.requires_grad]
    optimizer: Any = SimpleNamespace(
        plan=plan, dtype=DTYPE, session=SimpleNamespace(params=swapper), sub_group_size=sub_group_size,
        memory=SimpleNamespace(homes=SimpleNamespace(take=meta_memory)),
        trainable_param_groups=[{"params": trained}], param_groups_fp16_flat_cpu_memory=[],
    )  # fmt: skip
    optimizer._create_fp16_sub_groups = lambda group: StagedOptimizer._create_fp16_sub_groups(optimizer, group)
    StagedOptimizer._create_param_groups_fp16_flat_cpu_memory(optimizer)
    room = optimizer.param_groups_fp16_flat_cpu_memory[0].numel()
    for sub_group in optimizer._create_fp16_sub_groups(trained):  # as `_create_fp16_partitions_with_defragmentation`
        room -= sum(param.partition_numel() for param in sub_group)
        for param in sub_group if room >= 0 else ():
            param.on_drive = False
    optimizer.module = SimpleNamespace(parameters=lambda: params)
    optimizer._is_on_drive = lambda param: param.on_drive
    for param in StagedOptimizer._frozen_for_ram(optimizer):
        param.on_drive = False


def moved_by_engine(params: list[Param], plan: StagedPlan, sub_group_size: int) -> tuple[int, int]:
    """(read, written) bytes of a rank's step: the mean of one whose update goes to and of one whose goes fro."""
    place(params, plan, sub_group_size)
    chosen = state_format(plan.states)
    chunks: list[StateChunk] = []
    optimizer: Any = SimpleNamespace(gradient_accumulation_dtype=DTYPE)
    trained, on_drive = [p for p in params if p.requires_grad], [p for p in params if p.on_drive]
    large = StagedOptimizer._large_shares(optimizer, trained) if plan.grad_staging_bytes else {}
    gradients = {index for index, param in enumerate(trained) if param.ds_id in large}
    for index, param in enumerate(trained):
        numel = param.partition_numel()
        home = None if param.on_drive else meta_memory(numel * DTYPE.itemsize).view(DTYPE)
        share = Share(param, index, 0, numel, 0, index << 40, DTYPE, None, home)
        chunks += share.chunks(chosen)
    spill(chunks, plan.state_ram_bytes)
    for chunk in chunks:
        chunk.buffer = None if chunk.on_nvme else meta_memory(chunk.n_bytes)
    homes: Any = Homes(gradients)
    order = [c for c in chunks if c.on_nvme or homes.param_piece(c) is None or homes.grad_place(c) is not None]
    read = written = 0
    if order:
        memory: Any = SimpleNamespace(take=meta_memory)
        slots = ring_slots(homes, order, memory, plan.ring_bytes, plan.ring_slots)

        def worth(chunk: StateChunk) -> int:
            return worth_keeping(needed_bytes(homes, chunk), slots[0].n_bytes) if chunk.on_nvme else NEVER

        schedule = RingSchedule(order, slots, worth)
        for _ in range(2):
            for chunk in order:
                states, param = chunk.n_bytes * chunk.on_nvme, chunk.numel * DTYPE.itemsize
                param *= homes.param_piece(chunk) is None
                written += param
                if not schedule.keeps(chunk):
                    written += states
                    read += states + param * chosen.split_master
            schedule.turn()
    grad_bytes = sum(c.numel * DTYPE.itemsize for c in order if homes.grad_place(c) is not None)
    read = read // 2 + PASSES * grad_bytes
    written = written // 2 + PASSES * grad_bytes
    lent = sum(p.partition_numel() for p in on_drive if p.requires_grad and not plan.grad_staging_bytes)
    read += 2 * DTYPE.itemsize * (PASSES * sum(p.partition_numel() for p in on_drive) - lent)
    return read, written


@functools.cache
def model_of(preset: str, lora_r: int) -> tuple[ModelShape, WeightCounts, list[torch.Tensor]]:
    """(shape, facts, parameters) of a preset with adapters, once for all cases."""
    shape, config = preset_shape(preset), preset_config(preset)
    model, tied_numels = skeleton_and_tied(model_class_of(config), config)
    if lora_r:
        shape = shape.with_lora(lora_r)
        with torch.device("meta"):
            model = with_adapters(model, LoraSettings(r=lora_r, alpha=lora_r))
    return shape, facts_for_builder(model, tied_numels), list(model.parameters())


def both(
    preset: str, ranks: int, lora_r: int, settings: dict[str, Any], outcore: dict[str, Any]
) -> tuple[Plan, tuple[int, int]]:
    """A run as it is planned, and what the engine would move that is told the same."""
    shape, facts, weights = model_of(preset, lora_r)
    flags = {"zero_stage": "infinity", "nvme_offload_path": "/mnt/nvme", "strict_offload": True, **settings}
    flags |= {"gradient_accumulation_steps": PASSES}
    chosen, run = run_of({"outcore": outcore}, flags, {"world_size": ranks, "ram_available_bytes": RAM_BYTES})
    built = build_config(chosen, facts, run, nvme_check=lambda path, gb: (True, ""), staged=True)
    planned = plan_of(shape, server(num_gpus=ranks, ram_bytes=RAM_BYTES), built.offload, chosen, seq_length=64)
    assert planned.staged and planned.accumulation == PASSES
    params = [Param(weight, ranks) for weight in weights]
    sub_group_size = built.config["zero_optimization"]["sub_group_size"]
    return planned, moved_by_engine(params, make_plan(chosen, built.offload, facts, run), sub_group_size)


SLOW = pytest.mark.slow


@pytest.mark.more(after=20)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=SLOW), 4, pytest.param(8, marks=SLOW)])
@pytest.mark.parametrize(("preset", "lora_r", "settings", "outcore"), [
    ("gpt2", 0, {"max_in_cpu_gb": 0.0}, {}),
    ("gpt2", 0, {"max_in_cpu_gb": 0.0}, {"state_format": "fp32", "staging_bytes": GIB // 4}),
    ("gpt2", 0, {"max_in_cpu_gb": 0.0, "nvme_offload_gradients": True}, {}),
    ("gpt2", 0, {"nvme_offload_params": False}, {"state_format": "split8"}), ("gpt2", 16, {"max_in_cpu_gb": 0.0}, {}),
    ("gpt2", 16, {"max_in_cpu_gb": 0.02}, {}), ("moe-small", 0, {"max_in_cpu_gb": 0.0}, {}),
    ("moe-small", 8, {"nvme_offload_params": False}, {}), ("t5-small", 0, {"max_in_cpu_gb": 0.0}, {}),
    ("llama-1b", 0, {}, {}), ("llama-1b", 0, {}, {"ram_budget_gib": 12}),
    ("llama-1b", 0, {"nvme_offload_params": False}, {"ram_budget_gib": 18}),
    ("llama-1b", 0, {"nvme_offload_optimizer": False, "max_in_cpu_gb": 0.5}, {}),
    ("llama-1b", 16, {"nvme_offload_params": False}, {}), ("llama-3b", 0, {}, {}), ("llama-3b", 16, {}, {}),
    ("llama-3b", 16, {}, {"ram_budget_gib": 14}), ("moe-small", 8, {"max_in_cpu_gb": 0.01}, {}),
    ("llama-8b", 16, {"max_in_cpu_gb": 3.0}, {}), ("llama-8b", 16, {"nvme_offload_params": False}, {}),
    ("llama-8b", 64, {"max_in_cpu_gb": 0.0}, {}), ("qwen3-4b", 8, {}, {}),
])  # fmt: skip
def test_a_step_moves_what_is_planned(preset, ranks, lora_r, settings, outcore, monkeypatch):
    monkeypatch.setattr(homes_room.dist, "get_rank", lambda: 0)
    planned, (read, written) = both(preset, ranks, lora_r, settings, outcore)
    assert planned.drive_read_bytes_per_step == pytest.approx(ranks * read, rel=0.01)
    assert planned.drive_written_bytes_per_step == pytest.approx(ranks * written, rel=0.01)

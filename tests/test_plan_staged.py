"""Staged offload in the plan: bytes by hand, what the engine is told by the same settings, flags that reproduce it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from plan_fakes import server
from transformers import AutoConfig, AutoModelForCausalLM

from outcore.engine.deepspeed.builder import DeepSpeedSettings, ModelFacts, RunFacts, build_config
from outcore.engine.deepspeed.staged.plan import make_plan
from outcore.engine.deepspeed.staged.shares import Share, ShareLayout
from outcore.engine.deepspeed.swapping import partition_numel
from outcore.engine.stream.ring_sizes import kept_places, worth_keeping
from outcore.engine.stream.ring_slots import needed_bytes
from outcore.model.presets import check_preset_name
from outcore.model.settings import ModelSettings
from outcore.optim import state_format
from outcore.plan.choose import best_stage
from outcore.plan.deepspeed import DeepSpeedLayout, plan_deepspeed
from outcore.plan.deepspeed_staged import Staged
from outcore.plan.profile import load_hardware
from outcore.plan.request import RunRequest
from outcore.plan.shape import preset_shape
from outcore.train.forecast import RunFigures, run_plan
from outcore.units import GIB

LAPTOP = load_hardware("rtx4070-laptop")
SHAPE = preset_shape("llama-3b")
N = 3_212_749_824
GB1 = 10**9
LITTLE = GIB
"""Of staging memory: a ring of 21 slots for chunks of 4 Mi parameters, states and 16-bit parameters."""
KEPT = 20 << 22
"""Parameters whose states stay in that ring from one update to the next."""


def test_all_on_the_drive_by_hand():
    layout = DeepSpeedLayout("infinity", "nvme", "nvme", 2, 4, Staged("split", staging_bytes=LITTLE))
    p = plan_deepspeed(SHAPE, RunRequest(), LAPTOP, 1024, layout)
    on_drive = 2 * N - GB1  # --max_in_cpu_gb keeps 1 GB of parameters in RAM
    assert p.part_bytes("nvme", "parameters") == on_drive
    assert (p.part_bytes("nvme", "master"), p.part_bytes("nvme", "moments")) == (2 * N, 8 * N)
    assert p.part_bytes("nvme", "gradients") == 0
    assert p.drive_written_bytes_per_step == 10 * (N - KEPT) + on_drive
    update = 10 * (N - KEPT) + on_drive * (1 - KEPT / N)
    assert p.drive_read_bytes_per_step == int(update + 2 * 3 * on_drive)  # twice per micro-batch but the first
    in_ram = sum(p.part_bytes(tier, name) for tier in ("ram", "pinned") for name in ("gradients", "parameters"))
    assert in_ram == 2 * N + GB1
    assert p.part_bytes("ram", "ring of states on their way") <= GIB


def test_a_format_with_whole_masters_needs_no_parameters_for_the_update():
    reads = [
        plan_deepspeed(
            SHAPE, RunRequest(), LAPTOP, 1024,
            DeepSpeedLayout("infinity", "nvme", "nvme", 2, 1, Staged(states, staging_bytes=LITTLE)),
        ).drive_read_bytes_per_step
        for states in ("split", "fp32")
    ]  # fmt: skip
    kept = 17 << 22  # of 18 slots
    assert reads == [int(10 * (N - KEPT) + (2 * N - GB1) * (1 - KEPT / N)), 12 * (N - kept)]


def test_the_ring_takes_what_ram_and_staging_memory_leave_and_saves_as_much_each_way():
    """Parameters in RAM, fp32 states: 48 MiB a slot. 4 B a parameter of homes, 3 GiB for the process and 2 for others;
    half of the RAM left at most, and a third of the states."""

    def planned(staging_gib: int, ram_gib: float):
        machine = dataclasses.replace(LAPTOP, ram_bytes=int(ram_gib * GIB))
        told = Staged("fp32", staging_bytes=staging_gib * GIB)
        return plan_deepspeed(
            SHAPE, RunRequest(), machine, 1024, DeepSpeedLayout("infinity", "nvme", "cpu", 2, 1, told)
        )

    homes_gib = 4 * N / GIB + 5
    found = []
    for staging_gib, ram_gib in ((1, 64), (4, 64), (4, homes_gib + 4), (4, homes_gib + 1), (32, 64)):
        p = planned(staging_gib, ram_gib)
        ring = p.part_bytes("ram", "ring of states on their way")
        slots = ring // (48 << 20)
        found.append(ring / GIB)
        assert p.drive_read_bytes_per_step == p.drive_written_bytes_per_step
        whole = 12 * (N - (slots - max(1, slots // 16) << 22))  # of k and v chunks fill three quarters of a slot
        assert whole <= p.drive_read_bytes_per_step < 1.01 * whole
    assert found == pytest.approx([1, 4, 2, 1, 4 * N / GIB], abs=0.06)


class Homes:
    """Of shares whose parameters are in RAM, and gradients too."""

    def param_piece(self, chunk):
        return chunk.unit.home

    def grad_place(self, chunk):
        return None


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("preset", ["llama-1b", "llama-3b"])
def test_the_ring_keeps_of_the_real_weights_what_is_planned(preset: str, ranks: int):
    """Every chunk of rank 0 by the engine's own classes; vectors, which the planner leaves out, are 0.01 % of them."""
    shape, states = preset_shape(preset), state_format("split")
    config = check_preset_name(preset)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.model_type, **config.fields))
    layout = DeepSpeedLayout("infinity", "nvme", "cpu", 2, 1, Staged("split"))
    p = plan_deepspeed(shape, RunRequest(), dataclasses.replace(LAPTOP, num_gpus=ranks), 1024, layout)
    chunks = []
    for index, weight in enumerate(model.parameters()):
        numel = partition_numel(weight.numel(), ranks)
        share = Share(None, index, 0, numel, 0, index << 40, ShareLayout(torch.bfloat16), None, weight)
        chunks += share.chunks(states)
    slot = max(needed_bytes(Homes(), chunk) for chunk in chunks)
    num_slots = p.part_bytes("ram", "ring of states on their way") // ranks // slot
    worths = [worth_keeping(needed_bytes(Homes(), chunk), slot) for chunk in chunks]
    kept = 0
    for _ in range(2):
        kept += sum(chunks[place].n_bytes for place in kept_places(worths, num_slots))
        chunks, worths = chunks[::-1], worths[::-1]
    moved = 2 * sum(chunk.n_bytes for chunk in chunks) - kept
    assert ranks * moved == pytest.approx(p.drive_read_bytes_per_step + p.drive_written_bytes_per_step, rel=5e-3)


@pytest.mark.parametrize(("params", "least_gib"), [("cpu", 1), ("nvme", 3)])
def test_a_ring_that_grows_turns_no_run_away(params: Any, least_gib: int):
    def planned(staging_gib: int, ram_gib: float):
        machine = dataclasses.replace(LAPTOP, ram_bytes=int(ram_gib * GIB))
        layout = DeepSpeedLayout("infinity", "nvme", params, 2, 1, Staged("split", staging_bytes=staging_gib * GIB))
        return plan_deepspeed(SHAPE, RunRequest(), machine, 1024, layout)

    tenths = [tenth / 10 for tenth in range(120, 220)]
    little = [planned(least_gib, ram_gib).fits for ram_gib in tenths]
    assert 0 < sum(little) < len(tenths)  # from some amount on
    assert [planned(8, ram_gib).fits for ram_gib in tenths] == little


def test_staging_memory_is_shared_by_parameters_gradients_and_the_ring():
    facts = ModelFacts(8_030_261_248, 128_256 * 4096)
    run = RunFacts(precision="bf16", lr_scheduler_type="none", ram_available_bytes=200 * GIB)
    chosen = DeepSpeedSettings(zero_stage="infinity", nvme_offload_path="/data", strict_offload=True)
    for outcore in ({}, {"nvme_offload_gradients": True}):
        said = {"outcore": outcore}
        built = build_config(said, chosen, facts, run, nvme_check=lambda path, gb: (True, ""), staged=True)
        plan = make_plan(built, facts, run)
        assert plan.ring_bytes + plan.staging_bytes + plan.grad_staging_bytes == 8 * GIB
        assert not plan.notes  # nothing was raised


@pytest.mark.parametrize("passes", [1, 4])
def test_gradients_on_the_drive_by_hand(passes: int):
    plans = [
        plan_deepspeed(
            SHAPE, RunRequest(), LAPTOP, 1024,
            DeepSpeedLayout(
                "infinity", "nvme", "nvme", 2, passes, Staged("fp32", gradients_on_nvme=on_nvme, staging_bytes=LITTLE)
            ),
        )
        for on_nvme in (False, True)
    ]  # fmt: skip
    ram, drive = plans
    assert (ram.homes["gradients"], drive.homes["gradients"]) == ("RAM", "NVMe")
    assert ["--nvme_offload_gradients true" in plan.flags for plan in plans] == [False, True]
    more = 12 * (2 << 22)  # a slot takes the gradient too: 15 of 16 chunks are kept, not 17 of 18
    assert drive.drive_written_bytes_per_step - ram.drive_written_bytes_per_step == passes * 2 * N + more
    not_lent = 2 * (2 * N - GB1)  # without gradients in RAM there is no memory of theirs for the first micro-batch
    assert drive.drive_read_bytes_per_step - ram.drive_read_bytes_per_step == passes * 2 * N + not_lent + more
    in_ram = [sum(part.size_bytes for part in plan.parts if part.tier in ("ram", "pinned")) for plan in plans]
    assert 2 * N - (1 << 28) < in_ram[0] - in_ram[1] < 2 * N  # less the memory through which they flow
    assert drive.time.step_s > ram.time.step_s


@pytest.mark.parametrize(
    ("settings", "outcore"),
    [
        ({"zero_stage": "zero3"}, {}),
        ({"zero_stage": "infinity", "nvme_offload_path": "/mnt/nvme"}, {}),
        ({"zero_stage": "infinity", "nvme_offload_path": "/mnt/nvme"}, {"staging_bytes": GIB, "state_format": "fp32"}),
        ({"zero_stage": "infinity", "nvme_offload_path": "/mnt/nvme", "nvme_offload_params": False}, {}),
        ({"zero_stage": "infinity", "nvme_offload_path": "/mnt/nvme"}, {"ram_budget_gib": 20}),
        ({"zero_stage": "infinity", "nvme_offload_path": "/mnt/nvme", "max_in_cpu_gb": 3.0}, {}),
        ({"zero_stage": "infinity", "nvme_offload_path": "/mnt/nvme", "nvme_offload_gradients": True}, {}),
        (
            {"zero_stage": "infinity", "nvme_offload_path": "/mnt/nvme", "nvme_offload_gradients": True},
            {"ram_budget_gib": 12},
        ),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_plan_of_a_run_is_what_the_engine_is_told(settings: dict[str, Any], outcore: dict[str, Any], ranks: int):
    facts = ModelFacts(SHAPE.total_params, SHAPE.largest_weight_numel, tied_numels=SHAPE.tied_numels)
    machine = server(num_gpus=ranks)
    run = RunFacts(precision="bf16", lr_scheduler_type="none", world_size=ranks, ram_available_bytes=machine.ram_bytes)
    chosen = DeepSpeedSettings(**settings, strict_offload=True)
    built = build_config({"outcore": outcore}, chosen, facts, run, nvme_check=lambda path, gb: (True, ""), staged=True)
    told = make_plan(built, facts, run)
    figures = RunFigures.of(
        ModelSettings(preset="llama-1b", seq_length=1024, precision="bf16", gradient_checkpointing=True),
        built.config,
        2,
    )
    assert figures.packed_attention == "auto"
    p = run_plan(SHAPE, figures, machine, offload=built.offload)
    assert p.staged and p.state_format == told.states
    state_bytes = (12 if told.states == "fp32" else 10) * -(-N // ranks)
    in_ram = state_bytes if told.state_ram_bytes is None else min(state_bytes, told.state_ram_bytes)
    planned = sum(p.part_bytes("ram", name) for name in ("master", "moments"))
    assert planned == pytest.approx(ranks * in_ram, abs=100_000)
    homes = sum(p.part_bytes(tier, name) for tier in ("ram", "pinned") for name in ("gradients", "parameters"))
    assert homes == pytest.approx(ranks * (told.home_bytes + told.grad_bytes), abs=100_000)
    store = p.part_bytes("nvme", "parameters") + p.part_bytes("nvme", "room set aside for parameters")
    assert store == pytest.approx(ranks * told.param_store_bytes, abs=100_000)
    assert p.part_bytes("pinned", "gradients on their way") == ranks * told.grad_staging_bytes
    assert p.part_bytes("nvme", "gradients") == (2 * N if told.grad_staging_bytes else 0)
    assert p.part_bytes("pinned", "parameters on their way") == pytest.approx(ranks * told.staging_bytes, abs=50_000)
    ring, slots_bytes = p.part_bytes("ram", "ring of states on their way"), ranks * (64 << 20)
    assert ring <= ranks * told.ring_bytes
    if told.state_ram_bytes == 0:
        assert ring > ranks * told.ring_bytes - slots_bytes


def test_stages_with_offload_are_planned_staged_and_their_flags_say_the_budget():
    zero3 = best_stage(SHAPE, RunRequest(), LAPTOP, 1024, "zero3")
    assert zero3.staged and zero3.state_format == "split" and zero3.ram_budget_bytes is None
    large = best_stage(preset_shape("llama-8b"), RunRequest(), LAPTOP, 1024, "infinity")
    assert large.fits and large.ram_budget_bytes is not None
    assert f"--ram_budget_gib {large.ram_budget_bytes // GIB}" in large.flags
    assert "% of states on NVMe" in large.offload and large.homes["optimizer states"].startswith("RAM ")
    assert large.tier("ram").used_bytes <= LAPTOP.ram_bytes
    assert not best_stage(SHAPE, RunRequest(), LAPTOP, 1024, "zero2").staged
    compact = best_stage(SHAPE, RunRequest(state_format="split8"), LAPTOP, 1024, "zero3")
    assert "--state_format split8" in compact.flags


def test_an_infinity_plan_uses_the_drive():
    p = best_stage(preset_shape("llama-1b"), RunRequest(), LAPTOP, 1024, "infinity")
    assert p.uses_drive and p.ram_budget_bytes is None


def test_the_optimizer_phase_takes_the_measured_rate():
    phase_s = []
    for rates in ({}, {"split": 0.1}):
        p = best_stage(SHAPE, RunRequest(), dataclasses.replace(LAPTOP, optimizer_gparams_per_s=rates), 1024, "zero3")
        phase_s.append(p.time.cpu_optimizer_s)
    assert phase_s[0] == pytest.approx(26 * N / (0.78 * 65e9))
    assert phase_s[1] == pytest.approx(N / 0.1e9)

"""Staged offload in the plan: bytes by hand, what the engine is told by the same settings, flags that reproduce it."""

import dataclasses
from typing import Any

import pytest

from outcore.common.quantities import GIB
from outcore.engine.deepspeed.config.builder import build_config
from outcore.engine.deepspeed.staged.plan import make_plan
from outcore.model import preset_shape
from outcore.plan.choose import best_stage
from outcore.plan.deepspeed.forecast import plan_deepspeed
from outcore.plan.profile import RunRequest, load_hardware
from outcore.plan.record import Plan
from outcore.sizing.layouts import DeepSpeedLayout, Staged
from outcore.sizing.swapping import WeightCounts
from tests.engine.deepspeed.config_cases import run_of
from tests.plan.fakes import plan_of, server

LAPTOP = load_hardware("rtx4070-laptop")
SHAPE = preset_shape("llama-3b")
N = 3_212_749_824
GB1 = 10**9
LITTLE = GIB
"""Of staging memory: a ring of 21 slots for chunks of 4 Mi parameters, states and 16-bit parameters."""
KEPT = 20 << 22
"""Parameters whose states stay in that ring from one update to the next."""
VECTORS = 57 * 3072
"""Parameters of norms: they stay in RAM, and so do their gradients."""
PAGES = 57 * 2048
"""A vector's states take 7.5 pages of 4096 bytes in the split format, 9 with fp32 masters."""
LEADING = 128_256 * 3072 + 3072 * (2 * 3072 + 2 * 1024 + 3 * 8192)
"""Parameters that 1 GB of RAM takes: the embedding and the matrices of the first layer, two sub-groups of more than
100 M each; the next one would be too much."""
ON_DRIVE = 2 * (N - VECTORS - LEADING)
"""Bytes of the other ones."""
SPARED = 2 * KEPT // 2
"""Of these, what a ring that keeps their states spares an update of the split format: all of it where a pass ends with
the last layers, nothing where it ends with the embedding."""


def infinity(params: str, passes: int, states: str, *, ram_gib: float | None = None, **staged: Any) -> Plan:
    """A run with its states on the drive, its parameters there (`nvme`) or not, on the laptop or with other RAM."""
    machine = LAPTOP if ram_gib is None else dataclasses.replace(LAPTOP, ram_bytes=int(ram_gib * GIB))
    layout = DeepSpeedLayout("infinity", "nvme", params, 2, passes, Staged(states, **staged))
    return plan_deepspeed(SHAPE, RunRequest(), machine, 1024, layout)


def test_all_on_the_drive_by_hand():
    p = infinity("nvme", 4, "split", staging_bytes=LITTLE)
    assert 2 * LEADING < GB1 < 2 * LEADING + 200_000_000  # what --max_in_cpu_gb keeps of parameters in RAM
    assert p.part_bytes("nvme", "parameters") == ON_DRIVE
    assert (p.part_bytes("nvme", "master"), p.part_bytes("nvme", "moments")) == (2 * N, 8 * N)
    assert p.part_bytes("nvme", "gradients") == 0
    states = 10 * (N - KEPT) + PAGES
    assert p.drive_written_bytes_per_step == states + ON_DRIVE
    update = states + ON_DRIVE - SPARED
    assert p.drive_read_bytes_per_step == update + 2 * 3 * ON_DRIVE  # twice per micro-batch but the first
    in_ram = sum(p.part_bytes(tier, name) for tier in ("ram", "pinned") for name in ("gradients", "parameters"))
    assert in_ram == 2 * N + GB1
    assert p.part_bytes("ram", "ring of states on their way") <= GIB


def test_a_format_with_whole_masters_needs_no_parameters_for_the_update():
    split, fp32 = (infinity("nvme", 1, states, staging_bytes=LITTLE) for states in ("split", "fp32"))
    kept = 17 << 22  # of 18 slots
    assert split.drive_read_bytes_per_step == 10 * (N - KEPT) + PAGES + ON_DRIVE - SPARED
    assert fp32.drive_read_bytes_per_step == 12 * (N - kept)


def test_the_ring_takes_what_ram_and_staging_memory_leave_and_saves_as_much_each_way():
    """Parameters in RAM, fp32 states: 48 MiB a slot. 4 B a parameter of homes, 3 GiB for the process and 2 for others;
    half of the RAM left at most, and a third of the states."""
    homes_gib = 4 * N / GIB + 5
    found = []
    for staging_gib, ram_gib in ((1, 64), (4, 64), (4, homes_gib + 4), (4, homes_gib + 1), (32, 64)):
        p = infinity("cpu", 1, "fp32", ram_gib=ram_gib, staging_bytes=staging_gib * GIB)
        ring = p.part_bytes("ram", "ring of states on their way")
        slots = ring // (48 << 20)
        found.append(ring / GIB)
        assert p.drive_read_bytes_per_step == p.drive_written_bytes_per_step
        whole = 12 * (N - (slots - max(1, slots // 16) << 22))  # of k and v chunks fill three quarters of a slot
        assert whole <= p.drive_read_bytes_per_step < 1.01 * whole
    assert found == pytest.approx([1, 4, 2, 1, 4 * N / GIB], abs=0.06)


@pytest.mark.parametrize(("params", "least_gib"), [("cpu", 1), ("nvme", 3)])
def test_a_ring_that_grows_turns_no_run_away(params: Any, least_gib: int):
    def planned(staging_gib: int, ram_gib: float):
        return infinity(params, 1, "split", ram_gib=ram_gib, staging_bytes=staging_gib * GIB)

    tenths = [tenth / 10 for tenth in range(120, 220)]
    little = [planned(least_gib, ram_gib).fits for ram_gib in tenths]
    assert 0 < sum(little) < len(tenths)  # from some amount on
    assert [planned(8, ram_gib).fits for ram_gib in tenths] == little


def test_staging_memory_is_shared_by_parameters_gradients_and_the_ring():
    facts = WeightCounts(8_030_261_248, 128_256 * 4096)
    flags = {"zero_stage": "infinity", "nvme_offload_path": "/data", "strict_offload": True}
    for outcore in ({}, {"nvme_offload_gradients": True}):
        chosen, run = run_of({"outcore": outcore}, flags, {"ram_available_bytes": 200 * GIB})
        built = build_config(chosen, facts, run, nvme_check=lambda path, gb: (True, ""), staged=True)
        plan = make_plan(chosen, built.offload, facts, run)
        assert plan.ring_bytes + plan.staging_bytes + plan.grad_staging_bytes == 8 * GIB
        assert not plan.notes  # nothing was raised


@pytest.mark.parametrize("passes", [1, 4])
def test_gradients_on_the_drive_by_hand(passes: int):
    plans = [
        infinity("nvme", passes, "fp32", gradients_on_nvme=on_nvme, staging_bytes=LITTLE) for on_nvme in (False, True)
    ]
    ram, drive = plans
    assert (ram.homes["gradients"], drive.homes["gradients"]) == ("RAM", "NVMe")
    assert ["--nvme_offload_gradients true" in plan.flags for plan in plans] == [False, True]
    more = 12 * (2 << 22)  # a slot takes the gradient too: 15 of 16 chunks are kept, not 17 of 18
    gradients = passes * 2 * (N - VECTORS)
    assert drive.drive_written_bytes_per_step - ram.drive_written_bytes_per_step == gradients + more
    not_lent = 2 * ON_DRIVE  # without gradients in RAM there is no memory of theirs for the first micro-batch
    assert drive.drive_read_bytes_per_step - ram.drive_read_bytes_per_step == gradients + not_lent + more
    in_ram = [sum(part.size_bytes for part in plan.parts if part.tier in ("ram", "pinned")) for plan in plans]
    assert 2 * N - (1 << 28) < in_ram[0] - in_ram[1] < 2 * N  # less the memory through which they flow
    assert drive.time.step_s > ram.time.step_s


@pytest.mark.parametrize(("settings", "outcore"), [
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
])  # fmt: skip
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_plan_of_a_run_is_what_the_engine_is_told(settings: dict[str, Any], outcore: dict[str, Any], ranks: int):
    facts = WeightCounts(SHAPE.total_params, SHAPE.largest_weight_numel, tied_numels=SHAPE.tied_numels)
    machine = server(num_gpus=ranks)
    where = {"world_size": ranks, "ram_available_bytes": machine.ram_bytes}
    asked = settings if settings.get("zero_stage") != "infinity" else {**settings, "strict_offload": True}
    chosen, run = run_of({"outcore": outcore}, asked, where)
    built = build_config(chosen, facts, run, nvme_check=lambda path, gb: (True, ""), staged=True)
    told = make_plan(chosen, built.offload, facts, run)
    assert chosen.packed_attention == "auto"
    p = plan_of(SHAPE, machine, built.offload, chosen)
    assert p.staged and p.state_format == told.states
    state_bytes = (12 if told.states == "fp32" else 10) * -(-N // ranks)
    in_ram = state_bytes if told.state_ram_bytes is None else min(state_bytes, told.state_ram_bytes)
    planned = sum(p.part_bytes("ram", name) for name in ("master", "moments"))
    assert planned == pytest.approx(ranks * in_ram, abs=100_000)
    homes = sum(p.part_bytes(tier, name) for tier in ("ram", "pinned") for name in ("gradients", "parameters"))
    vectors = 2 * VECTORS if told.grad_staging_bytes else 0  # too small for the drive
    assert homes == pytest.approx(ranks * (told.home_bytes + told.grad_bytes) + vectors, abs=100_000)
    store = p.part_bytes("nvme", "parameters") + p.part_bytes("nvme", "room set aside for parameters")
    assert store == pytest.approx(ranks * told.param_store_bytes, abs=100_000)
    assert p.part_bytes("pinned", "gradients on their way") == ranks * told.grad_staging_bytes
    assert p.part_bytes("nvme", "gradients") == (2 * N - vectors if told.grad_staging_bytes else 0)
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

"""What the staged engine is told: sizes from settings, none too small, a RAM budget divided in order of spilling."""

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch

from outcore.common.quantities import GIB
from outcore.engine.deepspeed.config.builder import BuiltConfig, RunFacts, build_config
from outcore.engine.deepspeed.staged.plan import StagedPlan, make_plan, ring_slot_bytes
from outcore.engine.deepspeed.staged.states import element_offsets, real_numel
from outcore.machine.offload import SPACE_SAFETY
from outcore.sizing.staged import RAM_OVERHEAD_BYTES
from outcore.sizing.swapping import WeightCounts
from tests.engine.deepspeed.config_cases import run_of, settings_of

BILLION = 10**9
MODEL = WeightCounts(3 * BILLION, 250_000_000, num_tensors=300, hidden_size=3072)
NVME = {"zero_stage": "infinity", "nvme_offload_path": "/mnt/nvme", "strict_offload": True, "max_in_cpu_gb": 0.0}


def plan_of(
    settings: dict[str, Any], outcore: dict[str, Any] | None = None, model: WeightCounts = MODEL, **run: Any
) -> StagedPlan:
    asked, facts = run_of({"outcore": outcore or {}}, settings, {"precision": "bf16", **run})
    check = lambda path, gb: (True, path)  # noqa: E731
    built = build_config(asked, model, facts, nvme_check=check, staged=True)
    assert built.offload.staged
    return make_plan(asked, built.offload, model, facts)


def test_everything_in_ram_needs_no_drive_and_no_staging() -> None:
    plan = plan_of({"zero_stage": "zero3"})
    assert plan.nvme_path is None and plan.state_ram_bytes is None
    assert plan.staging_bytes == plan.param_store_bytes == 0
    assert plan.states == "split" and plan.dtype == torch.bfloat16
    assert plan.pin and not plan_of({"zero_stage": "zero3", "pin_memory": False}).pin
    assert 2.0 <= plan.home_bytes / MODEL.total_params < 2.1
    assert plan.grad_bytes == 2 * MODEL.total_params


def test_fp32_and_fp16_keep_a_whole_master() -> None:
    assert plan_of({"zero_stage": "zero3"}, precision="fp32").states == "fp32"
    assert plan_of({"zero_stage": "zero3"}, precision="fp16").states == "fp32"
    with pytest.raises(ValueError, match="split"):
        plan_of({"zero_stage": "zero3"}, {"state_format": "split"}, precision="fp16")


def test_an_eps_that_8_bit_moments_cannot_have_is_refused_with_the_settings() -> None:
    assert plan_of({"zero_stage": "zero3"}, {"state_format": "split8"}, adam_epsilon=1e-11).states == "split8"
    with pytest.raises(ValueError, match="8-bit moments need eps of at least 1e-11"):
        plan_of({"zero_stage": "zero3"}, {"state_format": "split8"}, adam_epsilon=1e-12)


def test_what_is_sent_to_the_drive_lives_there() -> None:
    states = plan_of({**NVME, "nvme_offload_params": False})
    assert states.state_ram_bytes == 0 and states.param_store_bytes == 0
    everything = plan_of(NVME)
    assert everything.state_ram_bytes == 0 and everything.param_ram_bytes == 0
    assert everything.param_store_bytes >= 2 * MODEL.total_params
    assert everything.staging_bytes >= 3 * 2 * MODEL.largest_weight_numel


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_store_of_parameters_holds_what_is_made_and_no_more(ranks: int) -> None:
    tied = dataclasses.replace(MODEL, tied_numels=(MODEL.largest_weight_numel,) * 3)
    store, with_tied = (plan_of(NVME, model=model, world_size=ranks).param_store_bytes for model in (MODEL, tied))
    assert 0 <= store - 2 * MODEL.total_params / ranks <= MODEL.num_tensors * 8192 + 4096
    assert 0 <= with_tied - store - 3 * 2 * MODEL.largest_weight_numel / ranks <= 3 * 4096
    asked_gb: list[list[float]] = [[], []]
    for found, model in zip(asked_gb, (MODEL, tied), strict=True):
        built_of(NVME, found, model)
    assert asked_gb[1][0] - asked_gb[0][0] == pytest.approx(SPACE_SAFETY * 2 * sum(tied.tied_numels) / 1e9)


def test_ranks_share_evenly() -> None:
    one, two = plan_of(NVME), plan_of(NVME, world_size=2)
    assert two.param_store_bytes == pytest.approx(one.param_store_bytes / 2, rel=0.01)
    in_ram = [plan_of({"zero_stage": "zero3"}, world_size=ranks).home_bytes for ranks in (1, 2)]
    assert in_ram[1] == pytest.approx(in_ram[0] / 2, rel=0.01)
    assert two.grad_bytes == pytest.approx(one.grad_bytes / 2, rel=0.01)
    assert two.optimizer_threads is not None and one.optimizer_threads is not None
    assert two.optimizer_threads <= max(1, one.optimizer_threads // 2)


@pytest.mark.parametrize("budget_gib", [12, 20, 30])
def test_a_budget_is_kept_and_states_spill_before_parameters(budget_gib: int) -> None:
    plan = plan_of(NVME, {"ram_budget_gib": budget_gib})
    assert plan.state_ram_bytes is not None and plan.param_ram_bytes is not None
    grads = 2 * MODEL.total_params
    used = RAM_OVERHEAD_BYTES + grads + plan.staging_bytes + plan.ring_bytes
    used += plan.param_ram_bytes + plan.state_ram_bytes
    assert used <= max(budget_gib * GIB, RAM_OVERHEAD_BYTES + grads + plan.staging_bytes + plan.ring_bytes) + 1
    if plan.state_ram_bytes:
        assert plan.param_ram_bytes >= 2 * MODEL.total_params  # no parameter spills while a state is in RAM
    if budget_gib == 30:
        assert plan.state_ram_bytes > 5 * GIB


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("budget_gib", [None, 12, 20, 30, 60])
def test_the_drive_must_hold_what_the_budget_leaves(budget_gib: int | None, gradients: bool, world_size: int) -> None:
    asked: list[float] = []
    flags = {**NVME, "nvme_offload_gradients": gradients, "ram_budget_gib": budget_gib}
    settings, facts = run_of({}, flags, {"world_size": world_size})
    check = lambda path, gb: (not asked.append(gb), path)  # noqa: E731
    built = build_config(settings, MODEL, facts, nvme_check=check, staged=True)
    plan = make_plan(settings, built.offload, MODEL, facts)
    states, on_drive = 10 * MODEL.total_params, 2 * MODEL.total_params * gradients
    if budget_gib is None:  # everything that may go there
        on_drive += states + 2 * MODEL.total_params
    else:
        assert plan.state_ram_bytes is not None
        on_drive += world_size * plan.param_store_bytes + max(0, states - world_size * plan.state_ram_bytes)
    assert asked == [pytest.approx(SPACE_SAFETY * on_drive / BILLION, rel=1e-4)]


def test_ram_that_does_not_reach_spills_by_itself() -> None:
    settings = {"zero_stage": "zero3", "nvme_offload_path": "/mnt/nvme"}
    roomy = plan_of(settings, ram_available_bytes=100 * GIB)
    tight = plan_of(settings, ram_available_bytes=32 * GIB)
    assert roomy.state_ram_bytes is None
    assert tight.state_ram_bytes is not None and 0 < tight.state_ram_bytes < 10 * MODEL.total_params


@pytest.mark.parametrize("staging_bytes", [1, 1 << 20, 1 << 28])
def test_a_staging_size_too_small_is_raised_and_said(staging_bytes: int) -> None:
    plan = plan_of(NVME, {"staging_bytes": staging_bytes})
    assert plan.ring_bytes >= 4 * ring_slot_bytes("split", 2)
    assert plan.staging_bytes >= 3 * 2 * MODEL.largest_weight_numel
    assert len(plan.notes) == 1 and "raised to" in plan.notes[0]
    assert plan_of(NVME).notes == ()


def test_users_swap_sizes_and_zero_limits_are_not_needed() -> None:
    block = {"device": "nvme", "nvme_path": "/mnt/nvme", "buffer_count": 1, "buffer_size": 10}
    user = {"zero_optimization": {"stage": 3, "offload_param": block, "offload_optimizer": {**block, "pipeline": True}}}
    user["zero_optimization"]["offload_optimizer"] = {
        "device": "nvme", "nvme_path": "/mnt/nvme", "buffer_count": 1, "pipeline_read": True,
    }  # fmt: skip
    check = lambda path, gb: (True, path)  # noqa: E731
    built = build_config(settings_of(user), MODEL, RunFacts(), nvme_check=check, staged=True)
    zero = built.config["zero_optimization"]
    assert "buffer_count" not in zero["offload_param"] and zero["stage3_max_live_parameters"] > 0
    assert zero["sub_group_size"] > 1
    assert any("buffer_count" in note and "not used" in note for note in built.notes)


def test_gradients_on_the_drive_save_two_bytes_of_ram() -> None:
    usual, asked = plan_of(NVME), plan_of({**NVME, "nvme_offload_gradients": True})
    assert usual.grad_bytes - asked.grad_bytes == 2 * MODEL.total_params
    assert usual.grad_staging_bytes == 0 < asked.grad_staging_bytes <= 256 << 20
    assert plan_of(NVME, {"nvme_offload_gradients": True}) == asked
    refused = plan_of({**NVME, "nvme_offload_gradients": False}, {"nvme_offload_gradients": True})
    assert refused == usual  # the flag false wins over the file
    budget = {"ram_budget_gib": 12}
    tight, roomier = plan_of(NVME, budget), plan_of({**NVME, "nvme_offload_gradients": True}, budget)
    in_ram = [(plan.param_ram_bytes or 0) + (plan.state_ram_bytes or 0) for plan in (tight, roomier)]
    taken = asked.grad_staging_bytes + roomier.ring_bytes - tight.ring_bytes
    assert in_ram[1] - in_ram[0] == 2 * MODEL.total_params - taken  # a budget's RAM is for other things then
    summed_in_fp32 = settings_of({"data_types": {"grad_accum_dtype": "fp32"}}, NVME)
    offload = built_of(NVME).offload
    assert make_plan(summed_in_fp32, offload, MODEL, RunFacts()).grad_bytes - usual.grad_bytes == 2 * MODEL.total_params


def built_of(
    settings: dict[str, Any], found: list[float] | None = None, model: WeightCounts = MODEL, **user: Any
) -> BuiltConfig:
    """`found` gets the GB that the drive is asked for."""

    def check(path: str, required_gb: float) -> tuple[bool, str]:
        if found is not None:
            found.append(required_gb)
        return True, path

    return build_config(settings_of(user, settings), model, RunFacts(), nvme_check=check, staged=True)


def test_gradients_on_the_drive_are_counted_there_and_said() -> None:
    usual_gb: list[float] = []
    asked_gb: list[float] = []
    built_of(NVME, usual_gb)
    built = built_of({**NVME, "nvme_offload_gradients": True}, asked_gb)
    assert asked_gb[0] - usual_gb[0] == pytest.approx(SPACE_SAFETY * 2 * MODEL.total_params / 1e9)
    assert built.offload.gradients_on_nvme
    assert any("gradients go to the drive" in note for note in built.notes) and not built.warnings


def test_gradients_go_nowhere_without_states_on_the_drive() -> None:
    with pytest.raises(ValueError, match="nvme_offload_gradients needs the optimizer on NVMe"):
        built_of({"zero_stage": "zero3", "nvme_offload_gradients": True})
    with pytest.raises(ValueError, match=r"outcore\.nvme_offload_gradients .*must be true or false"):
        built_of(NVME, outcore={"nvme_offload_gradients": "yes"})
    settings = settings_of({}, {**NVME, "strict_offload": False, "nvme_offload_gradients": True})
    broken = build_config(settings, MODEL, RunFacts(), nvme_check=lambda path, gb: (False, "no drive."), staged=True)
    assert not broken.offload.gradients_on_nvme
    assert any("optimizer states and parameters and gradients" in warning for warning in broken.warnings)
    assert make_plan(settings, broken.offload, MODEL, RunFacts()).grad_staging_bytes == 0


def test_shares_cover_every_element_once_and_keys_never_meet() -> None:
    for numel, world_size in ((10, 1), (10, 3), (1, 4), (1000, 7)):
        padded = -(-numel // world_size)
        assert sum(real_numel(numel, padded, rank) for rank in range(world_size)) == numel
    padded = [300, 1, 256, 5000]
    ranges = []
    for rank in range(3):
        starts = element_offsets(padded, rank, 3)
        assert all(start % 256 == 0 for start in starts)
        ranges += [(start, start + numel) for start, numel in zip(starts, padded, strict=True)]
    ranges.sort()
    assert all(a[1] <= b[0] for a, b in pairwise(ranges))

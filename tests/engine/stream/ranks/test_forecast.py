"""The streaming engine's forecast for several GPUs of one host: RAM once, links each, DRAM and drive together."""

import pytest

from outcore.model import preset_shape
from outcore.plan.answer.advice import beside_one
from outcore.plan.choose import choose
from outcore.plan.learned import remember
from outcore.plan.profile import RunRequest
from outcore.plan.stream.memory import RANK_SLOTS, plan_stream
from outcore.sizing.layouts import StreamLayout
from tests.plan.fakes import server

TIERS = ("ram", "pinned")
OWN = ("framework overhead", "lanes' slots")


def plan_of(name: str, gpus: int, **request):
    return plan_stream(
        preset_shape(name), RunRequest(state_format="fp32", **request), server(num_gpus=gpus), 1024, StreamLayout(2, 4)
    )


def placed_bytes(plan) -> int:
    """Parameters, gradients and states, with what ranks need beside them."""
    return sum(p.size_bytes for p in plan.parts if p.tier in TIERS and p.name not in OWN)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_host_holds_parameters_gradients_and_states_once(gpus):
    one, several = plan_of("llama-8b", 1), plan_of("llama-8b", gpus)
    for name in ("parameters", "gradients", "master", "moments"):
        assert sum(several.part_bytes(t, name) for t in TIERS) == sum(one.part_bytes(t, name) for t in TIERS)
    slots = sum(several.part_bytes(t, RANK_SLOTS) for t in TIERS)
    assert slots == gpus * 2 * (525_340_672 + 525_336_576)  # head and embedding, 16-bit
    if gpus == 2:
        assert placed_bytes(several) < 1.1 * placed_bytes(one)
    assert several.num_gpus == gpus and several.tokens_per_step == gpus * one.tokens_per_step


def test_more_ranks_are_faster_until_dram_or_the_drive_is_the_limit():
    rate = {g: plan_of("llama-8b", g).tokens_per_s for g in (1, 2, 4, 8)}
    assert 1.3 * rate[1] < rate[2] < 2 * rate[1]
    assert rate[2] < rate[4] < rate[8] < 8 * rate[1]
    assert plan_of("llama-8b", 8).time.cpu_optimizer_s > plan_of("llama-8b", 1).time.cpu_optimizer_s


def test_auto_streams_on_several_gpus_and_parameters_stay_in_ram():
    answer = choose(preset_shape("llama-8b"), RunRequest(), server(num_gpus=2, vram_bytes=20 << 30))
    assert answer.stream is not None and answer.stream.num_gpus == 2
    tight = plan_stream(
        preset_shape("llama-8b"), RunRequest(), server(num_gpus=2, ram_bytes=60 << 30), 1024, StreamLayout(2, 4)
    )
    assert tight.homes["parameters"] == "RAM" and "NVMe" in tight.homes["optimizer states"]


def test_the_plan_says_whether_one_gpu_is_faster(tmp_path):
    shape, hardware = preset_shape("llama-1b"), server(num_gpus=2, identity="two GPUs")
    request = RunRequest(micro_batch=4, accumulation=8)
    plan, path = choose(shape, request, hardware).plan, tmp_path / "forecasts.json"
    beside = beside_one(shape, request, hardware, plan, path)
    assert beside is not None and not beside.is_slower and beside.tokens == plan.tokens_per_step
    assert beside.words().startswith("by forecast 2 GPUs take ") and beside.words().endswith(" x")
    assert beside_one(shape, request, server(), choose(shape, request, server()).plan, path) is None
    remember(plan, 8 * beside.one_s, "slow", hardware, path)  # what two GPUs took is not what one would
    beside = beside_one(shape, request, hardware, plan, path)
    assert beside is not None and beside.step_s == pytest.approx(8 * beside.one_s)
    assert "by what runs on this machine took" in beside.words() and "--num_gpus=1" in beside.words()

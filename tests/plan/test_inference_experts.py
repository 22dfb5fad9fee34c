"""Experts of a mixture that come as they are chosen: what the plan says of them."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from transformers import AutoConfig

from outcore import cli
from outcore.common.quantities import GIB
from outcore.flow import discover_units
from outcore.flow.experts import experts_apart, form_of
from outcore.model import PRESETS, resolve_shape, shape_from_config
from outcore.plan import load_hardware
from outcore.plan.inference import needs_of as plan_needs
from outcore.plan.inference import plan_inference
from outcore.sizing.inference import (
    DoesNotFit,
    InferenceLimits,
    InPlaceRates,
    place_by_experts,
    place_inference,
)
from tests.flow.models import needs as needs_model
from tests.flow.models import tiny_loaded


def test_experts_that_come_as_they_are_chosen_have_a_range(capsys):
    laptop, asked = load_hardware("rtx4070-laptop"), {"quantize": "nf4", "context": 1024}
    shape = resolve_shape("qwen3-30b-a3b")
    whole, plan = (plan_inference(shape, laptop, **asked, expert_cache_gib=gib) for gib in (0, 3))
    sizes = [sum(home.size_bytes for home in of.placement.parts) for of in (whole, plan)]
    experts, slots = plan.placement.experts, plan.placement.expert_slots
    assert experts is not None and (experts.num_experts, experts.num_layers, experts.of_token) == (128, 48, 8)
    assert plan.placement.vram_bytes["experts"] == slots * experts.slot_bytes > 2.9 * GIB
    assert sizes[0] == pytest.approx(sizes[1]) and sum(plan.placement.vram_bytes.values()) < laptop.vram_bytes
    none, half = plan.decode(32, 1024), plan.decode(32, 1024, 0.5)
    assert none.terms["PCIe"] == pytest.approx(48 * 128 * experts.slot_bytes / laptop.h2d_gb_per_s / 1e9, rel=1e-3)
    assert half.terms["PCIe"] == pytest.approx(none.terms["PCIe"] / 2) and plan.hit_rates == (0.0, 1.0)
    rates, few = InPlaceRates({1: 40.0, 4: 30.0}, 20.0, 1e-3), plan.decode(1, 1024, 0.5)
    measured = plan_inference(shape, laptop, **asked, expert_cache_gib=3, cpu_rates={"nf4": rates}).decode(1, 1024, 0.5)
    for seconds, gb_per_s in ((few, 0.85 * laptop.ram_gb_per_s), (measured, 40.0)):
        missed_s = 48 * 4 * experts.slot_bytes / gb_per_s / 1e9
        assert seconds.between["CPU"] == pytest.approx(missed_s + 96 * 15e-6, rel=1e-3) and not seconds.terms["PCIe"]
    low, high = (plan.tokens_per_s(1, 1024, hit_rate) for hit_rate in plan.hit_rates)
    assert 5 * whole.tokens_per_s(1, 1024) < low < high and whole.hit_rates == (0.0,)
    command = [
        "plan", "--infer", "qwen3-30b-a3b", "--quantize", "nf4", "--context", "1024", "--machine", "rtx4070-laptop",
    ]  # fmt: skip
    assert cli.main([*command, "--expert_cache_gib", "3"]) == 0
    assert f"1: {low:,.1f} to {high:,.1f}" in capsys.readouterr().out
    assert cli.main([*command, "--expert_cache_gib", "0"]) == 0
    assert "experts:" not in capsys.readouterr().out
    for model, why in (
        ("llama-8b", "this model has no experts"),
        ("tiny-moe", "all weights stay where they are used"),
    ):
        with pytest.raises(ValueError, match=why):
            plan_inference(resolve_shape(model), laptop, expert_cache_gib=1)


def test_experts_come_alone_where_passes_of_few_tokens_are_what_counts(capsys):
    laptop, shape = load_hardware("rtx4070-laptop"), resolve_shape("qwen3-30b-a3b")
    few = {"quantize": "nf4", "preset": "latency"}
    plan = plan_inference(shape, laptop, **few)
    assert plan.placement.few_tokens == 16 and "computed where they lie" in plan.placement.reasons[-1]
    for other in ({"preset": "throughput"}, {"quantize": "none"}, {"cpu_tokens": 0}):
        assert plan_inference(shape, laptop, **few | other).placement.experts is None, other


def test_experts_come_alone_where_a_drive_has_some():
    laptop, shape = load_hardware("rtx4070-laptop"), resolve_shape("qwen3-30b-a3b")
    scarce = dataclasses.replace(laptop, ram_bytes=10 * GIB)
    plan = plan_inference(shape, scarce, quantize="nf4", preset="throughput")
    assert plan.placement.experts is not None and plan.placement.expert_bytes_at("nvme")
    assert "of those on the drive no more is read" in plan.placement.reasons[-1]
    # What the CPU is to multiply waits for the drive, as nothing else goes on meanwhile.
    seconds = plan.decode(1, 1024)
    missed = plan.placement.expert_bytes_at("nvme") * plan.placement.expert_share(1)
    assert seconds.between["CPU"] > missed / (laptop.drive_read_gb_per_s * 1e9)
    brought = plan_inference(shape, scarce, quantize="nf4", preset="throughput", cpu_tokens=0)
    assert brought.placement.experts is not None and "CPU" not in brought.decode(1, 1024).between
    more_bytes = brought.placement.bytes_at("ram") - plan.placement.bytes_at("ram")
    assert more_bytes >= 0.9 * plan.placement.experts.question_bytes > 0, "nobody asks the CPU"
    whole = plan_inference(shape, scarce, quantize="nf4", preset="throughput", expert_cache_gib=0)
    assert whole.placement.experts is None and whole.decode(1, 1024).seconds > brought.decode(1, 1024).seconds


def test_experts_come_alone_where_a_whole_layer_does_not_fit(capsys):
    laptop = load_hardware("rtx4070-laptop")
    plan = plan_inference(resolve_shape("gpt-oss-120b"), laptop, context=1024)
    assert plan.placement.experts is not None and plan.placement.expert_slots >= 4
    assert "experts come as tokens choose them, because" in plan.placement.reasons[-1]
    assert sum(plan.placement.vram_bytes.values()) < laptop.vram_bytes


def test_gpt_oss_is_planned_as_it_is_published(capsys):
    asked = ["plan", "--infer", "gpt-oss-120b", "--machine", "rtx4070-laptop", "--json"]
    assert cli.main(asked) == 0
    weights = sum(json.loads(capsys.readouterr().out)["bytes"].values())
    assert weights == pytest.approx(64e9, rel=0.02), "experts in MXFP4, the rest in 16 bits"
    assert cli.main(["plan", "--model", "gpt-oss-120b", "--lora_r", "8", *asked[3:]]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["plan"]["quantize"] == "mxfp4" and "--model_name_or_path openai/gpt-oss-120b" in found["command"]
    assert "--quantize" not in found["command"]


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", pytest.param("gpt_oss", marks=needs_model("gpt_oss"))])
def test_experts_are_counted_before_opening_as_after_it(family):
    loaded = tiny_loaded(family, dtype=torch.bfloat16)
    opened = experts_apart(discover_units(loaded))
    forms = [form_of(part) for part in opened.expert_units.values()]
    counted = plan_needs(shape_from_config(family, loaded.config), itemsize=2, kv_itemsize=2, experts_apart=True)
    of_experts = [part.size_bytes for part in counted.parts if part.is_experts]
    assert (
        of_experts == [part.layout.numel * 2 for part in opened.expert_units.values()] and counted.experts is not None
    )
    assert (counted.experts.num_layers, counted.experts.num_experts) == (len(forms), forms[0].num_experts)
    pieces = sum(piece.numel for piece in forms[0].pieces)
    assert counted.experts.slot_bytes == 2 * pieces <= forms[0].size_bytes


@pytest.mark.parametrize("machine", ["rtx4070-laptop", "rtx4070-laptop-wsl2"])
@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "gpt-oss-120b", "mixtral", "qwen2_moe"])
def test_the_aim_at_many_serves_one_reader_of_a_mixture_well_too(model, machine):
    """And many no worse than by whole layers, on which one waits for all experts."""
    laptop = load_hardware(machine)
    shape = (
        resolve_shape(model)
        if model in PRESETS
        else shape_from_config(model, AutoConfig.for_model(model), adapts=False)
    )
    packed = (PRESETS[model].packed if model in PRESETS else "") or "nf4"
    of_aim = {aim: plan_inference(shape, laptop, quantize=packed, preset=aim) for aim in ("balanced", "latency")}
    whole = plan_inference(shape, laptop, quantize=packed, expert_cache_gib=0)
    alone, many = ([plan.tokens_per_s(n, 1024) for plan in (*of_aim.values(), whole)] for n in (1, 64))
    assert alone[0] >= 0.9 * alone[1] and alone[0] >= 0.9 * alone[2]
    assert many[0] >= many[2] and any("16 answers at once" in line for line in of_aim["balanced"].placement.reasons)


def test_answers_at_once_that_are_asked_for_are_not_lowered():
    laptop, shape = load_hardware("rtx4070-laptop"), resolve_shape("qwen3-30b-a3b")
    whole, apart = (
        plan_needs(shape.packed("nf4"), itemsize=2, kv_itemsize=2, experts_apart=is_apart) for is_apart in (False, True)
    )
    for asked, placed, at_once in ((None, True, 16), (8, True, 8), (32, False, 32)):
        limits = InferenceLimits(laptop.vram_bytes, 48 * GIB, max_sequences=asked, context_tokens=4096)
        found = place_by_experts(
            lambda needs, limits=limits: place_inference(needs, limits), whole, lambda: apart,
            is_asked=None, on_gpu=True, runs_few=True, max_sequences=asked,
        )  # fmt: skip
        assert (found[1] is apart, found[0].max_sequences) == (placed, at_once)
    assert any("up to 32 answers are asked for at once" in line for line in found[0].reasons)


def test_whole_layers_stay_where_experts_alone_would_not_fit():
    laptop, shape = load_hardware("rtx4070-laptop"), resolve_shape("qwen3-30b-a3b")
    whole = plan_inference(shape, laptop, quantize="nf4", expert_cache_gib=0).placement
    needs = plan_needs(shape, itemsize=2, kv_itemsize=2)
    alone = plan_needs(shape, itemsize=2, kv_itemsize=2, experts_apart=True)

    def place(asked):
        if asked is alone:
            raise DoesNotFit("no room for experts of two tokens")
        return whole

    for runs_few in (True, False):
        found = place_by_experts(place, needs, lambda: alone, is_asked=None, on_gpu=True, runs_few=runs_few)
        assert found == (whole, needs)
    with pytest.raises(DoesNotFit, match="of two tokens"):
        place_by_experts(place, needs, lambda: alone, is_asked=True, on_gpu=True)

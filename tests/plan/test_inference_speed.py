"""How fast a placed model answers, by the planner."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from transformers import MambaConfig

from outcore import cli
from outcore.common.quantities import GIB
from outcore.model import resolve_shape, shape_from_config
from outcore.plan import load_hardware
from outcore.plan.constants import ATTENTION_SHARE
from outcore.plan.hardware import ProfileError
from outcore.plan.inference import (
    CPU_LAYER_S,
    CPU_SPAN_S,
    KEY_S,
    KV_LINK_SHARE,
    plan_inference,
    words_of,
)
from outcore.plan.inference.speed import ARRIVAL_SHARE, PRODUCTS_S, InferencePlan
from outcore.plan.learned import known_rates, remember_rates
from outcore.sizing.inference import (
    InPlaceRates,
    Placement,
    compute_in_place,
    pairs,
    row_cost_of,
)


def test_attention_is_counted_where_contexts_are_long():
    shape = resolve_shape("llama-8b")
    plan = plan_inference(shape, load_hardware("rtx4070-laptop"), context=100_000)
    short, long = (plan.pass_time(2048, 2048 + start, 0, pairs(start, 2048)).terms["GPU"] for start in (0, 98_000))
    rate = plan.hardware.compute_tflops * 1e12 * ATTENTION_SHARE
    assert long - short == pytest.approx(4 * 32 * 4096 * 2048 * 98_000 / rate, rel=0.02)
    assert plan.first_token_s(98_304) > 12 * plan.first_token_s(8192)
    assert "100,000 tokens" in "\n".join(words_of(plan))
    assert row_cost_of(shape, plan.kv).context_tokens == pytest.approx(shape.layer_params[0] / (2 * 4096))


@pytest.mark.parametrize(("asked", "bytes_read", "least"), [
    ("llama-8b --quantize nf4", 4.6e9, 38.0), ("llama-1b", 2.46e9, 75.0), ("llama-3b --quantize int8", 3.3e9, 50.0),
])  # fmt: skip
def test_answers_read_their_weights_at_the_memorys_rate(asked, bytes_read, least, capsys):
    """A laptop's card has 256 GB/s, so that no answer is faster than the weights are read."""
    assert cli.main(["plan", "--infer", *asked.split(), "--aim", "latency", "--machine", "rtx4070-laptop"]) == 0
    said = capsys.readouterr().out
    rate = float(said.split("one answer: ")[1].split(" tokens/s")[0])
    assert least < rate < 256e9 / bytes_read
    assert "nominal, not measured: h2d 12.5, " in said and "device_memory 256 GB/s" in said


def test_a_gpu_without_a_memory_rate_is_not_planned():
    unknown = dataclasses.replace(load_hardware("rtx4070-laptop"), device_memory_gb_per_s=None)
    with pytest.raises(ProfileError, match="has no device_memory_gb_per_s: run"):
        plan_inference(resolve_shape("llama-1b"), unknown).decode(1, 1024)


def test_one_answer_comes_first_with_what_helps_it_most(capsys):
    asked = ["plan", "--infer", "qwen3-30b-a3b", "--quantize", "nf4", "--machine", "rtx4070-laptop"]
    assert cli.main([*asked, "--aim", "throughput"]) == 0
    _, one, change, *rest = capsys.readouterr().out.splitlines()
    assert one.startswith("one answer: 0.9 tokens/s") and change.startswith("what helps it most: --aim latency, ")
    slow, fast = (float(line.split(" tokens/s")[0].split()[-1]) for line in (one, change))
    assert fast > 30 * slow
    assert any(line.startswith("change --aim latency: ") and "at 1 answer instead of 0.9" in line for line in rest)
    assert cli.main([*asked, "--aim", "latency"]) == 0
    said = capsys.readouterr().out
    assert "what helps it most" not in said
    assert cli.main([*asked, "--preset", "latency"]) == 0 and capsys.readouterr().out == said  # its old name
    assert cli.main([*asked, "--aim=latency", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nominal_gb_per_s"]["device_memory_gb_per_s"] == 256.0
    assert cli.main(["plan", "--infer", "llama-8b", "--preset", "fast", "--machine", "rtx4070-laptop"]) == 2
    assert "What answers aim at is --aim balanced, latency, throughput." in capsys.readouterr().err


def test_python_is_counted_where_the_cpu_computes():
    shape = resolve_shape("llama-8b")
    tiny = dataclasses.replace(shape, layer_params=(1000,) * 4, active_layer_params=4000, vocab_size=256, hidden_size=8)
    cpu = dataclasses.replace(load_hardware("rtx4070-laptop"), is_cpu=True)
    one, two = (plan_inference(dataclasses.replace(tiny, layer_params=(1000,) * n), cpu).decode(1, 10) for n in (4, 8))
    assert two.seconds - one.seconds == pytest.approx(4 * (CPU_LAYER_S + CPU_SPAN_S), rel=0.1)


def place_of(plan) -> Placement:
    """Where everything lives, without the last reason: that rates of the CPU are not known."""
    assert "not counted" in plan.placement.reasons[-1]
    return dataclasses.replace(plan.placement, reasons=plan.placement.reasons[:-1])


@pytest.mark.parametrize(("name", "quantize", "kind"), [("llama-70b", "nf4", "nf4"), ("llama-8b", "none", "bf16")])
def test_layers_on_the_cpu_are_counted(name, quantize, kind):
    """Packed, or in 16 bits."""
    laptop = load_hardware("rtx4070-laptop")
    plan = plan_inference(resolve_shape(name), laptop, preset="latency", quantize=quantize)
    layers = [home for home in plan.placement.parts if home.part.startswith("layer")]
    travel = {home.part: home.size_bytes for home in layers if home.home == "ram"}
    rates = InPlaceRates({1: 2 * laptop.h2d_gb_per_s, 2: 1e-3}, laptop.h2d_gb_per_s, 1e-3)
    asked: dict[str, Any] = {"preset": "latency", "quantize": quantize}
    shared = plan_inference(plan.shape, laptop, **asked, cpu_rates={kind: rates})
    assert shared.placement == compute_in_place(place_of(plan), travel, rates)
    names = shared.placement.on_cpu(1)
    alone, together = plan.decode(1, 10), shared.decode(1, 10)
    assert len(names) > len(travel) // 2
    read_s = 10 * plan.kv.token_bytes / KV_LINK_SHARE / laptop.h2d_gb_per_s / 1e9  # the CPU waits for it
    assert (plan.placement.kv_home == "ram") == (name == "llama-70b")
    read_s = KEY_S * 10 * plan.shape.num_layers + (name == "llama-70b") * read_s
    expected = rates.cpu_s(len(names), shared.placement.size_of(names), 1) + read_s
    assert together.terms["CPU"] == pytest.approx(expected, rel=1e-9)
    assert together.terms["PCIe"] < alone.terms["PCIe"] / 2 and together.seconds < alone.seconds
    assert "CPU" not in shared.decode(2, 10).terms and shared.decode(2, 10).terms == plan.decode(2, 10).terms
    none = plan_inference(plan.shape, laptop, **asked, cpu_rates={kind: rates}, cpu_tokens=0)
    assert none.placement == dataclasses.replace(place_of(plan), runs_few=False) and "not counted" not in "\n".join(
        words_of(none)
    )


def test_packed_layers_are_expanded_for_passes_of_many_tokens_only():
    laptop, itemsize = load_hardware("rtx4070-laptop"), 2
    for name in ("llama-8b", "tiny-moe"):  # of a mixture's layers that come whole, stacks of experts are expanded
        plan = plan_inference(resolve_shape(name), laptop, quantize="nf4", context=1024, cpu_tokens=0)
        most = plan.placement.packed_tokens
        small, large = (plan.traffic(rows, 0, 1, 0) for rows in (most, most + 1))
        expected = 0 if plan.shape.is_moe else 2 * itemsize * sum(plan.shape.layer_params)
        assert most and large.device_bytes - small.device_bytes == pytest.approx(expected)


def test_rates_of_the_last_start_are_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["plan", "--infer", "llama-70b", "--quantize", "nf4", "--machine", "rtx4070-laptop"]
    laptop, rates = load_hardware("rtx4070-laptop"), InPlaceRates({1: 40.0, 4: 30.0}, 20.0, 1e-3)
    assert cli.main(asked) == 0 and "layers on the CPU are not counted" in capsys.readouterr().out
    remember_rates("nf4", rates, dataclasses.replace(laptop, identity="another"))
    assert known_rates(laptop) == {}
    remember_rates("nf4", rates, laptop)
    assert known_rates(laptop) == {"nf4": rates}
    assert cli.main([*asked, "--cpu_tokens", "2"]) == 0
    assert "in passes of up to 2 tokens the CPU computes some of the" in capsys.readouterr().out
    assert cli.main([*asked, "--cpu_tokens", "-1"]) == 2


def test_long_contexts_and_later_chunks_of_a_prompt_take_longer():
    """Where everything stays on the GPU: one row's attention, and launches of chunks that go on."""
    gpu = dataclasses.replace(load_hardware("rtx4070-laptop"), vram_bytes=80 * GIB, device_memory_gb_per_s=250)
    plan = plan_inference(resolve_shape("llama-8b"), gpu, preset="latency", context=16_384)
    assert not plan.placement.travels and plan.placement.kv_home == "vram"
    short, long = (plan.decode(1, tokens).terms["GPU"] for tokens in (0, 10_000))
    read_s = 10_000 * plan.kv.token_bytes / 250e9
    assert long - short == pytest.approx(KEY_S * 10_000 * 32 + read_s, rel=1e-6)
    plan = dataclasses.replace(plan, placement=dataclasses.replace(plan.placement, chunk_tokens=1024))
    one = plan.traffic(1024, 1024, 1, 0).launched_layers
    assert plan.traffic(2048, 2048, 2, 0).launched_layers == 2 * one < plan.traffic(2048, 2048, 1, 0).launched_layers
    assert one == plan.traffic(1024, 1024, 8, 0).launched_layers < plan.traffic(2048, 2048, 8, 0).launched_layers
    assert not plan.traffic(8, 8000, 8, 0).launched_layers


def test_layers_that_travel_are_queued_by_the_host_too():
    laptop = load_hardware("rtx4070-laptop")
    small = plan_inference(resolve_shape("llama-8b"), laptop, context=1024)
    whole = plan_inference(resolve_shape("llama-8b"), dataclasses.replace(laptop, vram_bytes=80 * GIB), context=1024)
    calls = [plan.traffic(1000, 1000, 4, 0).launched_layers for plan in (small, whole)]
    assert small.placement.num_arriving and calls[0] - calls[1] == pytest.approx(
        ARRIVAL_SHARE * small.placement.num_arriving
    )
    assert not small.traffic(4, 1000, 4, 0).launched_layers


def test_packed_layers_on_a_gpu_take_what_its_kernels_take_or_their_expansion():
    gpu = dataclasses.replace(load_hardware("rtx4070-laptop"), vram_bytes=80 * GIB, device_memory_gb_per_s=250)
    plan = plan_inference(resolve_shape("llama-8b"), gpu, preset="latency", context=1024, quantize="nf4")
    layers = [part.size_bytes for part in plan.placement.parts if part.part.startswith("layer")]
    for rows, arithmetic in ((1, 1980e9), (8, 740e9)):
        expected = sum(layers) * (1 / 250e9 + 1 / arithmetic) + 32 * PRODUCTS_S
        expected = max(expected, plan.placement.bytes_at("vram") / 250e9)
        assert plan.decode(rows, 0).terms["GPU"] == pytest.approx(expected)
    slower = dataclasses.replace(plan.placement, packed_s={16: 1e-9})  # as a start measured it
    assert dataclasses.replace(plan, placement=slower).decode(8, 0).terms["GPU"] > sum(layers) * 1e-9
    expanded = dataclasses.replace(plan, placement=dataclasses.replace(plan.placement, packed_s={}))
    plain = plan_inference(resolve_shape("llama-8b"), gpu, preset="latency", context=1024)
    asked = 512, 512, 1, 0
    assert expanded.traffic(*asked).launched_layers > plain.traffic(*asked).launched_layers
    assert plan.traffic(*asked).launched_layers == expanded.traffic(*asked).launched_layers


def test_answers_that_do_not_fit_at_once_take_turns():
    plan = plan_inference(resolve_shape("llama-8b"), load_hardware("rtx4070-laptop"), preset="latency", context=1024)
    most = plan.placement.max_sequences
    assert plan.most_streams(136) >= most
    assert plan.tokens_per_s(2 * most, 132) == plan.tokens_per_s(most, 132) == most / plan.decode(most, 132).seconds
    assert plan.first_token_s(128, 2) <= 2 * plan.first_token_s(128)


def test_prompts_have_their_share_of_passes_whatever_the_answers_beside_them_cost(monkeypatch):
    """As the scheduler has it: attention of 600 answers alone costs more than a pass."""
    plan = plan_inference(resolve_shape("tiny-moe"), load_hardware("rtx4070-laptop"))
    cost, most, prompt, streams = row_cost_of(plan.shape, plan.kv), plan.placement.pass_tokens, 4096, 600
    assert streams * cost.of(prompt, 1) > most
    passes, usual = [], InferencePlan.pass_time
    monkeypatch.setattr(InferencePlan, "pass_time", lambda *asked: passes.append(asked[1]) or usual(*asked))
    assert plan.first_token_s(prompt, streams) > 0
    assert len(passes) <= 1.01 * streams * cost.of(0, prompt) / (cost.LEAST_READ * most)


def test_a_model_without_attention_is_planned():
    config = MambaConfig(num_hidden_layers=4, hidden_size=128, state_size=8, vocab_size=256)
    plan = plan_inference(shape_from_config("mamba", config, adapts=False), load_hardware("rtx4070-laptop"))
    assert row_cost_of(plan.shape, plan.kv).of(1000, 8) == 8
    assert plan.first_token_s(512, 3) > 0 and "first word" in "\n".join(words_of(plan))


def test_keys_and_values_in_ram_come_slower_than_copies():
    laptop = load_hardware("rtx4070-laptop")
    plan = plan_inference(resolve_shape("llama-8b"), laptop, preset="throughput")
    assert plan.placement.kv_home == "ram"
    more_s = plan.decode(17, 1024).terms["PCIe"] - plan.decode(1, 1024).terms["PCIe"]
    copied_s = 16 * plan.kv.read_bytes(1024, 1, 1) / laptop.h2d_gb_per_s / 1e9
    assert 1.3 * copied_s < more_s < 1.7 * copied_s

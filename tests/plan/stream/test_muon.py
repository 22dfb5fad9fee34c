"""Muon in the planner: which matrices, the bytes that a momentum alone saves, what Newton-Schulz costs."""

from dataclasses import replace

import pytest

from outcore.model.facts import model_class_of
from outcore.model.presets import preset_config
from outcore.model.shape import preset_shape
from outcore.model.weights import meta_skeleton
from outcore.plan.profile import load_hardware
from outcore.plan.request import RunRequest
from outcore.plan.stream.forecast import plan_stream
from outcore.sizing.layouts import StreamLayout
from outcore.sizing.states import muon_flops

LAPTOP = load_hardware("rtx4070-laptop")
ADAMW = RunRequest(engine="stream")


@pytest.mark.parametrize("preset", ["llama-1b", "gpt2", "qwen3-30b-a3b"])
def test_matrices_are_those_of_the_model(preset: str) -> None:
    config = preset_config(preset)
    model = meta_skeleton(model_class_of(config), config)
    layers = [(n, p) for n, p in model.named_parameters() if ".layers." in n or ".h." in n]
    routers = ".mlp.gate."  # too small to count
    found = sorted(tuple(sorted(p.shape)) for name, p in layers if p.dim() == 2 and routers not in name)
    assert sorted(tuple(sorted(sides)) for sides in preset_shape(preset).layer_matrices) == found


def test_a_momentum_alone_saves_four_bytes_and_newton_schulz_takes_time() -> None:
    shape, layout = preset_shape("llama-1b"), StreamLayout(4, 4)
    adamw, muon = (
        plan_stream(shape, request, LAPTOP, 1024, layout) for request in (ADAMW, replace(ADAMW, optimizer="muon"))
    )
    numel = sum(inner * outer for inner, outer in shape.layer_matrices)
    sizes = [sum(p.size_bytes for p in plan.parts if p.tier == "ram" and p.name == "moments") for plan in (adamw, muon)]
    assert sizes[0] - sizes[1] == 4 * numel
    slower_s = muon.time.compute_s - adamw.time.compute_s
    flops = sum(muon_flops(*sides) for sides in shape.layer_matrices)
    assert LAPTOP.compute_tflops is not None
    assert slower_s == pytest.approx(flops / (LAPTOP.compute_tflops * 1e12), rel=0.2)
    assert muon.time.cpu_optimizer_s < 0.4 * adamw.time.cpu_optimizer_s
    assert any(p.name.startswith("Muon") and p.size_bytes > 1 << 28 for p in muon.parts)

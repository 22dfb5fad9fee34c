"""Muon in the planner: which matrices, the bytes that a momentum alone saves, what Newton-Schulz costs."""

from dataclasses import asdict, replace

import pytest

from outcore.model.facts import model_class_of
from outcore.model.presets import preset_config
from outcore.model.shape import preset_shape
from outcore.model.weights import meta_skeleton
from outcore.plan.main import main
from outcore.plan.profile import RunRequest, load_hardware
from outcore.plan.run import Forecast, Forecaster
from outcore.plan.stream.memory import plan_stream
from outcore.sizing.layouts import StreamLayout
from outcore.sizing.states import muon_flops

LAPTOP = load_hardware("rtx4070-laptop")
ADAMW = RunRequest(engine="stream")


@pytest.mark.more(after=1)
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
    sizes = [plan.tier("ram").used_bytes for plan in (adamw, muon)]
    assert sizes[0] - sizes[1] == 4 * numel
    slower_s = muon.time.compute_s - adamw.time.compute_s
    flops = sum(muon_flops(*sides) for sides in shape.layer_matrices)
    assert LAPTOP.compute_tflops is not None
    assert slower_s == pytest.approx(flops / (LAPTOP.compute_tflops * 1e12), rel=0.2)
    assert slower_s > 0.2 * adamw.time.compute_s, "too little to be told from nothing"
    assert muon.time.cpu_optimizer_s < 0.9 * adamw.time.cpu_optimizer_s  # what crosses the link is copied in RAM
    assert any(p.name.startswith("Muon") and p.size_bytes > 1 << 28 for p in muon.parts)


def test_states_of_matrices_cross_the_link_and_are_pinned() -> None:
    shape, layout = preset_shape("llama-1b"), StreamLayout(4, 4)
    numel = sum(inner * outer for inner, outer in shape.layer_matrices)
    for states, there, up_and_down in (("fp32", 8, 20), ("split", 6, 18)):
        of_states = replace(ADAMW, state_format=states)
        adamw, muon = (
            plan_stream(shape, request, LAPTOP, 1024, layout)
            for request in (of_states, replace(of_states, optimizer="muon"))
        )
        assert muon.tier("pinned").used_bytes - adamw.tier("pinned").used_bytes == there * numel
        link_s = [
            plan.time.h2d_s * LAPTOP.h2d_gb_per_s + plan.time.d2h_s * LAPTOP.d2h_gb_per_s for plan in (adamw, muon)
        ]
        assert link_s[1] - link_s[0] == pytest.approx(up_and_down * numel / 1e9, rel=1e-6)


def test_states_of_matrices_go_to_the_drive_as_others_do() -> None:
    small = replace(LAPTOP, ram_bytes=12 << 30)
    adamw, muon = (
        plan_stream(preset_shape("llama-1b"), request, small, 1024, StreamLayout(4, 4))
        for request in (ADAMW, replace(ADAMW, optimizer="muon"))
    )
    for plan in (adamw, muon):
        assert plan.fits and "NVMe" in plan.homes["optimizer states"]
    there = [p.size_bytes for p in muon.parts if p.tier == "nvme" and p.name.startswith("states of Muon")]
    assert there and muon.tier("nvme").used_bytes < adamw.tier("nvme").used_bytes


def test_a_plan_with_muon_is_of_a_run_that_muon_can_take(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--machine", "rtx4070-laptop", "--optimizer", "muon", "--model"]
    assert main([*argv, "llama-1b"]) == 0
    out = capsys.readouterr().out
    assert "--engine stream" in out and "--optimizer muon" in out and "--state_format split8" not in out
    assert main([*argv, "llama-8b"]) == 1, "matrices and the rest do not fit the GPU; DeepSpeed has no Muon"
    assert "Smallest change that fits: AdamW, whose updates" in capsys.readouterr().out
    for more, words in (
        (["--num_gpus", "2", "--nominal"], "train on one"),
        (["--zero_stage", "zero1"], "only the streaming engine has it, and it cannot take this run: zero_stage zero1"),
    ):
        assert main([*argv, "llama-1b", *more]) == 2
        assert words in capsys.readouterr().err


def test_what_would_fit_instead_of_a_run_keeps_its_optimizer_in_mind() -> None:
    shape, request = preset_shape("llama-8b"), RunRequest(seq_length=1024, optimizer="muon")
    forecaster = Forecaster.__new__(Forecaster)
    forecaster._known = shape, LAPTOP
    plan = plan_stream(shape, request, LAPTOP, 1024, StreamLayout(2, 4))
    forecast = Forecast(plan, LAPTOP, asked={"request": asdict(request)})
    assert forecaster.change_that_fits(forecast).startswith("AdamW")

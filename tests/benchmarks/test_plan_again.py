"""Runs that were measured, planned again: those on an H200 that constants were fitted to, and what a run keeps."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from outcore.common.quantities import GIB, MIB
from outcore.engine.deepspeed.settings import ChosenOffload
from outcore.engine.stream.settings import StreamSettings
from outcore.model import preset_shape
from outcore.plan import constants as k
from outcore.plan.run import Forecast
from outcore.plan.run.forecast import plan_layout, run_request
from tests.plan.fakes import layout_of, plan_of, server, settings_of

ROOT = Path(__file__).resolve().parents[2]
SITTINGS = [
    json.loads((ROOT / f"benchmarks/results/plan_vs_measured-h200-{sitting}.json").read_text())
    for sitting in ("third", "fourth")
]
KEPT_NOTHING = "d-0.4b-nvme"
"""A run of DeepSpeed's with all states on NVMe, when its ring was small and kept nothing for the next update."""
RESULTS = [(sitting["links"], run) for sitting in SITTINGS for run in sitting["runs"] if run["name"] != KEPT_NOTHING]
MADE_MORE_AHEAD = ("s-1.2b-nvme-split8", 0.004005)
"""The run of the third sitting (by its host's rate) that held 2 GB of initial values at its start; now 1 GB are made
ahead."""
LARGE_LOSS = "s-0.4b-eager"
"""Ran when an eager loss held 2.5 times the fp32 logits of a chunk of 256 MiB; now twice those of half a chunk."""
WITHOUT_RATES = [
    run
    for machine in json.loads((ROOT / "benchmarks/results/plan_vs_measured-h200-host.json").read_text())["machines"]
    for run in machine
    if run.get("changed") == []
]
"""Planned with nominal rates, so that their times say nothing."""
ACCUMULATION = 2


@pytest.fixture
def planned_again(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "plan"))
    sys.modules.pop("plan_again", None)
    from plan_again import planned_again  # pyright: ignore[reportMissingImports]

    return planned_again


@pytest.mark.parametrize(("links", "run"), RESULTS, ids=[run["name"] for _, run in RESULTS])
def test_measured_runs_are_described_within_the_limits(planned_again: Any, links: dict, run: dict[str, Any]):
    found, measured = planned_again(run, links)["forecast"], dict(run["measured"])
    if (run["name"], links["host_layer_s"]) == MADE_MORE_AHEAD:
        measured["rss_bytes"] -= GIB
    _check_memory(found, measured)
    assert found["time_s"]["step_s"] == pytest.approx(measured["step_s"], rel=0.20)
    for planned, name in (("read", "read"), ("written", "write")):
        bytes_then = measured[f"drive_{name}_bytes"]
        assert found[f"drive_{planned}_bytes_per_step"] == pytest.approx(bytes_then, rel=0.10, abs=5e7)


@pytest.mark.parametrize("run", WITHOUT_RATES, ids=lambda run: run["name"])
def test_memory_of_more_runs_is_described_within_the_limits(planned_again: Any, run: dict[str, Any]):
    measured = dict(run["measured"])
    if run["name"] == LARGE_LOSS:
        for name in ("driver_vram_bytes", "allocator_peak_bytes"):
            measured[name] -= 3 * 128 * MIB
    _check_memory(planned_again(run, None)["forecast"], measured)


H100 = [
    (run, lane_gb_per_s, host_layer_s)
    for name, lane_gb_per_s, host_layer_s in (("h100", 19.5, 0.005531), ("h100-second", 20.888, 0.003756))
    for run in json.loads((ROOT / f"benchmarks/results/plan_vs_measured-{name}.json").read_text())["runs"]
    if (name, run["name"]) != ("h100-second", "s-lora-short-pageable")  # copying threads starved what launches
]
"""Runs, and of the profile measured before them: what a lane took from pageable RAM, a layer's launches."""


@pytest.mark.parametrize(("run", "lane", "host"), H100, ids=[run["name"] for run, *_ in H100])
def test_runs_on_a_card_that_no_constant_was_fitted_on(planned_again: Any, run: dict[str, Any], lane, host):
    run["forecast"]["asked"]["hardware"] |= {"copies_gb_per_s": lane, "host_layer_s": host}
    found, measured = planned_again(run, None)["forecast"], run["measured"]
    assert found["time_s"]["step_s"] == pytest.approx(measured["step_s"], rel=0.20)
    assert found["expected_vram_bytes"] == pytest.approx(measured["driver_vram_bytes"], rel=0.10)
    assert found["expected_tensor_bytes"] == pytest.approx(measured["allocator_peak_bytes"], rel=0.10)


def _check_memory(found: dict[str, Any], measured: dict[str, Any]) -> None:
    assert found["expected_vram_bytes"] == pytest.approx(measured["driver_vram_bytes"], rel=0.10)
    assert found["expected_tensor_bytes"] == pytest.approx(measured["allocator_peak_bytes"], rel=0.12)
    assert found["expected_rss_bytes"] == pytest.approx(measured["rss_bytes"], rel=0.10)


@pytest.mark.parametrize("told", [
    StreamSettings(states="split8", compile="off", nvme_path="/x", state_ram_bytes=10**8),
    ChosenOffload(3, "nvme", "cpu", None, 0, staged=True, states="split"),
])  # fmt: skip
def test_a_run_keeps_what_its_planner_was_asked(planned_again: Any, told: StreamSettings | ChosenOffload):
    shape = preset_shape("llama-1b").with_lora(4)
    hardware = server(ram_bytes=10**11, sources={"h2d_gb_per_s": "measured"})
    settings = settings_of(max_grad_norm=0.0, state_format=told.states)
    layout = layout_of(told, settings, hardware)
    request = run_request(settings, layout, 1024, 5)
    plan = plan_layout(shape, request, hardware, layout)
    given = {"shape": shape, "request": request, "layout": layout, "hardware": hardware}
    asked = {name: dataclasses.asdict(value) for name, value in given.items()}
    kept = json.loads(json.dumps(Forecast(plan, hardware, asked=asked).to_dict()))
    kept["time_s"], kept["micro_batch"] = {}, 77  # only `asked` counts
    result = {"name": "some run", "argv": [], "forecast": kept}
    again = planned_again(result, None)["forecast"]
    assert {name: value for name, value in again.items() if name != "asked"} == json.loads(json.dumps(plan.to_dict()))


def test_seconds_of_attention_and_of_launches_by_hand():
    fast = server(compute_tflops=100.0, device_memory_gb_per_s=1000.0)
    assert fast.compute_s(1e12, 1e9, 2e12) == pytest.approx(0.01 + 0.02 / k.ATTENTION_SHARE + 0.001)
    whole = server(compute_tflops=100.0)  # a rate of whole layers, in which both are
    assert whole.compute_s(1e12, 1e9, 2e12) == pytest.approx(0.03)
    shape, endless = preset_shape("llama-1b"), server(compute_tflops=1e9)
    calls = shape.num_layers * ACCUMULATION
    eager = plan_of(shape, endless, StreamSettings(compile="off", cuda_graphs="off")).time
    compiled = plan_of(shape, endless, StreamSettings()).time
    more = sum(k.STREAM_EAGER_HOST_LAYERS_PER_CALL) - sum(k.STREAM_HOST_LAYERS_PER_CALL)
    assert eager.host_overhead_s - compiled.host_overhead_s == pytest.approx(
        calls * more * endless.host_layer_s, rel=1e-3
    )
    graphs = plan_of(shape, endless, StreamSettings(compile="off")).time
    assert graphs.host_overhead_s == pytest.approx(compiled.host_overhead_s, rel=1e-6)
    plain = plan_of(shape, endless, ChosenOffload(0, "none", "none", None, 0)).time
    wanted = calls * k.DEEPSPEED_PLAIN_HOST_LAYERS + shape.num_layers * k.DEEPSPEED_GPU_UPDATE_HOST_LAYERS
    wanted *= endless.host_layer_s
    assert plain.step_s == pytest.approx(wanted, rel=1e-3) and plain.host_overhead_s == pytest.approx(wanted, rel=1e-3)

"""Runs of train_model.py on an H100, a card that no constant was fitted to, planned again by today's planner."""

import json
from typing import Any

import pytest

from outcore.plan.hardware import Hardware
from outcore.plan.profile import RunRequest
from outcore.plan.run.forecast import plan_layout
from outcore.sizing.layouts import Residency, StreamLayout
from outcore.sizing.shape import ModelShape
from tests.forked import ROOT

RUNS = json.loads((ROOT / "benchmarks/results/forecasts-h100.json").read_text())["runs"]


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


@pytest.mark.parametrize("run", RUNS, ids=[run["name"] for run in RUNS])
def test_a_run_takes_what_is_forecast(run: dict[str, Any]):
    """VRAM, tensors and RAM within 10 %, seconds of a step within 20 %: what docs/planning.md promises."""
    asked, measured = run["forecast"]["asked"], run["measured"]
    shape = ModelShape(**{name: _frozen(value) for name, value in asked["shape"].items()})
    layout = StreamLayout(**{**asked["layout"], "residency": Residency(**asked["layout"]["residency"])})
    # The rates of the probe before these runs: what a lane took from pageable RAM, the host's time for a layer.
    rates = {"copies_gb_per_s": 20.888, "host_layer_s": 0.003756}
    hardware = Hardware(**{**asked["hardware"], **rates})
    found = plan_layout(shape, RunRequest(**asked["request"]), hardware, layout).to_dict()
    assert found["time_s"]["step_s"] == pytest.approx(measured["step_s"], rel=0.20)
    assert found["expected_vram_bytes"] == pytest.approx(measured["driver_vram_bytes"], rel=0.10)
    assert found["expected_tensor_bytes"] == pytest.approx(measured["allocator_peak_bytes"], rel=0.10)
    assert found["expected_rss_bytes"] == pytest.approx(measured["rss_bytes"], rel=0.10)

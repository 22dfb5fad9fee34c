"""Rates of arithmetic, launches and the CPU optimizer, on whatever this machine has."""

from typing import Any

import pytest
import torch

from outcore.probe.bench import compute as compute_bench
from outcore.probe.bench import host as host_bench
from outcore.probe.bench import host as update_bench


def test_compute_rates_of_this_cpu_are_real_and_checked(monkeypatch):
    rates = compute_bench.measure_compute(torch.device("cpu"), 0.05)
    assert rates.dtype == "fp32" and rates.device == "cpu"
    assert 0 < rates.matmul_tflops < 100 and 0 < rates.memory_gb_per_s < 10_000
    broken = lambda a, b, out: out.zero_()  # noqa: E731
    monkeypatch.setattr(compute_bench.torch, "mm", broken)
    with pytest.raises(RuntimeError, match="not healthy"):
        compute_bench.measure_compute(torch.device("cpu"), 0.01)


@pytest.mark.gpu
def test_launches_of_a_layer_on_a_gpu_take_the_host_about_as_long_whatever_the_limit():
    device = torch.device("cuda", 0)
    short, long = host_bench.measure_host(device, 0.1), host_bench.measure_host(device, 0.5)
    assert 2e-4 < long < 0.1 and 0.4 < short / long < 2.5


@pytest.mark.gpu
def test_compute_rates_of_a_gpu():
    rates = compute_bench.measure_compute(torch.device("cuda", 0), 1.0)
    assert rates.dtype in ("bf16", "fp16") and 1 < rates.matmul_tflops < 5000
    assert 50 < rates.memory_gb_per_s < 20_000 and rates.elapsed_s < 20


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_updates_of_every_format_are_measured(backend: Any) -> None:
    rates = update_bench.measure_updates(0.0, num_threads=1, backend=backend, most_numel=20_000)
    assert set(rates.gparams_per_s) == {"fp32", "split", "fp32_m8", "split8", "fp24_m8"}
    assert min(rates.gparams_per_s.values()) > 0
    assert (rates.params, rates.threads) == (20_000, 1)
    assert rates.backend == "torch" or backend == "auto"


def test_the_rate_of_updates_is_parameters_over_the_median_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 4.0, 10.0, 11.0, 20.0, 22.0])  # passes of 4, 1 and 2 seconds
    calls = []
    monkeypatch.setattr(update_bench.time, "perf_counter", lambda: next(clock))
    assert update_bench._median_s(lambda: calls.append(1), 7.0) == 2.0
    assert len(calls) == 4  # one to warm up

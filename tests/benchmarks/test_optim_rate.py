"""benchmarks/optim_rate.py: runs, counts its bytes right, writes every sample."""

import json

import pytest
import torch

from benchmarks import optim_rate
from outcore.optim import ExtensionUnavailable
from tests.optim.cases import extension
from tests.refused import failing


def test_a_small_run(tmp_path, capsys):
    extension()
    threads_before = torch.get_num_threads()
    out = tmp_path / "rate.json"
    try:
        small = "--threads 1 --numel 70000 --chunk_numel 16384 --repeats 2 --formats split,split8 --no_rivals --out"
        code = optim_rate.main([*small.split(), str(out)])
    finally:
        torch.set_num_threads(threads_before)
    assert code == 0
    printed = capsys.readouterr().out
    assert "split8" in printed
    report = json.loads(out.read_text())
    assert report["bytes_per_param"] == {"memory": 16.0, "split": 26.0, "split8": 14.0625, "sum of squares": 2.0}
    assert set(report["samples_s"]) == {"memory x1", "split x1", "split8 x1", "sum of squares x1"}
    assert all(len(samples) == 2 and min(samples) > 0 for samples in report["samples_s"].values())
    rate = report["median_gparam_per_s"]["split x1"]
    assert rate == pytest.approx(70000 / (sum(report["samples_s"]["split x1"]) / 2) / 1e9)


def test_without_the_extension(monkeypatch, capsys):
    monkeypatch.setattr(optim_rate, "ExtensionBackend", failing(ExtensionUnavailable("no compiler")))
    assert optim_rate.main(["--threads", "1"]) == 1
    assert "no compiler" in capsys.readouterr().err

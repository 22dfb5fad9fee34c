"""docs/expectations.md: current, judged by raw results, and each source is there."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from outcore.plan.main import main

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import expectations  # pyright: ignore[reportMissingImports]


def test_the_page_is_what_the_command_writes() -> None:
    text = expectations.PAGE.read_text(encoding="utf-8")
    assert text == expectations.page(), "run: python benchmarks/expectations.py --write"


def test_each_row_has_a_verdict_and_its_sources_are_there() -> None:
    rows = expectations.verdicts()
    assert len({row.asked for row in rows}) == len(rows)
    for row in rows:
        assert row.verdict in (expectations.HOLDS, expectations.FAILS, expectations.FORECAST), row.asked
        assert row.sources or row.verdict == expectations.FORECAST, f"{row.asked}: judged without a run"
        assert all((expectations.RESULTS / name).is_file() and name in expectations.MADE for name in row.sources)


def test_a_slower_run_turns_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    assert expectations.infinity_in_ram().verdict == expectations.HOLDS
    name = "rivals-h100-1.2b-16k.json"
    slower = copy.deepcopy(expectations.raw(name))
    slower["results"]["ours-fp32-clip"]["step_s"] = 1.3 * slower["results"]["zero2-one-clip"]["step_s"]
    known = expectations.raw
    monkeypatch.setattr(expectations, "raw", lambda file: slower if file == name else known(file))
    assert expectations.infinity_in_ram().verdict == expectations.FAILS
    del slower["results"]["ours-fp32-clip"]["step_s"]
    with pytest.raises(KeyError, match="failed"):
        expectations.infinity_in_ram()


def test_plan_efficiency_puts_the_machine_into_the_papers_formula(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--efficiency", "--machine", "rtx4070-laptop", "--tflops", "40", "--json"]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    rows = {(row["data"], row["home"]): row for row in told["rows"]}
    on_link = rows["parameters, gradients", "RAM"]
    product = 4096 * on_link["gb_per_s"] * 1e9
    assert on_link["shares"]["4096"] == pytest.approx(product / (product + 40e12))
    states = rows["optimizer states", "NVMe"]
    assert states["half_at"] == pytest.approx(4 * 40e12 / (states["gb_per_s"] * 1e9))
    assert rows["activation checkpoints", "NVMe"]["shares"]["65536"] > 0.99
    assert main(["--efficiency", "--machine", "rtx4070-laptop"]) == 0
    assert "half at" in capsys.readouterr().out

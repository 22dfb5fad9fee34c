"""benchmarks/drives/lanes.py itself: a dry run from end to end, and how it judges."""

import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "drives"


@pytest.fixture(scope="module")
def lanes():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import lanes
    finally:
        sys.path.remove(str(BENCHMARKS))
    return lanes


@pytest.mark.more
def test_a_dry_run_measures_and_leaves_no_file_behind(lanes, tmp_path: Path, capsys) -> None:
    sizes = {"size": 0.03, "pool": 0.1, "limited": 0.02}
    command = ["--path", str(tmp_path), "--device", "cpu", "--out", str(tmp_path / "r.json")]
    command += [word for name, gib in sizes.items() for word in (f"--{name}-gib", str(gib))]
    command += ["--slot-mib", "2", "--piece-mib", "4", "--repeats", "1", "--skip", "deepspeed,torch-pin"]
    assert lanes.main(command) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]
    result = json.loads((tmp_path / "r.json").read_text())
    assert len(result["acceptance"]) == 12
    assert {line["verdict"] for line in result["acceptance"]} == {"dry run", "NOT RUN"}
    assert result["not_run"]["DeepSpeed"] == "DeepSpeed was skipped by --skip"
    assert "CUDA GPU" in result["not_run"]["kvikio"]
    assert all(rate > 0 for rates in result["rates_bytes_per_s"].values() for rate in rates)
    assert result["lane_stats"]["up"]["n_bytes"] > 0
    said = capsys.readouterr().out
    assert "a dry run on the CPU" in said and "drive -> GPU / min(drive read, H2D)" in said


@pytest.mark.more
def test_kinds_of_lanes_are_compared_round_by_round_and_leave_nothing_behind(lanes, tmp_path: Path, capsys) -> None:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import lane_kinds
    finally:
        sys.path.remove(str(BENCHMARKS))
    out = tmp_path / "r.json"
    command = ["--path", str(tmp_path), "--device", "cpu", "--mib", "24", "--seconds", "0", "--rounds", "1"]
    assert lane_kinds.main([*command, "--out", str(out)]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["r.json"]
    result = json.loads(out.read_text())
    assert len(result["rounds"]) == 1 and set(result["small_s"]["4096"]) == {"plain", "lane"}
    assert "kvikio" in result["not_run"] and "posix + default slots, 2 stream(s)" in capsys.readouterr().out


def test_verdicts(lanes) -> None:
    assert lanes.judge("x", 0.95, [0.96, 0.94, 0.97], True)["verdict"] == "PASS"
    assert lanes.judge("x", 0.95, [0.90, 0.91, 0.99], True)["verdict"] == "FAIL"  # too far below
    assert lanes.judge("x", 1.0, [0.98, 0.99, 1.01], True)["verdict"] == "TIE"
    assert lanes.judge("x", 1.0, [0.98, 0.985, 0.99], True)["verdict"] == "FAIL"  # no repeat reaches it
    not_run = {"line": "x", "target": 1.0, "verdict": "NOT RUN", "why": "no kvikio"}
    assert lanes.judge("x", 1.0, "no kvikio", True) == not_run


def test_ratios_are_taken_within_a_repeat_against_the_tighter_limit(lanes) -> None:
    rates = {
        "drive read": [4.0, 2.0], "drive write": [4.0, 4.0], "H2D, one big copy": [10.0, 1.0],
        "D2H, one big copy": [10.0, 10.0], "drive -> GPU, lane": [3.0, 1.0], "GPU -> drive, lane": [4.0, 4.0],
        "drive -> GPU, DeepSpeed, own buffers": [1.0, 2.0], "drive -> GPU, DeepSpeed, torch-pinned buffers": [2.0, 1.0],
        "H2D + D2H at once, lanes": [15.0, 11.0],
    }  # fmt: skip
    pinned = {"rss_bytes": 1005, "capacity_bytes": 1000, "asked_bytes": 1000}
    lines = {line["line"]: line for line in lanes.acceptance(rates, {"kvikio": "not installed"}, pinned, True)}
    assert lines["drive -> GPU / min(drive read, H2D)"]["ratios"] == [0.75, 1.0]
    assert lines["GPU -> drive / min(drive write, D2H)"]["verdict"] == "PASS"
    assert lines["drive -> GPU / kvikio tuned"]["why"] == "not installed"
    assert lines["drive -> GPU / DeepSpeed async_io + copy"]["ratios"] == [1.5, 0.5]  # against the better of its two
    assert lines["both ways at once / (H2D + D2H)"]["ratios"] == [0.75, 1.0]
    assert "was not measured" in lines["drive -> GPU, limited / full pinned"]["why"]
    held = "pinned bytes held / asked, within 1 %"
    assert lines[held]["verdict"] == "PASS"
    degraded = {**pinned, "asked_bytes": 2000}
    assert lanes.acceptance(rates, {}, degraded, True)[-1]["verdict"] == "FAIL"


def test_bad_arguments_are_refused(lanes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--path", str(tmp_path / "missing")], "is not a directory"),
        (["--size-gib", "0"], "must be positive"),
        (["--skip", "fio"], "does not know fio"),
        (["--path", str(tmp_path), "--size-gib", "1000000"], "the test file needs"),
    ):
        with pytest.raises(SystemExit):
            lanes.parse_arguments(arguments)
        assert said in capsys.readouterr().err

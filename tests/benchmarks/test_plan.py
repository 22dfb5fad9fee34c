"""`plan_vs_measured.py`: what it refuses before a run, and the line that it prints after one."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "plan"))

import plan_vs_measured  # pyright: ignore[reportMissingImports]
from plan_runs import RUNS  # pyright: ignore[reportMissingImports]


def test_a_step_must_be_left_after_the_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    args = plan_vs_measured.parse(["--steps", "3", "--warmup", "1"])
    assert (args.steps, args.warmup) == (3, 1)
    assert plan_vs_measured.parse(["--dry-run"]).warmup < plan_vs_measured.parse(["--dry-run"]).steps
    for warmup in ("3", "-1"):
        with pytest.raises(SystemExit):
            plan_vs_measured.parse(["--steps", "3", "--warmup", warmup])
        assert "no step is left" in capsys.readouterr().err


@pytest.mark.parametrize(("rss_gib", "words"), [(21.0, "+5.0%"), (23.0, "+15.0%"), (19.0, "-5.0%")])
def test_resident_memory_is_compared_with_the_budget(tmp_path: Path, rss_gib: float, words: str) -> None:
    args = plan_vs_measured.parse(["--steps", "3", "--warmup", "1", "--nvme", str(tmp_path)])
    argv = plan_vs_measured.flags_of(RUNS["d-2.9b-budget"], args, tmp_path)
    assert argv[argv.index("--max_steps") + 1] == "3" and "--no_export" in argv
    assert argv[argv.index("--save_strategy") + 1] == "no"
    measured = {"rss_bytes": int(rss_gib * 2**30), "drive_peak_bytes": 32 * 10**9}
    result: dict[str, Any] = {"name": "d-2.9b-budget", "wall_s": 150.2, "rc": 0, "argv": argv, "measured": measured}
    assert plan_vs_measured.words_of(result) == (
        f"d-2.9b-budget: 150 s, exit 0, drive 32.0 GB at most, RSS {rss_gib:.2f} GiB with a budget of 20 GiB ({words})"
    )
    assert plan_vs_measured.words_of({**result, "rc": 1}) == "d-2.9b-budget: 150 s, exit 1"

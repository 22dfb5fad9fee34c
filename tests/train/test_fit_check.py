"""A run that cannot fit: refused before anything is read, on every way to a run; `--plan` shows the whole of it."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from outcore.engine.stream.settings import StreamSettings
from outcore.monitor import SpaceWatch
from outcore.plan import TierUse
from outcore.plan.run import forecast as forecast_module
from outcore.plan.run.forecast import too_small
from outcore.train.run import assemble as run_module
from outcore.train.run import main
from outcore.train.run import planned as space
from tests.forked import start_script
from tests.plan.fakes import plan_of, server
from tests.train.jobs import REPOSITORY, fixtures, flags, fresh_env
from tests.train.test_forecast import SHAPE

corpus, shared, straight, straight_by, in_the_repository = fixtures


def _little_ram(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner sees a machine of 64 MiB."""
    real = forecast_module.run_hardware
    monkeypatch.setattr(forecast_module, "run_hardware", lambda *a, **kw: replace(real(*a, **kw), ram_bytes=64 << 20))


@pytest.mark.parametrize("engine", ["stream", "deepspeed"])
def test_a_run_that_cannot_fit_is_refused_before_its_data_is_read(tmp_path, corpus, monkeypatch, capsys, engine):
    _little_ram(monkeypatch)
    monkeypatch.setattr(run_module, "load_data", lambda *a: pytest.fail("data was read"))
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "1", "--engine", engine)
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert "does not fit this machine: RAM:" in told and "64.00 MiB there" in told and "--fit_check warn" in told
    assert not list(tmp_path.glob("*/r"))


@pytest.mark.slow
def test_two_ranks_are_refused_together(tmp_path: Path, corpus: Path) -> None:
    """As a launcher starts them: neither loads anything, both end, one of them says why."""
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "1", "--preset", "llama-70b")
    logs, ranks = [tmp_path / "0.txt", tmp_path / "1.txt"], []
    for rank, log in enumerate(logs):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "29671"}
        env = fresh_env(**place, MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="1")
        ranks.append(start_script(REPOSITORY / "train_model.py", argv, env, log))
    assert [rank.wait(900) for rank in ranks] == [2, 2], [log.read_text() for log in logs]
    told = [log.read_text() for log in logs]
    assert "RAM" in told[0] and "where every byte goes; --fit_check warn tries it" in told[0], told[0]
    assert "Traceback" not in told[0] + told[1] and not list(tmp_path.glob("*/r")), told


def test_warn_tries_it(tmp_path, corpus, monkeypatch, capsys):
    _little_ram(monkeypatch)
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "1", "--no_export", "--fit_check", "warn")
    assert main([*argv, "--eval_steps", "0", "--save_strategy", "no"]) == 0
    assert "WARNING: this run does not fit this machine" in capsys.readouterr().out


def test_a_drive_that_was_named_and_not_taken_is_told_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    """And `--plan` of the same gives the table, the row that overflows, what would fit, and exit code 1."""
    argv = ["--preset", "llama-70b", "--engine", "stream", "--nvme_offload_path", "/proc/nowhere"]
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert "The drive was not taken: /proc/nowhere cannot be used" in told and "Give a drive" not in told
    assert main([*argv, "--plan"]) == 1
    out = capsys.readouterr().out
    assert "The drive was not taken" in out and "Where every byte lives" in out and "total with pinned" in out
    out = " ".join(out.split())
    assert "short (most of it" in out and ("Smallest change that fits" in out or "No single change" in out)


def test_a_full_checkpoint_drive_is_told_before_anything_is_loaded(tmp_path, corpus, monkeypatch, capsys):
    monkeypatch.setattr(space, "SpaceWatch", partial(SpaceWatch, ask=lambda path: 1_000_000_000))
    monkeypatch.setattr(run_module, "load_data", lambda *a: pytest.fail("data was read"))
    argv = flags(tmp_path, corpus, "--run_name", "r", "--max_steps", "1")
    assert main(argv) == 1
    told = capsys.readouterr().err
    assert "The drive is nearly full" in told and "(--checkpoint_dir DIR moves it)" in told
    assert told.strip().endswith("Nothing was loaded.") and not list(tmp_path.glob("*/r"))


def test_what_is_only_left_free_does_not_count() -> None:
    plan = plan_of(SHAPE, server(), StreamSettings())
    needed = plan.expected_bytes("ram", "pinned")
    exact = replace(plan, tiers=tuple(_with(use, "ram", needed) for use in plan.tiers))
    assert not too_small(exact) and exact.tier("ram").used_bytes > needed, "reserves come on top"
    short = replace(plan, tiers=tuple(_with(use, "ram", needed - 1) for use in plan.tiers))
    assert too_small(short).startswith("RAM: ")
    assert too_small(replace(plan, tiers=tuple(_with(use, "vram", 1) for use in plan.tiers))).startswith("VRAM: ")


def _with(use: TierUse, tier: str, capacity_bytes: int) -> TierUse:
    return replace(use, capacity_bytes=capacity_bytes) if use.tier == tier else use

"""The performance test: the trial end to end on a tiny model, checks by fakes, judge, report."""

import argparse
import dataclasses
import datetime
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outcore.common.files import user_folder
from outcore.common.quantities import GB, GIB
from outcore.performance import health
from outcore.performance import main as main_module
from outcore.performance.against_plan import check_space, compare, judge, project
from outcore.performance.command import main
from outcore.performance.main import PerformanceTest, write
from outcore.performance.show import Check, ComparedRow, Findings, Projection, Verdict, show
from outcore.performance.trial import TrialRun
from outcore.train.configure import parse_config
from outcore.train.run import main as train_main
from tests.plan.fakes import machine

ROOT = Path(__file__).resolve().parents[2]
TEXT = "the quick brown fox jumps over the lazy dog and runs away from the {} bears\n"


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the trial run of a tiny model leaves."""
    folder = tmp_path_factory.mktemp("trial")
    corpus = folder / "text.txt"
    corpus.write_text("\n\n".join(TEXT.format(i) * 12 for i in range(40)))
    flags = ["--seq_length", "32", "--dataset", str(corpus), "--report_to", "none", "--max_steps", "40"]
    flags += [f"--{name}_dir={folder / name}" for name in ("checkpoint", "log", "export")]
    flags += [f"--data_cache_dir={folder / 'cache'}", "--run_name", "t", "--save_steps", "10", "--eval_steps", "20"]
    flags += ["--deepspeed_config", str(ROOT / "deepspeed_config.json"), "--engine", "stream"]
    result = folder / "trial.json"
    assert train_main(flags, TrialRun(result, 2, 60.0, GB)) == 0
    return json.loads(result.read_text())


def test_the_trial_measures_the_real_run(trial: dict[str, Any]):
    assert len(trial["steps"]) == trial["warm_steps"] + 2
    start = trial["startup_s"]
    assert start["model_load"] > 0 and start["engine_init"] > 0 and start["model_load"] < start["all"]
    assert trial["save_s"] > 0 and trial["load_s"] > 0 and trial["saved_bytes"] > trial["state_bytes"] > 0
    assert trial["eval"]["micro_batches"] >= trial["eval"]["measured"] > 0 and trial["eval"]["seconds"] > 0
    assert trial["length"]["total_steps"] == 40 and trial["engine"]["name"] == "stream"
    assert trial["forecast"]["engine"] == "stream" and trial["forecast"]["seq_length"] == 32
    assert trial["rss_peak_bytes"] > 50e6


def test_projection_by_hand(trial: dict[str, Any]):
    steps = [{**record, "step_s": 2.0, "tokens_per_s": 100.0} for record in trial["steps"]]
    steps[0]["step_s"] = 12.0
    known = {**trial, "steps": steps, "save_s": 5.0, "saved_bytes": 7 * GB, "eval": {"seconds": 3.0}}
    known["machine"] = {"nvme_total_bytes": 1000 * GB}
    known["startup_s"] = {"all": 20.0}
    run = project(known, datetime.datetime(2030, 1, 1, 12, 0))
    assert (run.training_s, run.saves_s, run.evaluations_s, run.startup_s) == (80.0, 20.0, 6.0, 30.0)
    assert run.total_s == 136.0 and run.ends_at == "2030-01-01 12:02"
    unsaved = project(known, datetime.datetime(2030, 1, 1, 12, 0), is_saved=False)
    assert (unsaved.saves_s, unsaved.total_s, unsaved.written_bytes) == (0.0, 116.0, 0.0)
    assert run.written_bytes == 4 * 7 * GB and run.rating_share == pytest.approx(28 / 600_000)
    shares = {0.00001: "less than 0.01 %", 0.0123: "1.2 %", 12.5: "1,250 %"}
    for share, words in shares.items():
        assert dataclasses.replace(run, rating_share=share).rating_words.startswith(f"{words} of")


def test_plan_beside_measurement(trial: dict[str, Any]):
    rows = {row.name.strip(): row for row in compare(trial)}
    assert rows["checkpoint"].measured == trial["saved_bytes"]
    assert rows["checkpoint"].planned == pytest.approx(trial["saved_bytes"], rel=0.01)  # fp32: 16 B per parameter
    assert rows["RAM: resident"].planned == trial["forecast"]["expected_rss_bytes"]
    assert "VRAM: tensors, peak" not in rows  # there is no GPU
    medians = sorted(record["step_s"] for record in trial["steps"][trial["warm_steps"] :])
    assert rows["step"].measured == pytest.approx(sum(medians) / 2)
    assert compare({**trial, "forecast": None}) == []


def test_rows_are_off_by_share_and_amount():
    assert (
        ComparedRow("x", "bytes", 12e9, 10e9, 10.0).is_off
        and ComparedRow("x", "bytes", 12e9, 10e9, 10.0).error_pct == 20
    )
    assert not ComparedRow("x", "bytes", 10.9e9, 10e9, 10.0).is_off
    assert not ComparedRow("x", "bytes", 120e6, 100e6, 10.0).is_off  # a fifth, but of little
    assert not ComparedRow("x", "s", None, 1.0, 10.0).is_off and ComparedRow("x", "s", 1.0, 0.0, 10.0).error_pct is None


def _judge(**changes: Any) -> Verdict:
    known: dict[str, Any] = {
        "checks": [Check("a", "ok", "fine"), Check("b", "note", "unknown")], "rows": [], "projection": None,
        "failure": "", "fits": True,
    }  # fmt: skip
    return judge(**{**known, **changes})


def test_verdicts():
    assert _judge().word == "GO" and _judge().exit_code == 0
    run = Projection(10, 1.0, 1.0, 10.0, 0.0, 0.0, 0.0, "", 10.0 * GB, 0.5)
    for changes, words in (
        ({"checks": [Check("power", "warning", "hot")]}, "power: hot"),
        ({"rows": [ComparedRow("step", "s", 1.0, 2.0, 20.0)]}, "step was forecast 50 % too low"),
        ({"fits": False}, "the plan says that it does not fit"),
        ({"projection": run}, "drive wear"),
    ):
        verdict = _judge(**changes)
        assert verdict.word == "GO WITH WARNINGS" and verdict.exit_code == 3 and words in " ".join(verdict.reasons)
    for changes, words in (
        ({"failure": "GPU memory is full"}, "the trial run failed: GPU memory is full"),
        ({"checks": [Check("power", "stop", "on battery")]}, "on battery"),
        ({"checks": check_space(29 * GB, 10 * GB, 2)}, "--save_total_limit"),
        ({"projection": dataclasses.replace(run, rating_share=1.2)}, "more than the drive is rated for"),
    ):
        verdict = _judge(**changes)
        assert verdict.word == "NO-GO" and verdict.exit_code == 1 and words in verdict.reasons[0]
    assert not check_space(30 * GB, 10 * GB, 2)


class _Battery(SimpleNamespace):
    def cpu_percent(self, interval: float) -> float:
        return self.busy

    def virtual_memory(self) -> Any:
        return SimpleNamespace(total=64 * GIB, available=self.available)

    def sensors_battery(self) -> Any:
        return SimpleNamespace(power_plugged=self.plugged, percent=81)


@pytest.mark.parametrize(("changes", "name", "level"), [
    ({}, "power supply", "ok"), ({"plugged": False}, "power supply", "stop"),
    ({"busy": 60.0}, "background load", "warning"), ({"available": 10 * GIB}, "RAM", "warning"),
])  # fmt: skip
def test_health_before_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Any, name: str, level: str):
    monkeypatch.setattr(health, "_sleep", lambda machine: Check("sleep", "ok", "held"))
    fake = _Battery(**{"plugged": True, "busy": 3.0, "available": 50 * GIB, **changes})
    profile = machine().save(tmp_path / "profile.json")
    checks = health.before_the_trial(
        machine(), drive=tmp_path / "to come", profile=profile, psutil_module=fake, sensors=lambda: None
    )
    assert {c.name: c.level for c in checks}[name] == level
    assert {c.name: c.level for c in checks}["machine profile"] == "ok"


@pytest.mark.parametrize(("text", "words"), [(None, "never measured"), ("{", "damaged"), ("other", "another machine")])
def test_a_bad_profile_is_a_warning(tmp_path: Path, text: str | None, words: str):
    path = tmp_path / "profile.json"
    if text == "other":
        machine(cpu_name="another").save(path)
    elif text is not None:
        path.write_text(text)
    check = health._profile(machine(), path)
    assert check.level == "warning" and words in check.words


def test_a_check_that_cannot_be_made_is_a_note(tmp_path: Path):
    def broken() -> Any:
        raise RuntimeError("driver gone")

    checks = health.before_the_trial(
        machine(), drive=tmp_path, profile=tmp_path / "none", psutil_module=SimpleNamespace(), sensors=broken
    )
    levels = {c.name: c for c in checks}
    assert levels["GPU"].level == "note" and "driver gone" in levels["GPU"].words
    assert levels["background load"].level == "note" and levels["drive space"].level == "ok"
    speed = levels["drive speed"]
    assert (speed.level == "warning") == any(words in speed.words for words in ("below 2", "page", "RAM's"))
    kept = health.before_the_trial(machine(), drive=tmp_path, offloads=False, psutil_module=SimpleNamespace())
    assert [(c.level, "steps do not need it" in c.words) for c in kept if c.name == "drive speed"] == [("ok", True)]


def test_layers_that_stay_are_no_part_of_the_memory_that_is_compared(trial: dict[str, Any]):
    forecast = {**trial["forecast"], "expected_tensor_bytes": 5 * GIB, "staying_bytes": 3 * GIB}
    steps = [{**record, "gpu_mem_peak_bytes": 2 * GIB} for record in trial["steps"]]
    found = {**trial, "forecast": forecast, "steps": steps, "staying_bytes": 0}  # planned, and none stayed
    (row,) = [row for row in compare(found) if row.name == "VRAM: tensors, peak"]
    assert row.planned == row.measured == 2 * GIB


def test_updates_ahead_of_the_norm_are_compared_with_their_own_forecast(trial: dict[str, Any]):
    planned = {**trial["forecast"], "expected_rss_bytes": 9 * GIB, "ahead_bytes": 4 * GIB}
    planned["time_whole_s"] = {**planned["time_s"], "step_s": 0.25 * planned["time_s"]["step_s"]}
    for ahead_bytes, times in ((0, planned["time_s"]), (3 * GIB, planned["time_whole_s"])):
        rss = 5 * GIB + ahead_bytes
        rows = {
            row.name: row
            for row in compare({**trial, "forecast": planned, "rss_peak_bytes": rss, "ahead_bytes": ahead_bytes})
        }
        assert rows["RAM: resident"].planned == rows["RAM: resident"].measured == 5 * GIB
        assert rows["step"].planned == times["step_s"]


def test_health_of_the_steps(trial: dict[str, Any]):
    def levels(**changes: Any) -> dict[str, str]:
        steps = [{**record, **changes} for record in trial["steps"]]
        return {c.name: c.level for c in health.during_the_trial({**trial, "steps": steps, "machine": facts})}

    facts = {"pcie_gen_max": 4, "pcie_width_max": 8, "ram_total_bytes": 64 * GIB, "gpu_mem_total_bytes": 8 * GIB}
    fine = levels(throttle=[], pcie_gen=4, pcie_width=8, own_swap_bytes=0, ram_available_bytes=20 * GIB)
    assert set(fine.values()) == {"ok"}
    assert levels(throttle=["thermal (hardware)"])["throttling"] == "warning"
    assert levels(pcie_gen=4, pcie_width=4)["link to the GPU"] == "warning"
    assert levels(own_swap_bytes=GIB)["swap"] == "warning"
    assert levels(ram_available_bytes=GIB)["RAM in the steps"] == "warning"
    assert levels(gpu_mem_bytes=int(7.9 * GIB))["VRAM in the steps"] == "warning"
    trial = {**trial, "staying_bytes": GIB}  # of layers that go when it is needed
    assert levels(gpu_mem_bytes=int(7.9 * GIB))["VRAM in the steps"] == "ok"
    assert levels(phase_s={"stall_nvme": 1e9})["stalls"] == "warning"


def _findings(trial: dict[str, Any] | None, **changes: Any) -> Findings:
    rows = compare(trial) if trial else []
    run = project(trial, datetime.datetime(2030, 1, 1)) if trial else None
    found = Findings(
        "2030-01-01T00:00:00", ("--quick", "<b>"), 9.0,
        Verdict("GO", ("fine",)), (Check("a", "ok", "1 < 2"),), tuple(rows), run, trial=trial,
    )  # fmt: skip
    return dataclasses.replace(found, **changes)


def test_the_report_has_everything_and_the_terminal_says_why(trial: dict[str, Any], tmp_path: Path, capsys):
    found = _findings(trial)
    path = write(found, tmp_path / "logs")
    record = json.loads(path.read_text())
    assert record["exit_code"] == 0
    assert found.projection is not None and record["projection"]["total_s"] == found.projection.total_s
    assert path.name == "performance_report.json" and [file.name for file in path.parent.iterdir()] == [path.name]
    show(found)
    show(_findings(None, verdict=Verdict("NO-GO", ("RAM is full",))))
    out = capsys.readouterr().out
    assert "- fine" in out and "- RAM is full" in out and out.index("GO") < out.index("NO-GO")


@pytest.mark.parametrize(("code", "log", "words"), [
    (1, "x\nerror: GPU memory is full. Use a smaller one.\n", "GPU memory is full. Use a smaller one."),
    (-9, "x", "signal 9 (the system ends the largest process"), (None, "", "did not end within"),
    (7, "Traceback\nKeyError: 1\n", "exit code 7: KeyError: 1"),
])  # fmt: skip
def test_why_a_trial_failed(code: int | None, log: str, words: str):
    assert words in main_module._why_failed(code, log)


def test_wrong_flags_are_usage_and_a_failed_trial_is_no_go(tmp_path, monkeypatch, capsys):
    assert main(["--seq_len", "5"], ROOT) == 2 and main(["--steps", "0"], ROOT) == 2
    monkeypatch.setattr(PerformanceTest, "_trial", lambda self: (None, "RAM is full"))
    monkeypatch.setattr(main_module, "before_the_trial", lambda *a, **k: [])
    flags = ["--no_probe", f"--checkpoint_dir={tmp_path / 'c'}"]
    assert main(flags, ROOT) == 1
    record = json.loads((user_folder() / "performance_report.json").read_text())
    assert record["verdict"]["word"] == "NO-GO" and "RAM is full" in record["verdict"]["reasons"][0]
    assert "NO-GO" in capsys.readouterr().out


def test_what_the_trial_is_at_is_said_while_it_is_waited_for(tmp_path, monkeypatch, capsys):
    """Its own output goes to a file, and it takes minutes."""
    monkeypatch.setattr(main_module, "before_the_trial", lambda *a, **k: [])
    monkeypatch.setattr(main_module, "HEARD_S", 0.1)
    (tmp_path / "text.txt").write_text("a few words")
    flags = ["--no_probe", f"--checkpoint_dir={tmp_path / 'c'}", "--model", str(tmp_path / "none"), "--dataset"]
    assert main([*flags, str(tmp_path / "text.txt")], ROOT) == 1
    assert " ms: it said nothing\n" in capsys.readouterr().out


def test_the_drive_that_the_file_names_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    looked: list[Any] = []
    monkeypatch.setattr(PerformanceTest, "_trial", lambda self: (None, "RAM is full"))
    monkeypatch.setattr(main_module, "before_the_trial", lambda _, **asked: looked.append(asked) or [])
    file = json.loads((ROOT / "deepspeed_config.json").read_text())
    file["outcore"]["nvme_path"] = str(tmp_path)
    (tmp_path / "file.json").write_text(json.dumps(file))
    flags = ["--no_probe", f"--report={tmp_path}", f"--checkpoint_dir={tmp_path / 'c'}", "--deepspeed_config"]
    assert main([*flags, str(tmp_path / "file.json")], ROOT) == 1
    assert looked == [{"drive": tmp_path, "offloads": True}]
    assert main([*flags, str(tmp_path / "none.json")], ROOT) == 2 and "no such file" in capsys.readouterr().err


@pytest.mark.more
def test_the_trial_reads_paths_from_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").touch()
    flags = ["--dataset", "notes.txt", "--deepspeed_config", str(ROOT / "deepspeed_config.json")]
    args = argparse.Namespace(quick=True, steps=1, no_probe=True)
    test = PerformanceTest(parse_config(flags), (), flags, ROOT, args)
    assert test._trial() == (None, "notes.txt is empty: there is nothing to read")


def test_the_profile_is_measured_only_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(main_module, "MEASURED_PROFILE", tmp_path / "machine_profile.json")
    test = object.__new__(PerformanceTest)
    assert not test._has_profile(machine())
    machine().save(tmp_path / "machine_profile.json")
    assert test._has_profile(machine()) and not test._has_profile(machine(cpu_name="another"))
    (tmp_path / "machine_profile.json").write_text("{")
    assert not test._has_profile(machine())

import io
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from outcore.install.environment import Environment
from outcore.install.extensions import BuildResult, build_key, extension_environment, extensions_for, is_built
from outcore.install.requirement_set import choose_set
from outcore.install.verify import doctor, report
from outcore.install.verify.doctor import (
    PACKAGE_PARTS,
    RunningProbe,
    deepspeed_rows,
    extension_rows,
    package_rows,
    probe_rows,
    read_findings,
)
from outcore.install.verify.probe import main as probe_main
from outcore.install.verify.probes.packages import check_packages
from outcore.install.verify.probes.recorder import ProbeRecorder, Unneeded
from outcore.install.verify.rows import ReportRow, all_hold
from tests.install.fakes import REPOSITORY, fake_environment, gpu_machine, machine
from tests.refused import failing

CPU = choose_set(machine(), "auto", REPOSITORY)
CUDA13 = choose_set(gpu_machine(), "auto", REPOSITORY)


def fine(part: str) -> dict[str, object]:
    return {"part": part, "state": "done", "ok": True, "found": "works", "why": ""}


def test_recorder_writes_before_and_after(tmp_path: Path) -> None:
    recorder = ProbeRecorder(tmp_path / "r")
    assert recorder.try_part("a", lambda: "1.0") and recorder.try_part("b", failing(Unneeded("no GPU here")))
    assert not recorder.try_part("c", failing(ImportError("libx.so: cannot open\nmore")))
    findings = read_findings(tmp_path / "r", "")
    assert findings["a"]["found"] == "1.0" and findings["b"]["ok"] and findings["b"]["found"] == "no GPU here"
    assert findings["c"]["why"] == "ImportError: libx.so: cannot open"
    states = [json.loads(line)["state"] for line in (tmp_path / "r").read_text().splitlines()]
    assert states == ["begun", "done"] * 3


def test_part_that_brought_the_child_down_is_named(tmp_path: Path) -> None:
    (tmp_path / "r").write_text('{"part": "a", "state": "begun"}\n{"part": "cut o')
    findings = read_findings(tmp_path / "r", "the check was ended by SIGSEGV")
    assert findings == {
        "a": {"part": "a", "state": "begun", "ok": False, "found": "", "why": "the check was ended by SIGSEGV"}
    }
    assert read_findings(tmp_path / "none", "") == {}


def run_code(tmp_path: Path, code: str, timeout_s: float = 30.0):
    results = tmp_path / "results"
    probe = RunningProbe([sys.executable, "-c", code, str(results)], dict(os.environ), results, tmp_path)
    return probe.finish(timeout_s)


@pytest.mark.parametrize(("code", "ended"), [
    ("print('fine')", ""), ("print('last words'); raise SystemExit(4)", "exit code 4: last words"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "another CPU"),
])  # fmt: skip
def test_how_a_probe_ends(tmp_path: Path, code: str, ended: str) -> None:
    assert ended in run_code(tmp_path, code)[1]
    assert run_code(tmp_path, "pass")[1] == ""


def test_probe_that_hangs_is_ended(tmp_path: Path) -> None:
    code = "import time; time.sleep(60)"
    assert run_code(tmp_path, code, timeout_s=0.5) == ({}, "no answer within 500 ms")


def test_the_part_that_is_being_tried_is_told_meanwhile(tmp_path: Path) -> None:
    code = (
        "import json, sys, time\nfor part in ('torch', 'peft'):\n print(json.dumps({'part': part, 'state': 'begun'}), "
    )
    code += "file=open(sys.argv[1], 'a'), flush=True)\n time.sleep(1.5)"
    told: list[str] = []
    results = tmp_path / "results"
    RunningProbe([sys.executable, "-c", code, str(results)], dict(os.environ), results, tmp_path).finish(
        tell=told.append
    )
    assert list(dict.fromkeys(told)) == ["torch", "peft"]


def test_unknown_signal_number() -> None:
    assert "signal 99" in doctor._how_it_ended(-99, "")
    assert signal.Signals.SIGSEGV.name in doctor._how_it_ended(-11, "")


def test_package_rows(tmp_path: Path) -> None:
    environment = fake_environment(tmp_path, CPU.pins | {"peft": "0.0.1"})
    findings = {part: fine(part) for part in PACKAGE_PARTS if part != "datasets"}
    findings["torch"] = {"part": "torch", "state": "done", "ok": False, "found": "", "why": "OSError: libgomp"}
    rows = {row.part: row for row in package_rows(findings, "the check was ended by SIGABRT", environment, CPU)}
    assert rows["transformers"].status == "OK" and rows["transformers"].needed == "transformers 5.23.0"
    assert rows["torch"].status == "missing" and "libgomp" in rows["torch"].found and not rows["torch"].holds
    assert rows["datasets"].status == "missing" and "SIGABRT" in rows["datasets"].found
    assert rows["peft"].status == "degraded" and "0.0.1 installed" in rows["peft"].found and rows["peft"].fix
    assert rows["cupy"].status == "OK" and "not in the cpu set" in rows["cupy"].needed


def test_deepspeed_row(tmp_path: Path) -> None:
    environment = fake_environment(tmp_path, CPU.pins)
    assert deepspeed_rows({"deepspeed": fine("deepspeed")}, "", environment, CPU)[0].status == "OK"
    row = deepspeed_rows({}, "exit code 1", environment, CPU)[0]
    assert row.status == "missing" and row.required and "exit code 1" in row.found


def test_extension_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "missing_prerequisite", lambda: "")
    results = [BuildResult("cpu_adam", False, "no C++ compiler")]
    found = {"cpu_adam": fine("cpu_adam")}
    rows = {row.part: row for row in extension_rows(found, "", CPU, ["cpu_adam"], results, Path("/ext"))}
    assert rows["cpu_adam"].status == "OK"
    crashed = extension_rows({}, "the check was ended by SIGILL", CPU, ["cpu_adam"], results, Path("/ext"))[0]
    assert crashed.status == "missing" and "rm -rf /ext/cpu_adam" in crashed.fix
    failed = extension_rows({}, "", CPU, [], results, Path("/ext"))[0]
    assert failed.status == "missing" and "build-essential" in failed.fix and not failed.holds
    assert rows["deepspeed_shm_comm"].status == "missing" and not rows["deepspeed_shm_comm"].holds
    assert "not built yet" in rows["deepspeed_shm_comm"].found


def test_set_without_deepspeed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = choose_set(machine(os_family="windows"), "auto", REPOSITORY)
    started: list[str] = []

    class Probe:
        def __init__(self, command, environ, results, cwd) -> None:
            started.append(command[3])

        def finish(self, tell):
            return {part: fine(part) for part in PACKAGE_PARTS}, ""

    monkeypatch.setattr(doctor, "RunningProbe", Probe)
    environment = fake_environment(tmp_path, chosen.pins)
    rows = probe_rows(environment, chosen, REPOSITORY, {"TORCH_EXTENSIONS_DIR": str(tmp_path)})
    assert started == ["packages"]
    assert rows[-1].part == "deepspeed" and not rows[-1].holds and "WSL2" in rows[-1].fix


def test_deepspeed_is_not_tried_before_its_extensions_are_asked_for(tmp_path, monkeypatch) -> None:
    started: list[str] = []

    class Probe:
        def __init__(self, command, environ, results, cwd) -> None:
            started.append(command[3])

        def finish(self, tell):
            return {part: fine(part) for part in (*PACKAGE_PARTS, "deepspeed")}, ""

    monkeypatch.setattr(doctor, "RunningProbe", Probe)
    environment, environ = fake_environment(tmp_path, CPU.pins), {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    row = probe_rows(environment, CPU, REPOSITORY, environ)[-1]
    assert started == ["packages"] and row.holds and CPU.pins["deepspeed"] in row.found
    assert "python setup.py --deepspeed" in row.fix
    failed = [BuildResult("cpu_adam", False, "no C++ compiler")]
    rows = {row.part: row for row in probe_rows(environment, CPU, REPOSITORY, environ, failed)}
    assert started[1:] == ["packages", "deepspeed"] and not rows["cpu_adam"].holds


def test_the_cpu_optimizer_is_built_ahead_or_torch_is_named() -> None:
    built = doctor.optimizer_row({"CPU optimizer": fine("CPU optimizer")}, "")
    assert built.status == "OK" and built.found.startswith("built: ")
    why = "no C++ compiler (g++, clang++, c++) on PATH, so the CPU optimizer cannot be built\nand more"
    missing = doctor.optimizer_row({"CPU optimizer": {"ok": False, "why": why}}, "")
    assert missing.status == "degraded" and missing.holds and "torch does its work" in missing.found
    assert "apt install g++" in missing.fix and "and more" not in missing.found
    late = doctor.optimizer_row({"CPU optimizer": {"ok": False, "why": "no answer within 3 min 00 s"}}, "")
    assert late.found.startswith("not built yet") and "builds it now" in late.fix
    crashed = doctor.optimizer_row({}, "the check was ended by SIGABRT")
    assert crashed.status == "degraded" and "SIGABRT" in crashed.found and "outcore.optim" in crashed.fix


def test_interrupt_ends_the_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[int] = []

    class Probe:
        def __init__(self, *arguments) -> None:
            pass

        def finish(self, tell):
            raise KeyboardInterrupt

        def stop(self) -> None:
            stopped.append(1)

    monkeypatch.setattr(doctor, "RunningProbe", Probe)
    environment, asked = fake_environment(tmp_path), [BuildResult("cpu_adam", True)]
    with pytest.raises(KeyboardInterrupt):
        probe_rows(environment, CPU, REPOSITORY, {"TORCH_EXTENSIONS_DIR": str(tmp_path)}, asked)
    assert stopped == [1, 1]


@pytest.mark.more
def test_packages_of_this_environment_work(tmp_path: Path) -> None:
    """The process of its own that the doctor gives them is that of DeepSpeed's step, below."""
    check_packages(ProbeRecorder(tmp_path / "r"), "cpu")
    findings = read_findings(tmp_path / "r", "")
    assert set(findings) == {*PACKAGE_PARTS, "CPU optimizer"}
    broken = {part: finding["why"] for part, finding in findings.items() if not finding["ok"]}
    assert broken == {}


@pytest.mark.gpu
def test_gpu_packages_of_this_environment_work(tmp_path: Path) -> None:
    check_packages(ProbeRecorder(tmp_path / "r"), "cuda")
    findings = read_findings(tmp_path / "r", "")
    assert findings["torch"]["ok"] and findings["NVML"]["ok"], findings
    assert findings["cupy"]["ok"] and findings["kvikio"]["ok"], findings


def test_cuda_trials_fail_without_a_gpu(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    check_packages(ProbeRecorder(tmp_path / "r"), "cuda")
    findings = read_findings(tmp_path / "r", "")
    assert "sees no GPU" in findings["torch"]["why"] and not findings["NVML"]["ok"]
    assert not findings["cupy"]["ok"] and not findings["kvikio"]["ok"]


@pytest.mark.more
def test_deepspeed_takes_a_right_step_here(tmp_path: Path) -> None:
    """End to end on this environment's extensions; they are built by setup.py, never by a test."""
    environ = dict(os.environ) | extension_environment("cpu") | {"PYTHONPATH": str(REPOSITORY)}
    directory = Path(environ["TORCH_EXTENSIONS_DIR"])
    environment = Environment(Path(sys.prefix), "this one")
    key = build_key(environment, "cpu")
    built = [e.name for e in extensions_for("cpu") if is_built(directory, e, key)]
    if len(built) < len(extensions_for("cpu")):
        pytest.skip("DeepSpeed's extensions are not built here: run setup.py")
    results = tmp_path / "results"
    command = [sys.executable, "-m", doctor.PROBE, "deepspeed", str(results), "cpu", ",".join(built)]
    findings, ended = RunningProbe(command, environ, results, REPOSITORY).finish(timeout_s=900)
    rows = deepspeed_rows(findings, ended, environment, CPU)
    rows += extension_rows(findings, ended, CPU, built, (), directory)
    assert "one ZeRO-3 step on cpu" in rows[0].found
    assert all_hold(rows), [row for row in rows if not row.holds]


def test_probe_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outcore.install.verify.probes import deepspeed as probe_deepspeed
    from outcore.install.verify.probes import packages as probe_packages

    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(probe_packages, "check_packages", lambda recorder, *rest: calls.append(rest))
    monkeypatch.setattr(probe_deepspeed, "check_deepspeed", lambda recorder, *rest: calls.append(rest))
    monkeypatch.setattr(probe_deepspeed, "build", lambda name: calls.append((name,)))
    probe_main(["packages", str(tmp_path / "r"), "cpu"])
    probe_main(["deepspeed", str(tmp_path / "r"), "cpu", "a,b,"])
    probe_main(["build", "CPUAdamBuilder"])
    assert probe_main.__module__ == doctor.PROBE, "what the doctor starts"
    assert calls == [("cpu",), ("cpu", ["a", "b"]), ("CPUAdamBuilder",)]
    with pytest.raises(SystemExit, match="unknown probe"):
        probe_main(["x", str(tmp_path / "r"), "cpu"])


def test_deepspeed_trials_with_fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outcore.install.verify.probes import deepspeed as probe_deepspeed

    class Builder:
        def load(self, verbose: bool):
            return self

    steps: list[bool] = []
    monkeypatch.setattr(probe_deepspeed, "_builder", lambda name: Builder())
    monkeypatch.setattr(probe_deepspeed, "_zero3_step", lambda accelerator, has_adam: steps.append(has_adam) or "step")
    probe_deepspeed.check_deepspeed(ProbeRecorder(tmp_path / "a"), "cuda", ["cpu_adam"])
    findings = read_findings(tmp_path / "a", "")
    assert set(findings) == {"cpu_adam", "deepspeed"} and all(f["ok"] for f in findings.values())
    probe_deepspeed.check_deepspeed(ProbeRecorder(tmp_path / "b"), "cpu", ["cpu_adam"])
    findings = read_findings(tmp_path / "b", "")
    assert "shm_comm" in findings["deepspeed"]["why"] and steps == [True]
    probe_deepspeed.build("X")


ROWS = [
    ReportRow("good", "2.0 [cpu]", "2.0", "OK", True),
    ReportRow("bad", "nothing", "1.0", "missing", True, "`python setup.py`"),
    ReportRow("slow", "an SSD", "NVMe", "degraded", False),
]


def test_tables(tmp_path: Path) -> None:
    content = report.make_report(ROWS, machine(), "cpu", "/v")
    assert content["ok"] is False and content["rows"][1]["fix"] == "`python setup.py`"
    assert report.make_report(ROWS[:1], machine(), "cpu", "/v")["ok"] is True
    assert report.make_report(ROWS[:1], machine(), "cpu", "/v", error="full")["ok"] is False
    report.write_report(content, tmp_path / "logs" / "r.json")
    out = io.StringIO()
    report.print_table(ROWS, out)
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("OK") and lines[1].startswith("missing") and "fix: `python setup.py`" in lines[3]

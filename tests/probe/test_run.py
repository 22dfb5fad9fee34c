"""gds_optimizer.py from end to end: a tiny run, wrong input, interruption, and stages that cannot run."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outcore.common.quantities import KIB, MIB
from outcore.machine import Machine
from outcore.plan.profile import MEASURED_PROFILE
from outcore.probe import main as main_module
from outcore.probe import run as optimizer_module
from outcore.probe.bench import drive_file as direct_bench
from outcore.probe.bench import measurement as memory_bench
from outcore.probe.bench.budget import EFFORTS
from outcore.probe.bench.drive_file import PREFIX, RUN, SUFFIX, remove_own_files
from outcore.probe.gds.facts import GdsFacts, GpuFact, ReadTest
from outcore.probe.main import main
from outcore.probe.options import UsageError, parse_options
from outcore.probe.run import STAGES, ProbeRun, StageProgress
from outcore.probe.system import ChildResult, RealSystem
from outcore.storage import PosixEngine, StorageError
from tests.probe.report_schema import check_report

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--quick", "--file-mib", "8", "--staging-gib", "0.03"]


@pytest.fixture(autouse=True)
def short_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process cells take no time, and no stage is left out for lack of it."""
    quick = replace(EFFORTS["quick"], cell_s=0.005, total_s=60.0, chunks_bytes=(64 * KIB, MIB), depths=(1, 2))
    monkeypatch.setitem(EFFORTS, "quick", quick)
    monkeypatch.setattr(optimizer_module, "COPY_MEMORY_BYTES", 2 * MIB)
    monkeypatch.setattr(optimizer_module, "MOST_UPDATES_S", 0.01)
    monkeypatch.setattr(optimizer_module, "MOST_COMPUTE_S", 0.1)
    monkeypatch.setattr(optimizer_module, "UPDATES_NUMEL", 1 << 18)
    monkeypatch.setattr(memory_bench, "ARRAY_BYTES", MIB)


def test_a_run_from_end_to_end(tmp_path: Path, capsys: Any) -> None:
    """The script itself is started by the test of Ctrl-C."""
    drive, logs = tmp_path / "drive", tmp_path / "logs"
    drive.mkdir()
    flags = ["--json", "--path", str(drive), "--logs", str(logs), "--config", str(tmp_path / "c.json")]
    assert main([*TINY, *flags], tmp_path) == 0
    done = capsys.readouterr()
    report = json.loads(done.out)
    assert check_report(report) == []
    assert json.loads((logs / "gds_report.json").read_text()) == report
    assert Machine.load(logs / "machine_profile.json").links is not None
    assert list(drive.iterdir()) == []
    assert report["links"]["drive_read_gb_per_s"] > 0
    assert report["settings"]["outcore"]["nvme_path"] == str(drive)
    assert any("does not exist: using the defaults" in warning for warning in report["warnings"])
    assert not (tmp_path / "c.json").exists()
    if not torch.cuda.is_available():
        assert report["verdict"] == "staged" and "No GPU" in report["headline"]
        assert "no GPU" in " ".join(report["skipped"])
    assert f"[{len(STAGES) + 1}/{len(STAGES) + 1}]" in done.err  # plain progress lines, no bar


def test_apply_writes_the_settings(tmp_path: Path, capsys: Any) -> None:
    config = tmp_path / "c.json"
    arguments = [*TINY, "--path", str(tmp_path), "--logs", str(tmp_path / "logs"), "--config", str(config), "--apply"]
    assert main(arguments, tmp_path) == 2
    assert "add --create" in capsys.readouterr().err
    config.write_text('{"train_batch_size": 8, "outcore": {"residency": "auto"}}')
    assert main(arguments, tmp_path) == 0
    out = capsys.readouterr().out
    assert "applied to" in out and "aio.block_size" in out
    written = json.loads(config.read_text())
    assert list(written)[:2] == ["train_batch_size", "outcore"]
    assert written["outcore"]["residency"] == "auto" and written["aio"]["block_size"] >= 4096
    assert (tmp_path / "c.json.bak").exists()


def test_several_paths_and_a_bad_one(tmp_path: Path, capsys: Any) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    arguments = [*TINY, "--logs", str(tmp_path / "logs"), "--path", str(tmp_path / "a")]
    assert main([*arguments, "--path", str(tmp_path / "b")], tmp_path) == 0
    report = json.loads((tmp_path / "logs" / "gds_report.json").read_text())
    assert [drive["path"] for drive in report["drives"]] == [str(tmp_path / "a"), str(tmp_path / "b")]
    capsys.readouterr()
    assert main([*arguments, "--path", str(tmp_path / "c")], tmp_path) == 2
    assert "does not exist: create it" in capsys.readouterr().err


@pytest.mark.more
def test_ctrl_c_removes_the_test_file(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "gds_optimizer.py"), "--file-mib", "64", "--path", str(tmp_path)]
    process = subprocess.Popen(
        [*command, "--logs", str(tmp_path / "logs")],
        stderr=subprocess.PIPE,
        text=True,
        # Whoever started the tests in the background may have had Ctrl-C ignored; children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline_s = time.monotonic() + 300
        assert process.stderr is not None
        while "drives" not in process.stderr.readline():
            assert time.monotonic() < deadline_s
        while not list(tmp_path.glob(f"{PREFIX}*")):
            assert time.monotonic() < deadline_s and process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "interrupted; the test files are removed" in err and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("between", ["made and noted", "noted and removed"])
def test_ctrl_c_between_two_contexts(between, tmp_path, capsys, monkeypatch):
    """The signal arrives where no `try` is around the file: in the opening call itself, in the removing one."""
    owner, name = (os, "open") if between == "made and noted" else (Path, "unlink")
    real = getattr(owner, name)
    seen = []

    def interrupted(path: Any, *arguments: Any, **named: Any) -> Any:
        if not str(path).endswith(SUFFIX) or seen:
            return real(path, *arguments, **named)
        seen.append(path)
        if name == "open":
            os.close(real(path, *arguments, **named))
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupted)
    assert main([*TINY, "--path", str(tmp_path), "--logs", str(tmp_path / "logs")], tmp_path) == 130
    assert "interrupted; the test files are removed" in capsys.readouterr().err
    assert seen and list(tmp_path.iterdir()) == []


def test_a_test_file_that_cannot_be_removed_is_named(tmp_path, capsys, monkeypatch):
    left = tmp_path / "left.bin"
    mine, other = (tmp_path / f"{PREFIX}{run}-1{SUFFIX}" for run in (RUN, "123-abc"))
    mine.touch()
    other.touch()
    assert remove_own_files([tmp_path]) == [] and list(tmp_path.iterdir()) == [other]
    monkeypatch.setattr(main_module, "remove_own_files", lambda directories: [left])
    monkeypatch.setattr(main_module.ProbeRun, "run", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main([*TINY, "--path", str(tmp_path), "--logs", str(tmp_path / "logs")], tmp_path) == 130
    assert f"interrupted; remove {left} by hand" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--quick", "--full"], ["--seconds", "0"], ["--file-mib", "x"], ["--staging-gib", "-1"], ["--speed"]]
)
def test_wrong_flags_exit_with_2(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_options(arguments, tmp_path)
    assert stopped.value.code == 2


def test_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = parse_options([], tmp_path)
    assert options.paths == (tmp_path,) and not options.paths_named
    elsewhere = parse_options([], tmp_path / "repository").logs_dir
    assert elsewhere == MEASURED_PROFILE.parent  # where the planner looks, whatever the repository's folder
    assert options.effort.name == "default" and options.effort.total_s < 90
    config = tmp_path / "deepspeed_config.json"
    config.write_text(json.dumps({"outcore": {"nvme_path": str(tmp_path / "gone")}}))
    assert "does not exist: measuring" in parse_options([], tmp_path).notes[0]
    config.write_text(json.dumps({"outcore": {"nvme_path": str(tmp_path)}}))
    assert parse_options(["--full"], tmp_path).paths == (tmp_path,)
    assert parse_options(["--quick", "--path", ".", "--path", "."], tmp_path).paths == (tmp_path,)
    config.write_text("{")
    with pytest.raises(UsageError, match="not valid JSON"):
        parse_options([], tmp_path)


def test_logs_that_cannot_be_written(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "logs").write_text("a file")
    assert main([*TINY, "--path", str(tmp_path), "--logs", str(tmp_path / "logs")], tmp_path) == 2
    assert "--logs" in capsys.readouterr().err


def optimizer(tmp_path: Path, *machine: Any) -> ProbeRun:
    options = parse_options([*TINY, "--path", str(tmp_path), "--logs", str(tmp_path)], tmp_path)
    return ProbeRun(options, StageProgress(STAGES), *machine)


def test_a_drive_that_fails_is_left_out_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **settings: Any) -> None:
        raise StorageError("read", path=tmp_path / "x", offset=0, wanted=1, got=0, errno=5)

    monkeypatch.setattr(optimizer_module, "measure_drive", fail)
    found = optimizer(tmp_path).run()
    assert found.drives == [] and found.latency is None
    assert any(str(tmp_path) in line for line in found.skipped)
    assert found.link_rates()["ram"] and found.updates is not None and found.updates.gparams_per_s["split8"] > 0
    assert list(tmp_path.iterdir()) == []


def test_no_staging_memory_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("no staging memory: the machine gave none")

    monkeypatch.setattr(optimizer_module, "build_pool", fail)
    found = optimizer(tmp_path).run()
    assert found.staging is None
    assert any("no staging memory" in warning for warning in found.warnings)


def test_when_the_time_is_up_lanes_are_measured_all_the_same(tmp_path: Path) -> None:
    run = optimizer(tmp_path)
    run.budget.total_s = 0.0  # a slow drive took it all
    found = run.run()
    assert found.link_rates()["drive_to_gpu"] and found.latency is not None


@pytest.mark.more(after=1)
@pytest.mark.parametrize("kvikio_works", [True, False])
def test_the_stages_of_a_gpu_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kvikio_works: bool) -> None:
    """The orchestration of a GPU machine, with host memory in the GPU's place."""
    read = ReadTest("ok", backend="GDS") if kvikio_works else ReadTest("signal", "SIGABRT")
    facts = GdsFacts(
        gpus=(GpuFact("NVIDIA H200"),), kvikio_version="26.10", auto=read, direct=ReadTest("refused", "no")
    )
    monkeypatch.setattr(optimizer_module, "collect_facts", lambda *arguments: facts)
    monkeypatch.setattr("outcore.probe.run.gpu_id", lambda: 0)
    monkeypatch.setattr(direct_bench, "open_engine", lambda name, **settings: PosixEngine(num_threads=2))
    run = optimizer(tmp_path)
    run.has_gpu = True
    run.budget.__dict__["_left"] |= {"copies": 1.0, "direct": 1.0}
    found = run.run()
    rates = found.link_rates()
    assert rates["h2d"] and rates["d2h"] and rates["both_ways"] and rates["drive_to_gpu"]
    assert found.pcie is not None
    assert found.latency is not None
    if kvikio_works:
        assert found.verdict.path == "cufile-compat"
        assert found.direct_gb_per_s["kvikio"] > 0 and "kvikio" in found.latency.median_s
    else:
        assert found.direct_gb_per_s == {} and any("SIGABRT" in line for line in found.skipped)


def test_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = optimizer(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    asked: list[Any] = []
    monkeypatch.setattr(
        optimizer_module, "measure_peers", lambda devices, limit_s: asked.extend(devices) or ([], ["a note"])
    )
    run.budget.__dict__["_left"]["peers"] = 1.0
    found, _ = run._ladder()
    run._peers(found)
    assert [str(device) for device in asked] == ["cuda:0", "cuda:1"] and "a note" in found.warnings


def test_a_gpu_that_torch_cannot_use_is_said(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch can use this machine's GPU")

    class System(RealSystem):
        def run_child(self, arguments: Any, timeout_s: float, env: Any = None) -> ChildResult:
            return ChildResult(0, "")

    found, _ = optimizer(tmp_path, System(), Machine.load("rtx4070-laptop"))._ladder()
    assert any("cannot use the NVIDIA GeForce RTX 4070" in warning for warning in found.warnings)


def test_a_stage_that_is_not_announced_is_an_error() -> None:
    with pytest.raises(ValueError):
        StageProgress(["a"]).stage("b")


def test_termination_unwinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def stop(self: ProbeRun) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(10)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(main_module.ProbeRun, "run", stop)
    try:
        assert main([*TINY, "--path", str(tmp_path)], tmp_path) == 143
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "terminated" in capsys.readouterr().err

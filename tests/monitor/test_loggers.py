"""TensorBoard, trackers, and the Prometheus endpoint."""

import math
import socket
import sys
import types
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from outcore.monitor import Logger, LoggerGroup, MetricsServer, check_report_to, make_loggers
from tests.refused import refused

RECORD = {"step": 1, "loss": 2.5, "phase_s": {"forward": 0.3}, "throttle": ["power cap"], "skipped": False, "x": None}


def test_tensorboard_files_can_be_read_back(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    said: list[str] = []
    with_run = tmp_path / "my run"
    loggers = make_loggers("tensorboard", with_run, say=said.append)
    loggers.log_header({"run": "my run"})
    for step in (1, 2, 3):
        loggers.log_step({**RECORD, "step": step, "loss": 3.0 - step})
    loggers.log_eval({"step": 2, "eval_loss": 1.5, "eval_perplexity": math.inf})
    loggers.close()
    resumed = make_loggers(["tensorboard"], with_run, resume_step=1, say=said.append)
    resumed.log_step({"step": 2, "loss": 77.0})
    resumed.close()
    events = EventAccumulator(str(with_run / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 2.0), (2, 77.0)]
    assert set(events.Tags()["scalars"]) == {"train/loss", "train/phase_s/forward", "eval/eval_loss"}
    assert said == []


def test_importing_loggers_needs_no_torch_or_tensorflow() -> None:
    import subprocess

    code = "import sys, outcore.monitor as m; m.make_loggers('none', '.'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("report_to", "names"),
    [("none", ()), ("", ()), ("tensorboard", ("tensorboard",)), (" TensorBoard , tensorboard", ("tensorboard",))],
)
def test_names_are_read(report_to: str, names: tuple[str, ...]) -> None:
    assert check_report_to(report_to) == names


def test_all_is_what_is_installed() -> None:
    assert "tensorboard" in check_report_to("all")


@pytest.mark.parametrize(("report_to", "words"), [
    ("tensorbord", r"no 'tensorbord'.*Did you mean 'tensorboard'"),
    ("neptune", r"no 'neptune'; it knows tensorboard, wandb, trackio, mlflow"), ("none,tensorboard", "choose one"),
])  # fmt: skip
def test_wrong_names_fail_early(report_to: str, words: str, tmp_path: Path) -> None:
    refused(ValueError, words, lambda: make_loggers(report_to, tmp_path, enabled=False))


def test_a_tool_that_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trackio").mkdir()  # a bare folder is not the package
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "trackio", raising=False)
    refused(ValueError, "trackio, which is not installed: pip install trackio", lambda: check_report_to("trackio"))


def fake_tracker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> list[tuple]:
    calls: list[tuple] = []
    (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = types.ModuleType(name)
    module.__spec__ = types.SimpleNamespace(origin="x")  # type: ignore[assignment]
    module.init = lambda **settings: calls.append(("init", settings)) or object()  # type: ignore[attr-defined]
    module.log = lambda values, step: calls.append(("log", values, step))  # type: ignore[attr-defined]
    module.finish = lambda: calls.append(("finish",))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_wandb_gets_the_run_its_folder_and_the_scalars(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = fake_tracker(monkeypatch, tmp_path, "wandb")
    loggers = make_loggers("wandb", tmp_path / "run-1", project="p")
    loggers.log_header({"model": "tiny"})
    loggers.log_step({**RECORD, "grad_norm": math.nan})
    loggers.log_eval({"step": 1, "eval_loss": 2.0})
    loggers.close()
    assert calls == [
        ("init", {"config": {"model": "tiny"}, "project": "p", "name": "run-1", "dir": str(tmp_path / "run-1")}),
        ("log", {"train/loss": 2.5, "train/phase_s/forward": 0.3}, 1),
        ("log", {"eval/eval_loss": 2.0}, 1),
        ("finish",),
    ]


def test_a_logger_that_fails_is_off_and_said_once() -> None:
    class Failing(Logger):
        def log(self, group: str, record: dict) -> None:
            raise ConnectionError("no network")

    seen: list[dict] = []

    class Keeping(Logger):
        def log(self, group: str, record: dict) -> None:
            seen.append(record)

    said: list[str] = []
    group = LoggerGroup({"wandb": Failing(), "other": Keeping()}, said.append)
    group.log_step(RECORD)
    group.log_step(RECORD)
    assert len(seen) == 2 and group.names == ("other",)
    assert len(said) == 1 and "wandb" in said[0] and "no network" in said[0]
    group.close()


def test_a_logger_that_cannot_start_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    loggers = make_loggers("tensorboard", tmp_path / "file", say=said.append)
    assert loggers.names == () and "tensorboard could not start" in said[0]
    loggers.log_step(RECORD)


def test_other_ranks_report_nowhere(tmp_path: Path) -> None:
    assert make_loggers("tensorboard", tmp_path / "run", enabled=False).names == ()
    assert not (tmp_path / "run").exists()


def fetch(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        return answer.read().decode()


def test_prometheus_gets_the_latest_figures() -> None:
    said: list[str] = []
    server = MetricsServer(0, say=said.append)
    assert f"127.0.0.1:{server.port}" in said[0] and "anyone" not in said[0]
    assert "outcore" not in fetch(server.port)
    server.log_header({"run": 'a "b"'})
    server.log("train", {**RECORD, "nvme_read_bytes": 10, "nvme_write_bytes": None})
    server.log("train", {**RECORD, "step": 2, "loss": math.nan, "nvme_read_bytes": 5})
    server.log("eval", {"step": 2, "eval_loss": math.inf})
    text = fetch(server.port)
    assert 'outcore_step{run="a \\"b\\""} 2' in text
    assert 'outcore_nvme_read_bytes_total{run="a \\"b\\""} 15' in text
    assert "# TYPE outcore_nvme_read_bytes_total counter" in text and "# TYPE outcore_loss gauge" in text
    assert 'outcore_loss{run="a \\"b\\""} NaN' in text and 'outcore_eval_loss{run="a \\"b\\""} +Inf' in text
    assert 'outcore_phase_s{phase="forward",run=' in text and 'outcore_throttle{reason="power cap",run=' in text
    assert "skipped" not in text and "outcore_x" not in text
    server.close()
    server.close()
    with pytest.raises(urllib.error.URLError):
        fetch(server.port)


def test_a_port_that_is_taken_is_said_and_the_run_goes_on() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said: list[str] = []
        server = MetricsServer(taken.getsockname()[1], say=said.append)
        assert len(said) == 1 and "another --metrics_port" in said[0] and "Training goes on" in said[0]
        server.log("train", RECORD)
        server.close()


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    refused(ValueError, "between 1 and 65535", lambda: MetricsServer(port))

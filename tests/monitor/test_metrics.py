"""metrics.jsonl: kill -9, resume, full disk, values that are not finite."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.monitor import Metrics, MetricsLog, MetricsLogError, read_metrics
from outcore.monitor.metrics.log import encode_line
from tests.refused import failing, refused


def write_run(path: Path, num_steps: int, **settings: int) -> None:
    with MetricsLog(path, **settings) as log:
        log.write_header({"run": "r", "versions": {"torch": "2"}})
        for step in range(1, num_steps + 1):
            log.write_step({"step": step, "loss": 1.0 / step})


def steps_of(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines() if "event" not in json.loads(line)]


def test_resume_leaves_each_step_once(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "my run" / "metrics.jsonl"
    write_run(path, 10)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0]["event"] == "header" and lines[0]["run"] == "r" and lines[1] == {"step": 1, "loss": 1.0}
    with MetricsLog(path) as log:  # a new run of the same name keeps the old file
        assert log.kept_path == path.with_name("metrics.1.jsonl") and steps_of(log.kept_path) == list(range(1, 11))
        log.write_header({"run": "second"})
        for step in range(1, 9):
            log.write_step({"step": step, "loss": 0.0})
        log.write_eval({"step": 5, "eval_loss": 1.5})
        log.write_eval({"step": 8, "eval_loss": 1.4})
    with MetricsLog(path, resume_step=5) as log:
        assert log.dropped_lines == 4
        log.write_header({"run": "second", "pid": 7})
        log.write_step({"step": 6, "loss": 6.0})
        log.write_eval({"step": 6, "eval_loss": 1.45})
    assert steps_of(path) == [1, 2, 3, 4, 5, 6]
    metrics = read_metrics(path)
    assert [step["step"] for step in metrics.steps] == [1, 2, 3, 4, 5, 6] and metrics.steps[-1]["loss"] == 6.0
    assert [(e["step"], e["eval_loss"]) for e in metrics.evals] == [(5, 1.5), (6, 1.45)]
    assert metrics.resumed_at == [5] and metrics.header["pid"] == 7 and metrics.header["run"] == "second"
    assert not list(path.parent.glob("*.tmp"))


@settings(deadline=None, max_examples=30)
@given(cut=st.integers(min_value=1, max_value=60))
def test_a_torn_tail_is_repaired_on_resume(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    path = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    write_run(path, 6)
    data = path.read_bytes()
    path.write_bytes(data[:-cut])
    whole = steps_of_whole_lines(path)
    reader = read_metrics(path)
    assert [step["step"] for step in reader.steps] == whole
    with MetricsLog(path, resume_step=6) as log:
        log.write_step({"step": 7})
    assert steps_of(path) == [*whole, 7]


def steps_of_whole_lines(path: Path) -> list[int]:
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line)["step"] for line in lines if "event" not in json.loads(line)]


def test_zeros_after_a_power_cut_and_repeated_steps_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_run(path, 3)
    damaged = b'[1]\n{"step": "x"}\n{\n3\n{}\n{"step": null}\n\xff\n'
    path.write_bytes(path.read_bytes() + b'{"step": 3, "loss": 9.0}\n' + damaged + b"\0" * 300)
    assert read_metrics(path).num_damaged == 7
    with MetricsLog(path, resume_step=3) as log:
        assert log.dropped_lines == 9
    assert [json.loads(line).get("loss") for line in path.read_text().splitlines()][-1] == 9.0
    assert steps_of(path) == [1, 2, 3]


def test_an_open_log_goes_back_to_an_older_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_run(path, 4)
    with MetricsLog(path, resume_step=4) as log:
        log.write_header({"run": "r", "again": 1})
        log.go_back_to(2)
        log.write_step({"step": 3})
    assert steps_of(path) == [1, 2, 3]
    (resumed,) = [line for line in map(json.loads, path.read_text().splitlines()) if line.get("event") == "resume"]
    assert resumed["step"] == 2 and resumed["header"]["again"] == 1


def test_kill_9_loses_no_finished_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys\n"
        "from outcore.monitor.metrics.log import MetricsLog\n"
        f"log = MetricsLog({str(path)!r})\n"
        "log.write_header({})\n"
        "step = 0\n"
        "while True:\n"
        "    step += 1\n"
        "    log.write_step({'step': step, 'pad': 'x' * 3000})\n"
        "    print(step, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = [int(process.stdout.readline()) for _ in range(50)][-1]
    os.kill(process.pid, signal.SIGKILL)
    process.stdout.close()
    process.wait()
    steps = [step["step"] for step in read_metrics(path).steps]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= said


def test_not_finite_is_null_and_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    record = {"step": 1, "loss": math.nan, "phase_s": {"data": math.inf}, "list": [1.0, -math.inf], "ok": 2.5}
    with MetricsLog(path) as log:
        log.write_step(record)
    line = json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert line["loss"] is None
    assert line["nonfinite"] == {"loss": "nan", "phase_s.data": "inf", "list.1": "-inf"}
    step = read_metrics(path).steps[0]
    assert math.isnan(step["loss"]) and step["phase_s"]["data"] == math.inf and step["list"] == [1.0, -math.inf]


def test_numbers_of_torch_are_taken_and_objects_refused(tmp_path: Path) -> None:
    import torch

    assert json.loads(encode_line({"loss": torch.tensor(1.5), "path": tmp_path, "t": (1, None, True)})) == {
        "loss": 1.5,
        "path": str(tmp_path),
        "t": [1, None, True],
    }
    refused(ValueError, r"a\.b is a object", lambda: encode_line({"a": {"b": object()}}))
    with MetricsLog(tmp_path / "m.jsonl") as log, pytest.raises(ValueError, match="integer 'step'"):
        log.write_step({"loss": 1.0})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk_is_said_clearly(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(MetricsLogError, match=r"metrics\.jsonl.*disk is full.*free some space") as caught:
        log.write_header({})
    assert caught.value.disk_full and caught.value.path == tmp_path / "metrics.jsonl" and caught.value.errno


def test_a_write_that_fails_midway_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write_step({"step": 1})
    real_write, calls = os.write, []

    def short_write(fd: int, data: bytes) -> int:
        calls.append(len(data))
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        return real_write(fd, data[:4])

    monkeypatch.setattr(os, "write", short_write)
    with pytest.raises(MetricsLogError):
        log.write_step({"step": 2})
    monkeypatch.undo()
    log.write_step({"step": 2})
    log.close()
    assert steps_of(path) == [1, 2]


def test_a_folder_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MetricsLogError, match="Cannot open") as caught:
        MetricsLog(tmp_path / "file" / "metrics.jsonl")
    assert not caught.value.disk_full


def test_sync_failure_reaches_the_writer_and_closing_twice_is_fine(tmp_path, monkeypatch):
    log = MetricsLog(tmp_path / "metrics.jsonl", fsync_interval_s=0)
    monkeypatch.setattr(os, "fsync", failing(OSError(5, "Input/output error")))
    log.write_step({"step": 1})
    log._join_sync()
    refused(MetricsLogError, r"Cannot sync.*Input/output", lambda: log.write_step({"step": 2}))
    refused(MetricsLogError, "sync", log.close)
    log.close()
    refused(MetricsLogError, "closed", lambda: log.write_step({"step": 3}))


def test_poll_reads_only_what_is_new_and_starts_again_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    refused(FileNotFoundError, "has not written a step yet", metrics.poll)
    with MetricsLog(path) as log:
        log.write_header({"run": "r"})
        assert metrics.poll() and metrics.header["run"] == "r"
        assert not metrics.poll()
        for step in (1, 2, 3):
            log.write_step({"step": step})
        assert metrics.poll() and len(metrics.steps) == 3
    with open(path, "ab") as file:
        file.write(b'{"step": 4')
        file.flush()
        assert not metrics.poll()
        file.write(b"}\n")
    assert metrics.poll() and len(metrics.steps) == 4
    MetricsLog(path, resume_step=2).close()
    assert metrics.poll() and [step["step"] for step in metrics.steps] == [1, 2]


def test_a_wrong_nonfinite_is_a_damaged_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "nonfinite": {"a.b": "nan"}}\n{"step": 2}\n')
    metrics = read_metrics(path)
    assert metrics.num_damaged == 1 and [step["step"] for step in metrics.steps] == [2]

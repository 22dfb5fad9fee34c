"""`infinity_staged.py`: what its children record, which losses must agree in every bit, and its table."""

import json
import math
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks" / "race"))

import infinity_staged  # pyright: ignore[reportMissingImports]

DRY_RUN = ["--preset", "tiny", "--cpu", "--seq_length", "16", "--micro_batch", "2", "--warm", "1", "--steps", "2"]


def result(losses: list[float], *, deterministic: bool = False, step_s: float = 1.0) -> dict[str, Any]:
    return {
        "step_s": step_s, "losses": losses, "phase_s": {"forward": 0.25, "backward": 0.25, "optimizer": 0.5},
        "rss": {"VmHWM": 10**9}, "deterministic": deterministic,
    }  # fmt: skip


def run(monkeypatch: pytest.MonkeyPatch, children: dict[str, dict[str, Any]], *flags: str, folder: Path) -> int:
    """The command with children that return at once."""
    monkeypatch.setattr(infinity_staged, "run_child", lambda name, args: children[name])
    monkeypatch.setattr(infinity_staged.RatesAround, "before", lambda self: None)
    monkeypatch.setattr(infinity_staged.RatesAround, "after", lambda self: [2e9, 3e9])
    argv = ["infinity_staged.py", "--nvme", str(folder), *DRY_RUN, "--only", ",".join(children), *flags]
    monkeypatch.setattr(sys, "argv", argv)
    return infinity_staged.main()


@pytest.mark.parametrize(("losses", "deterministic", "code", "words"), [
    ([2.0, 1.0], True, 0, "bit-identical among ours-ram, ours-all: True"),
    ([2.0, 1.0 + 1e-7], True, 1, "bit-identical among ours-ram, ours-all: False"),
    ([2.0, math.nan], True, 1, "bit-identical among ours-ram, ours-all: False"),
    ([2.0, 1.01], False, 0, "among ours: 1.00e-02 (kernels are not deterministic; --deterministic compares bits)"),
    ([2.0, math.nan], False, 0, "among ours: inf"),
])  # fmt: skip
def test_bits_are_compared_where_the_order_is_fixed(tmp_path, monkeypatch, capsys, losses, deterministic, code, words):
    children = {name: result(given, deterministic=deterministic) for name, given in
                (("ours-ram", [2.0, 1.0]), ("ours-all", losses))}  # fmt: skip
    assert run(monkeypatch, children, folder=tmp_path) == code
    assert words in capsys.readouterr().out


def test_parts_with_other_settings_are_not_put_into_one_table(tmp_path, monkeypatch, capsys) -> None:
    out = tmp_path / "out.json"
    children = {"ours-ram": result([2.0], deterministic=True)}
    assert run(monkeypatch, children, "--deterministic", "--out", str(out), folder=tmp_path) == 0
    with pytest.raises(SystemExit):
        run(monkeypatch, {"ours-all": result([2.0])}, "--out", str(out), folder=tmp_path)
    assert "another deterministic" in capsys.readouterr().err
    assert list(json.loads(out.read_text())["results"]) == ["ours-ram"]


@pytest.mark.slow
def test_a_child_fixes_the_order_where_it_is_asked_to(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    out = tmp_path / "out.json"
    argv = [
        "infinity_staged.py", "--nvme", str(tmp_path / "nvme"), *DRY_RUN, "--rate_seconds", "0.1", "--only", "ours-all",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", [*argv, "--deterministic", "--out", str(out)])
    assert infinity_staged.main() == 0
    found = json.loads(out.read_text())["results"]["ours-all"]
    assert found["deterministic"] is True and len(found["losses"]) == 3
    assert list((tmp_path / "nvme").iterdir()) == []
    if "drive_bytes" in found:  # where the kernel counts the drive's
        moved = found["drive_bytes_per_s"] * sum(found["times_s"])
        assert 0 < moved <= 2 * sum(found["drive_bytes"].values())


@pytest.mark.parametrize("with_out", [True, False])
def test_what_is_there_is_printed_when_the_benchmark_is_ended(tmp_path, monkeypatch, capsys, with_out) -> None:
    class Ended(dict):
        def __getitem__(self, name):
            if name not in self:
                infinity_staged.end_by_signal(signal.SIGTERM, None)
            return super().__getitem__(name)

    out = tmp_path / "out.json"
    children = Ended({"ours-ram": result([2.0], step_s=1.5), "ours-all": result([2.0], step_s=3.5)})
    before = signal.getsignal(signal.SIGTERM)
    flags = ["--out", str(out)] if with_out else []
    with pytest.raises(SystemExit) as ended:
        try:
            run(monkeypatch, children, "--only", "ours-ram,ours-all,stock-all", *flags, folder=tmp_path)
        finally:
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
            signal.signal(signal.SIGTERM, before)
    assert ended.value.code == 128 + signal.SIGTERM
    early, _, table = capsys.readouterr().out.partition("\n\n")
    for printed in (early, table):
        rows = [line.split()[:2] for line in printed.splitlines() if line.startswith("ours-") and ":" not in line]
        assert rows == [["ours-ram", "1.500"], ["ours-all", "3.500"]]
    assert not with_out or list(json.loads(out.read_text())["results"]) == ["ours-ram", "ours-all"]


def test_a_child_that_takes_too_long_is_told_with_what_it_said(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(infinity_staged, "TIMEOUT_S", 1)
    monkeypatch.setattr(infinity_staged.sys, "executable", "/bin/sh")
    monkeypatch.setattr(infinity_staged, "__file__", str(tmp_path / "child.sh"))
    (tmp_path / "child.sh").write_text("echo step: 7 s; exec sleep 60")
    args = infinity_staged.parser().parse_args(["--nvme", str(tmp_path / "nvme"), *DRY_RUN])
    error = infinity_staged.run_child("ours-ram", args)["error"]
    assert "not finished after 1 s" in error and "step: 7 s" in error


def test_results_of_several_files_make_one_table(tmp_path, monkeypatch, capsys) -> None:
    on_drive = {"drive_bytes": {"read": 5e9, "written": 5e9}, "drive_rates_bytes_per_s": [2e9, 3e9]}
    on_drive |= {"drive_bytes_per_param": 20.04, "gpu_driver_bytes": 7 << 30, "gpu_peak_bytes": 6 << 30}
    first = {
        "stock-all": result([2.0], step_s=20.0), "stock-ram": result([2.0], step_s=3.0),
        "stock-ram-sg3e7": result([2.0], step_s=2.5), "ours-ram": result([2.0], step_s=2.0),
        "ours-all": {**result([2.0], step_s=5.0), **on_drive}, "ours-opt": {"error": "no drive"},
    }  # fmt: skip
    second = {"ours-all": {**result([2.0], step_s=4.4), **on_drive, "drive_bytes": {"read": 1e8, "written": 1e8}}}
    for name, results in (("a.json", first), ("b.json", second)):
        (tmp_path / name).write_text(json.dumps({"settings": {}, "results": results}))
    monkeypatch.setattr(sys, "argv", ["x", "--table", f"{tmp_path / 'a.json'},{tmp_path / 'b.json'}"])
    assert infinity_staged.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:9] == [
        "| a.json | stock-all | 20.00 | 1.00 | - | 1.0 | - | - |",
        "| a.json | stock-ram | 3.00 | 0.83 | - | 1.0 | - | - |",
        "| a.json | stock-ram-sg3e7 | 2.50 | 1.00 | - | 1.0 | - | - |",
        "| a.json | ours-ram | 2.00 | 1.25 | - | 1.0 | - | - |",
        "| a.json | ours-all | 5.00 | 4.00 | 20.0 | 1.0 | 7.00 (6.00) | 1.25 |",  # 10 GB at 2.5 GB/s: 4 s
        "| a.json | ours-opt | failed | - | - | - | - | - |",
        "| b.json | ours-all | 4.40 | - | 20.0 | 1.0 | 7.00 (6.00) | 8.80 |",  # above forward and backward, 0.5 s
    ]
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")

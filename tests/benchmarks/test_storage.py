"""The comparison with fio: its figures come from real transfers, and it says what is missing."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "drives" / "storage_vs_fio.py"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("storage_vs_fio", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fio_missing(script, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["x", "--path", str(tmp_path)])
    assert script.main() == 2
    assert "apt-get install -y fio" in capsys.readouterr().err


@pytest.mark.parametrize(
    "bad", [["--size-gib", "0"], ["--block-mib", "0.001"], ["--path", "/nowhere"], ["--depth", "0"]]
)
def test_bad_arguments(script: ModuleType, monkeypatch: pytest.MonkeyPatch, bad: list[str], tmp_path: Path):
    monkeypatch.setattr(sys, "argv", ["x", "--path", str(tmp_path), *bad])
    with pytest.raises(SystemExit):
        script.main()


@pytest.mark.skipif(shutil.which("fio") is None, reason="fio is not installed")
def test_a_small_run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    out = tmp_path / "result.json"
    options = [
        "--size-gib", "0.02", "--block-mib", "1", "--depth", "4", "--repeats", "1", "--target", "0", "--fio-engines",
        "libaio",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["x", "--path", str(tmp_path), "--out", str(out), *options])
    assert script.main() == 0
    result = json.loads(out.read_text())
    assert [row["mode"] for row in result["rows"]] == ["read", "write", "mixed"]
    assert all(row["ours_gb_per_s"] > 0 and row["fio_gb_per_s"] > 0 for row in result["rows"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json"]  # the test file is gone

"""Every benchmark starts: its imports hold and `--help` says what it measures."""

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = sorted(f for f in FOLDER.rglob("*.py") if "ArgumentParser(" in f.read_text())


def _forget_modules_of_scripts() -> None:
    names = {file.stem for file in FOLDER.rglob("*.py")} | {"infer", "infer.common"}
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_help(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    _forget_modules_of_scripts()  # two folders have a module of one name
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(script), run_name="__main__")
    finally:
        _forget_modules_of_scripts()
    assert ended.value.code == 0 and "usage:" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["race_ours", "race_stock", "race_rivals"])
def test_children_of_the_race_import(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(FOLDER / "race"))
    _forget_modules_of_scripts()
    try:
        assert callable(__import__(name).main)
    finally:
        _forget_modules_of_scripts()

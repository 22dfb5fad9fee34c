"""The notebook is its page, and its cells run on a CPU, in order, in an empty folder."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.notebook import NOTEBOOK, notebook
from tests.forked import ROOT


def test_the_notebook_is_its_page() -> None:
    assert NOTEBOOK.read_text() == notebook(), "run: python -m tests.docs.notebook"
    kinds = [cell["cell_type"] for cell in json.loads(notebook())["cells"]]
    assert kinds == ["markdown", "code", "markdown", "code", "markdown", "code", "markdown"]


@pytest.mark.more
def test_its_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "bin" / "outcore"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m outcore "$@"\n')
    command.chmod(0o755)
    env = os.environ | {"PATH": f"{command.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(sys.stderr):
        for cell in json.loads(NOTEBOOK.read_text())["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code" and source.startswith("!"):
                for line in source.splitlines():
                    if not line.startswith("!pip"):  # what it installs is here
                        subprocess.run(line[1:], shell=True, env=env, check=True, timeout=600)
            elif cell["cell_type"] == "code":
                exec(source, names)
    assert len(names["losses"]) == 20  # type: ignore[arg-type]

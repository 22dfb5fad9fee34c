"""The notebook is its page, and its cells run on a CPU, in order, in an empty folder."""

import contextlib
import json
import shlex
import sys
from pathlib import Path

import pytest

from outcore.cli import main
from tests.docs.notebook import NOTEBOOK, notebook
from tests.engine.stream.runs.job import SMALL_MODEL

SMALL = {"train": ["--config_overrides", SMALL_MODEL, "--seq_length", "64"]}
"""Settings by which the model is a tenth as large."""


def test_the_notebook_is_its_page() -> None:
    assert NOTEBOOK.read_text() == notebook(), "run: python -m tests.docs.notebook"
    kinds = [cell["cell_type"] for cell in json.loads(notebook())["cells"]]
    assert kinds == ["markdown", "code", "markdown", "code", "markdown", "code", "markdown"]


@pytest.mark.more
def test_its_cells_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(sys.stderr):
        for cell in json.loads(NOTEBOOK.read_text())["cells"]:
            source = "".join(cell["source"])
            if cell["cell_type"] == "code" and source.startswith("!"):
                for program, *words in map(shlex.split, source.splitlines()):
                    if program != "!pip":  # what it installs is here
                        assert program == "!outcore" and main([*words, *SMALL.get(words[0], [])]) == 0
            elif cell["cell_type"] == "code":
                exec(source, names)
    assert len(names["losses"]) == 20  # type: ignore[arg-type]

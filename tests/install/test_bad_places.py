"""Places where an installation goes wrong after it went well: one sentence with the command that mends it.

Those of set-up itself stand where they are said: a network, proxy or drive in test_packages.py, Python, sudo and
folders in test_environment.py, drivers and systems in test_requirements.py and test_checks.py, paths in
test_wheel.py, ARM and processors without AVX2 in tests/optim/test_targets.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.stream.runs.job import SMALL_MODEL, write_corpus
from tests.install.fakes import REPOSITORY


def outcore(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    work = folder / "work"
    work.mkdir()
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "outcore.cli", *arguments], cwd=work, env=environ | variables, capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.more(after=1)
@pytest.mark.parametrize(
    ("package", "error", "arguments"),
    [
        ("torch", "OSError('libcudart.so.12: cannot open shared object file')", ("train", "--max_steps", "1")),
        ("transformers", "ImportError('cannot import name Cache')", ("chat", "x")),
        ("transformers", "ImportError('cannot import name Cache')", ("serve", "x")),
    ],
)
def test_a_package_that_does_not_import_is_named_with_what_mends_it(
    tmp_path: Path, package: str, error: str, arguments: tuple[str, ...]
) -> None:
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"raise {error}\n")
    done = outcore(tmp_path, *arguments)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert f"outcore {arguments[0]}: {package} is installed and cannot be imported: " in done.stderr
    assert f"-m pip install --force-reinstall {package}`" in done.stderr
    assert not list((tmp_path / "work").iterdir())


@pytest.mark.more
def test_a_home_that_cannot_be_written_does_not_matter_to_a_run(tmp_path: Path) -> None:
    text = write_corpus(tmp_path)
    small = ["--max_steps", "1", "--sample_tokens", "0", "--seq_length", "32", "--config_overrides", SMALL_MODEL]
    done = outcore(tmp_path, "train", "--dataset", str(text), *small, HOME="/proc/nowhere", XDG_DATA_HOME="")
    assert done.returncode == 0, done.stderr


WITHOUT_DEEPSPEED = """
import sys
sys.modules["deepspeed"] = None
import outcore.api.trainer, outcore.engine.decide, outcore.ui.app
import outcore.train.methods, outcore.train.run, outcore.train.vision
"""


@pytest.mark.more
def test_everything_but_its_own_engine_is_imported_without_deepspeed():
    done = subprocess.run([sys.executable, "-c", WITHOUT_DEEPSPEED], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]

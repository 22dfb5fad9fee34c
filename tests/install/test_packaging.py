"""pyproject.toml, the pinned sets of requirements/ and this environment tell the same story."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from outcore.common.files import user_folder
from outcore.install.command import main as setup_command
from outcore.install.requirement_set import normalise, read_pins
from tests.install.fakes import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
FOR_CUDA = ("torch", "cupy", "kvikio", "cuda-toolkit")
"""Beginnings of the names in requirements.txt that a machine without a GPU has otherwise, or not at all."""


def ranges(name: str | None = None) -> dict[str, Requirement]:
    """Package -> what pyproject asks of it, in the main list or in one extra."""
    lines = PROJECT["dependencies"] if name is None else PROJECT["optional-dependencies"][name]
    return {normalise(wanted.name): wanted for wanted in map(Requirement, lines)}


@pytest.mark.parametrize(
    ("file", "extras"),
    [("cpu", []), ("cuda12", ["cuda12"]), ("cuda13", ["cuda13"]), ("windows", []), ("deepspeed", ["deepspeed"])],
)
def test_each_pinned_set_is_what_pip_install_may_choose(file: str, extras: list[str]) -> None:
    wanted = {} if file == "deepspeed" else ranges()
    for extra in extras:
        wanted |= ranges(extra)
    pins = read_pins(REPOSITORY / "requirements" / f"{file}.txt")
    assert set(pins) == set(wanted)
    assert [name for name, pin in pins.items() if not wanted[name].specifier.contains(pin)] == []


def test_the_extra_for_developers_is_what_setup_installs_for_tests() -> None:
    wanted, pins = ranges("dev"), read_pins(REPOSITORY / "requirements" / "test.txt")
    assert set(wanted) <= set(pins)
    assert [name for name in wanted if not wanted[name].specifier.contains(pins[name])] == []


def test_what_requirements_txt_installs_without_a_gpu_is_installed_here() -> None:
    """`pip install -r requirements.txt` is the CUDA 12 set: of it all but the CUDA wheels can be had anywhere."""
    pins = read_pins(REPOSITORY / "requirements.txt")
    wrong = {
        name: pin
        for name, pin in pins.items()
        if not name.startswith(FOR_CUDA) and importlib.metadata.version(name) != pin
    }
    assert wrong == {} and {name for name in pins if name.startswith(FOR_CUDA)} == {
        "torch", "cupy-cuda12x", "kvikio-cu12", "cuda-toolkit",
    }  # fmt: skip


@pytest.mark.slow
def test_pip_can_resolve_requirements_txt(tmp_path: Path) -> None:
    """All of the CUDA 12 set together, as `pip install -r requirements.txt` would choose it; nothing is installed."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-q", "--report", str(report)]
    subprocess.run([*command, "-r", str(REPOSITORY / "requirements.txt")], check=True, timeout=600)
    chosen = {
        normalise(it["metadata"]["name"]): it["metadata"]["version"] for it in json.loads(report.read_text())["install"]
    }
    pins = read_pins(REPOSITORY / "requirements.txt")
    assert {name: chosen.get(name) for name in pins} == pins


@pytest.mark.slow
def test_pip_install_has_all_that_is_needed_at_run_time(tmp_path: Path) -> None:
    """After `pip install .`: `import outcore` works, and its kernels and profiles came along."""
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(REPOSITORY)]
    subprocess.run(install, check=True, capture_output=True, text=True, timeout=300)
    ours = REPOSITORY / "outcore"
    kinds = (".cpp", ".h", ".yaml", ".json", ".toml", ".html")
    wanted = {str(path.relative_to(ours)) for path in ours.rglob("*") if path.suffix in kinds}
    assert wanted and {name for name in wanted if not (site / "outcore" / name).exists()} == set()
    command = [sys.executable, "-c", "import outcore, outcore.cli; print(outcore.__file__)"]
    done = subprocess.run(command, cwd=site, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(site)})
    assert str(site) in done.stdout


def test_the_commands_of_the_root_scripts_exist_without_them(tmp_path: Path) -> None:
    """Where pip installed outcore; `python -m` where its scripts are not on PATH."""
    for name in ("setup", "probe", "check"):
        asked = [sys.executable, "-m", "outcore", name, "--help"]
        env = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, env=env)
        assert done.returncode == 0 and "usage:" in done.stdout, done.stderr
        assert name == "setup" or done.stdout.startswith(f"usage: outcore {name} ")


@pytest.mark.more
def test_setup_without_a_clone_verifies_what_pip_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert setup_command(["--json"], clone=tmp_path) == 0
    said = capsys.readouterr()
    rows = {row["part"]: row for row in json.loads(said.out)["rows"]}
    assert rows["torch"]["status"] == "OK" and "CPU optimizer" in rows and "verifying every part: done" in said.err
    assert json.loads((user_folder() / "setup_report.json").read_text())["rows"] == list(rows.values())


def test_setup_without_a_clone_takes_only_flags_that_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        setup_command(["--run"], clone=tmp_path)
    told = capsys.readouterr().err
    assert "there is only to verify" in told and "unrecognized arguments: --run" in told
    with pytest.raises(SystemExit, match="0"):
        setup_command(["--help"], clone=tmp_path)
    assert set(re.findall(r"--[\w-]+", capsys.readouterr().out)) == {"--help", "--check", "--json"}

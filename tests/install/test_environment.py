import os
import subprocess
import sys
from pathlib import Path

import pytest

from outcore.common.errors import need_packages
from outcore.install import bootstrap
from outcore.install.environment import Environment, check_python, find_environment, make_environment
from outcore.install.errors import InstallError, from_os_error
from outcore.install.requirement_set import choose_set
from tests.install.fakes import REPOSITORY, FakeExecute, add_package, fake_environment, machine
from tests.refused import failing, refused

CHOSEN = choose_set(machine(), "auto", REPOSITORY)


def full_environment(prefix: Path) -> Environment:
    environment = fake_environment(prefix, CHOSEN.pins)
    add_package(environment, "outcore", "0.1.0", REPOSITORY.as_uri())
    environment.write_stamp({"set": "cpu"})
    return environment


def find(repository: Path, environ: dict[str, str] | None = None, *, prefix: str = "/usr", base: str = "/usr", **more):
    return find_environment(repository, environ=environ or {}, prefix=prefix, base_prefix=base, **more)


def test_which_environment(tmp_path: Path) -> None:
    active = fake_environment(tmp_path / "active")
    assert find(tmp_path).prefix == tmp_path / ".venv"
    assert find(tmp_path, prefix="/some/venv").prefix == Path("/some/venv")
    assert find(tmp_path, {"VIRTUAL_ENV": str(active.prefix)}).prefix == active.prefix
    assert find(tmp_path, {"VIRTUAL_ENV": "/gone"}).prefix == tmp_path / ".venv"
    assert find(tmp_path, prefix="/some/venv", requested=tmp_path / "x").prefix == tmp_path / "x"
    conda = {"CONDA_PREFIX": "/usr", "CONDA_DEFAULT_ENV": "work"}
    assert "conda" in find(tmp_path, conda).how
    assert find(tmp_path, conda | {"CONDA_DEFAULT_ENV": "base"}).prefix == tmp_path / ".venv"


def test_nothing_to_do_only_when_everything_is_there(tmp_path: Path) -> None:
    environment = full_environment(tmp_path / "v")
    assert environment.needs_install(CHOSEN, REPOSITORY) is None
    assert environment.read_stamp() == {"set": "cpu"}
    assert "outcore itself" in (environment.needs_install(CHOSEN, tmp_path) or "")


def test_reasons_to_install(tmp_path: Path) -> None:
    assert "does not exist" in (Environment(tmp_path / "none", "").needs_install(CHOSEN, REPOSITORY) or "")
    environment = full_environment(tmp_path / "v")
    environment.write_stamp({"set": "cuda12"})
    assert "cuda12 set" in (environment.needs_install(CHOSEN, REPOSITORY) or "")
    environment.stamp_path.write_text("{")
    assert "no complete set-up" in (environment.needs_install(CHOSEN, REPOSITORY) or "")
    environment.remove_stamp()
    environment.remove_stamp()
    assert environment.read_stamp() == {}


def test_wrong_version_is_seen_and_local_versions_count(tmp_path: Path) -> None:
    environment = fake_environment(tmp_path / "v", {"torch": "2.13.0+cpu", "PyYAML": "5.0"})
    assert environment.unmet_pins({"torch": "2.13.0", "pyyaml": "6.0", "rich": "1"}) == {"pyyaml": "5.0", "rich": ""}
    environment.write_stamp({"set": "cpu"})
    assert "is pinned" in (environment.needs_install(CHOSEN, REPOSITORY) or "")


def test_damaged_direct_url(tmp_path: Path) -> None:
    environment = fake_environment(tmp_path / "v")
    assert not environment.has_editable(REPOSITORY)
    add_package(environment, "outcore", "0.1.0", "")
    info = next((tmp_path / "v").rglob("direct_url.json"))
    info.write_text("{")
    assert not environment.has_editable(REPOSITORY)


@pytest.mark.parametrize(("output", "why", "fix"), [
    ("Error: ensurepip is not available", "no ensurepip", "-venv"),
    ("OSError: [Errno 28] No space left on device", "full", "free some space"),
    ("[Errno 13] Permission denied: '/x'", "not writable", "--venv"), ("something else", "something else", "-m venv"),
    ("", "no message", "-m venv"),
])  # fmt: skip
def test_venv_that_cannot_be_made(tmp_path: Path, output: str, why: str, fix: str) -> None:
    with pytest.raises(InstallError) as caught:
        make_environment(Environment(tmp_path / "v", ""), FakeExecute(venv=(1, output)))
    assert why in caught.value.why and fix in caught.value.fix


def test_sudo_is_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUDO_UID", "1000")
    with pytest.raises(InstallError, match=r"without: `python setup\.py`"):
        make_environment(Environment(tmp_path / "v", ""), failing(AssertionError("nothing is made")))
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv("SUDO_UID", "0")  # a container's root


def test_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "thesis.txt").write_text("mine")
    with pytest.raises(InstallError, match="not a virtual environment"):
        make_environment(Environment(tmp_path / "v", ""), FakeExecute())


def test_interrupted_environment_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "v").mkdir()
    (tmp_path / "v" / "pyvenv.cfg").write_text("")
    execute = FakeExecute()
    make_environment(Environment(tmp_path / "v", ""), execute)
    assert "-m venv" in execute.commands[0]


def test_interpreter_that_does_not_start(tmp_path: Path) -> None:
    environment = fake_environment(tmp_path / "v")
    with pytest.raises(InstallError, match="does not start") as caught:
        make_environment(environment, FakeExecute(version_info=(126, "bad interpreter\nreason")))
    assert caught.value.why == "reason" and "rm -rf" in caught.value.fix


def test_missing_pip_is_repaired_or_told(tmp_path: Path) -> None:
    environment = fake_environment(tmp_path / "v")

    class RepairedPip(FakeExecute):
        def __call__(self, command):
            line = " ".join(command)
            if line.endswith("pip --version") and not any("ensurepip" in c for c in self.commands):
                self.commands.append(line)
                return subprocess.CompletedProcess(command, 1, "", "No module named pip")
            return super().__call__(command)

    execute = RepairedPip()
    make_environment(environment, execute)
    assert any("ensurepip --upgrade" in command for command in execute.commands)
    with pytest.raises(InstallError, match=r"pip in .* is broken") as caught:
        make_environment(environment, FakeExecute(**{"-m pip": (1, "No module named pip")}))
    assert "anew" in caught.value.fix


@pytest.mark.parametrize(
    ("version", "ok"), [("3.11", True), ("3.13", True), ("3.10", False), ("3.14", False), ("", False)]
)
def test_python_versions(version: str, ok: bool) -> None:
    if ok:
        check_python(version, "here")
    else:
        refused(InstallError, "does not fit", lambda: check_python(version, "here"))


@pytest.mark.parametrize(
    ("number", "why"), [(28, "the drive is full"), (13, "Permission denied"), (30, "Read-only"), (5, "Input/output")]
)
def test_os_errors_in_words(number: int, why: str) -> None:
    error = from_os_error(OSError(number, os.strerror(number), "logs/x"))
    assert "logs/x" in error.what and why in error.why and error.fix


def test_too_new_python_makes_no_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 14, 0))
    execute = FakeExecute()
    refused(InstallError, r"3\.14", lambda: make_environment(Environment(tmp_path / "v", ""), execute))
    assert execute.commands == []


def test_python_of_an_environment(tmp_path: Path) -> None:
    environment = fake_environment(tmp_path / "v")
    assert environment.python_version == ""
    (tmp_path / "v/pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.12.4\n")
    assert environment.python_version == "3.12.4"


class Replaced(Exception):
    pass


def test_bootstrap_stays_in_a_complete_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bootstrap, "NEEDED_MODULES", ("json",))
    monkeypatch.setenv("PATH", "/usr/bin")
    bootstrap.ensure_environment(str(tmp_path / "train.py"))
    first = os.path.dirname(sys.executable)
    assert os.environ["PATH"] == f"{first}:/usr/bin"
    monkeypatch.setenv("PATH", f"/usr/bin:{first}")
    bootstrap.ensure_environment(str(tmp_path / "train.py"))
    assert os.environ["PATH"] == f"{first}:/usr/bin"


def test_bootstrap_changes_into_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_environment(tmp_path / ".venv")
    seen: list[list[str]] = []

    def execv(path: str, command: list[str]) -> None:
        seen.append(command)
        raise Replaced

    monkeypatch.setattr(bootstrap, "NEEDED_MODULES", ("no_such_module_here",))
    monkeypatch.setattr(os, "execv", execv)
    monkeypatch.setattr(sys, "argv", ["train.py", "--flag", "two words"])
    script = str(tmp_path / "train.py")
    with pytest.raises(Replaced):
        bootstrap.ensure_environment(script)
    assert seen == [[str(tmp_path / ".venv/bin/python"), script, "--flag", "two words"]]
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))  # already in it: no endless loop
    refused(SystemExit, r"run `python setup\.py` once", lambda: bootstrap.ensure_environment(script))


def test_bootstrap_without_an_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bootstrap, "NEEDED_MODULES", ("no_such_module_here",))
    with pytest.raises(SystemExit, match=r"no_such_module_here is not installed.*setup\.py"):
        bootstrap.ensure_environment(str(tmp_path / "train.py"))
    monkeypatch.setattr(bootstrap, "NEEDED_MODULES", ("no_such_module", "nor_this", "nor_that"))
    with pytest.raises(SystemExit, match="no_such_module, nor_this, nor_that are not installed"):
        bootstrap.ensure_environment(str(tmp_path / "train.py"))


@pytest.mark.parametrize("names", [["no_such_module"], ["no_such_module", "nor_this", "nor_that"]])
def test_missing_packages_are_named_together_with_one_line_that_mends_all(names: list[str]) -> None:
    mends = "python setup.py --with ui in a clone, else pip install 'outcore[ui]'"
    with pytest.raises(RuntimeError) as told:
        need_packages(["json", *names], "the panels", "ui")
    assert str(told.value) == f"the packages for the panels are not installed ({', '.join(names)} missing): {mends}"


def test_too_old_python(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    with pytest.raises(SystemExit, match=r"needs Python 3\.11.*this is 3\.9.*python3\.11 train\.py"):
        bootstrap.ensure_environment(str(tmp_path / "train.py"))


def test_setup_script_refuses_an_old_python_in_one_line() -> None:
    code = (
        "import sys, runpy; sys.version_info = (3, 8, 0, 'final', 0); "
        f"runpy.run_path({str(REPOSITORY / 'setup.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.strip().splitlines()[-1].startswith("outcore needs Python 3.11")
    assert len(done.stderr.strip().splitlines()) == 1

import json
import os
import shlex
import shutil
import signal
import sys
import threading
from pathlib import Path

import pytest

from outcore.common.files import user_folder
from outcore.common.quantities import GB
from outcore.install import job as job_module
from outcore.install.environment import Environment
from outcore.install.extensions import KEY_NAME, build_key
from outcore.install.job import InstallJob, call_to_its_end
from outcore.install.requirement_set import read_pins
from outcore.install.verify.rows import ReportRow
from outcore.machine import Drive
from tests.install.fakes import REPOSITORY, FakeStream, add_package, fake_environment, gpu_machine, machine
from tests.refused import failing

GOOD = ReportRow("deepspeed", "works", "deepspeed", "OK", True)
BAD = ReportRow("deepspeed", "ImportError: x", "deepspeed", "missing", True, "`python setup.py`")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone with its requirements; the host looks fine, the probes answer GOOD, nothing is really started."""
    # Runs of other tests in this process have told DeepSpeed where its extensions lie.
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    clone = tmp_path / "my clone"
    shutil.copytree(REPOSITORY / "requirements", clone / "requirements")
    (clone / "train_model.py").write_text("")
    big = Drive(str(clone), "ssd", "", "/", "ext4", free_bytes=100 * GB, total_bytes=200 * GB)
    monkeypatch.setattr(job_module, "drive_of", lambda path: big)
    monkeypatch.setattr(job_module, "make_environment", lambda environment, execute: None)
    monkeypatch.setattr(job_module, "probe_rows", lambda *arguments: [GOOD])
    monkeypatch.setattr(job_module, "build_all", lambda *arguments: ())
    monkeypatch.setattr(job_module, "launcher_row", lambda environment: ReportRow("launcher", "x", "y", "OK", True))
    monkeypatch.setattr(job_module, "host_rows", lambda *arguments: [ReportRow("Python", "3.12", "3.11", "OK", True)])
    return clone


def installed(repository: Path, name: str = "cpu", tests: bool = False) -> None:
    """`.venv` as a complete set-up leaves it."""
    pins = read_pins(repository / "requirements" / f"{name}.txt") | read_pins(repository / "requirements/deepspeed.txt")
    if tests:
        pins |= read_pins(repository / "requirements" / "test.txt")
    environment = fake_environment(repository / ".venv", pins)
    add_package(environment, "outcore", "0.1.0", repository.resolve().as_uri())
    environment.write_stamp({"set": name})


def make_job(repository: Path, *flags: str, which=None, stream=None, call=None) -> InstallJob:
    return InstallJob(
        ["--venv", str(repository / ".venv"), *flags], repository, detect=lambda: which or machine(),
        stream=stream or FakeStream(), call=call or failing(AssertionError("nothing may be started here")),
    )  # fmt: skip


def run(job: InstallJob) -> int:
    """What setup.py does."""
    with job:
        job.detect()
        if job.options.dry_run:
            job.print_plan()
            return job.exit_code
        if not job.options.check:
            job.install_packages()
            job.run()
            job.install_deepspeed()
        job.verify()
        job.report()
        job.follow_up()
    return job.exit_code


def saved(repository: Path) -> dict:
    return json.loads((user_folder() / "setup_report.json").read_text())


def test_second_run_starts_no_pip(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    installed(repository)
    stream = FakeStream()
    assert run(make_job(repository, stream=stream)) == 0
    assert stream.commands == []
    assert all((repository / name).is_dir() for name in ("checkpoints", "logs", "final_model"))
    assert saved(repository)["ok"] is True and saved(repository)["machine"]["cpu_name"] == "a CPU"
    said = capsys.readouterr().out
    assert "all pinned versions are installed" in said and "ready." in said
    assert "source .venv/bin/activate" in said and "deepspeed --num_gpus=1 train_model.py" in said


@pytest.fixture(autouse=True)
def _no_browser_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outcore.install.job.install_chromium", lambda say: None)


def test_first_run_installs_and_stamps_last(repository: Path) -> None:
    environment = fake_environment(repository / ".venv")
    environment.write_stamp({"set": "cpu"})
    stamps: list[bool] = []

    def last_pip() -> None:
        stamps.append(environment.stamp_path.exists())
        for name, version in {**read_pins(repository / "requirements/cpu.txt"), "deepspeed": "0.19.8"}.items():
            add_package(environment, name, version)

    stream = FakeStream(*[(0, "")] * 3, last_pip, (0, ""))
    assert run(make_job(repository, stream=stream)) == 0
    assert len(stream.commands) == 5 and stamps == [False]
    assert environment.read_stamp() == {"set": "cpu", "torch": "2.13.0", "tests": False}


def test_pip_that_lies_is_not_believed(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = fake_environment(repository / ".venv")
    assert run(make_job(repository)) == 3
    assert not environment.stamp_path.exists()
    assert "not every pinned version is installed" in capsys.readouterr().out
    assert saved(repository)["ok"] is False


def test_failed_pip_leaves_no_ok(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    installed(repository)
    run(make_job(repository))
    (repository / ".venv/lib/python3.11/site-packages/rich-15.0.0.dist-info/METADATA").unlink()
    stream = FakeStream((0, ""), (0, ""), (1, "Temporary failure in name resolution"))
    assert run(make_job(repository, stream=stream)) == 3
    assert not (repository / ".venv/outcore-setup.json").exists()
    assert saved(repository)["ok"] is False and "cannot be reached" in saved(repository)["error"]
    said = capsys.readouterr().out
    assert "set-up failed" in said and "why:" in said and "fix:" in said


def test_interrupt(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake_environment(repository / ".venv")
    assert run(make_job(repository, stream=FakeStream(failing(KeyboardInterrupt())))) == 130
    assert shlex.join(("python", "setup.py", "--venv", str(repository / ".venv"))) in capsys.readouterr().out
    assert saved(repository)["error"] == "interrupted"


def test_an_interrupted_child_may_save() -> None:
    """It takes longer than the quarter of a second after which `subprocess.call` would kill it."""
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    assert call_to_its_end([sys.executable, "-c", "import time; time.sleep(1); raise SystemExit(7)"]) == 7
    timer.join()


def test_no_space_stops_before_pip(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Drive("/", "ssd", "", "/", "ext4", free_bytes=GB, total_bytes=2 * GB)
    monkeypatch.setattr(job_module, "drive_of", lambda path: small)
    stream = FakeStream()
    job = make_job(repository, stream=stream)
    assert run(job) == 3 and stream.commands == []
    assert "1.00 GB free" in saved(repository)["error"] and "9.00 GB" in saved(repository)["error"]


def test_unwritable_clone(repository, monkeypatch, capsys):
    def mkdir(self: Path, *arguments, **more) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)
    assert run(make_job(repository)) == 3
    said = capsys.readouterr().out
    assert "cannot write" in said and "the report could not be written" in said


def test_other_errors_are_not_hidden(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "host_rows", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(make_job(repository, "--check"))


def test_check_without_an_environment(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(make_job(repository, "--check")) == 1
    assert not (repository / ".venv").exists()
    said = capsys.readouterr().out
    assert "not ready" in said and "does not exist" in said and "fix: `python setup.py`" in said


def test_check_installs_nothing(repository: Path) -> None:
    fake_environment(repository / ".venv")
    stream = FakeStream()
    assert run(make_job(repository, "--check", stream=stream)) == 0
    assert stream.commands == []


def test_missing_required_row_is_exit_code_1(repository, monkeypatch, capsys):
    installed(repository, tests=True)
    monkeypatch.setattr(job_module, "probe_rows", lambda *arguments: [BAD])
    assert run(make_job(repository, "--test")) == 1  # and no test was started
    assert saved(repository)["ok"] is False
    assert "ImportError: x" in capsys.readouterr().out


def test_json_alone_on_stdout(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    installed(repository)
    assert run(make_job(repository, "--json")) == 0
    captured = capsys.readouterr()
    content = json.loads(captured.out)
    assert content["ok"] and {row["part"] for row in content["rows"]} >= {"Python", "deepspeed", "offload path"}
    assert set(content["rows"][0]) == {"part", "found", "needed", "status", "required", "fix"}
    assert "environment:" in captured.err
    assert content == saved(repository)


def test_json_of_a_failure(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(make_job(repository, "--json", which=gpu_machine("470.1", "11.4"))) == 3
    content = json.loads(capsys.readouterr().out)
    assert content["ok"] is False and "too old" in content["error"] and content["set"] == "none"


def test_dry_run_touches_nothing(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(repository.rglob("*"))
    assert run(make_job(repository, "--dry-run", which=gpu_machine())) == 0
    said = capsys.readouterr().out
    assert "cupy-cuda13x 14.2.0" in said and "torch==2.13.0" in said and "16.00 GB" in said
    assert "would build: nothing" in said and "nothing was changed" in said
    assert run(make_job(repository, "--dry-run", "--deepspeed", which=gpu_machine())) == 0
    assert "would build: cpu_adam\n" in capsys.readouterr().out
    assert sorted(repository.rglob("*")) == before


def test_dry_run_as_json_and_when_all_is_there(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(make_job(repository, "--dry-run", "--json")) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["set"] == "cpu" and plan["makes_environment"] and plan["packages"]["torch"]["wanted"] == "2.13.0"
    installed(repository)
    key = build_key(Environment(repository / ".venv", ""), "cpu")
    for name in ("cpu_adam", "deepspeed_shm_comm"):
        folder = repository / ".venv/torch_extensions" / name
        folder.mkdir(parents=True)
        (folder / f"{name}.so").touch()
        (folder / KEY_NAME).write_text(json.dumps(key))
    assert run(make_job(repository, "--dry-run")) == 0
    said = capsys.readouterr().out
    assert "would install nothing" in said and "would build: nothing" in said
    (repository / ".venv/lib/python3.11/site-packages/rich-15.0.0.dist-info/METADATA").write_text(
        "Name: rich\nVersion: 1.0\n"
    )
    assert run(make_job(repository, "--dry-run")) == 0
    assert "rich 15.0.0 (there is 1.0)" in capsys.readouterr().out


class Calls:
    def __init__(self, code: int = 0) -> None:
        self.code, self.commands, self.more = code, [], []

    def __call__(self, command, **more) -> int:
        self.commands.append(command[1:])
        self.more.append(more)
        return self.code


def test_tests_are_started(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(repository, tests=True)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    calls = Calls(code=5)
    assert run(make_job(repository, "--test", call=calls)) == 5
    assert calls.commands == [["-m", "pytest", "-n", "3", "--dist", "worksteal"]]
    environ = calls.more[0]["env"]
    assert environ["TORCH_EXTENSIONS_DIR"] == str(repository / ".venv/torch_extensions")
    assert environ["DS_ACCELERATOR"] == "cpu"
    assert environ["PATH"].startswith(str(repository / ".venv/bin")) and "stdout" not in calls.more[0]
    calls = Calls()
    assert run(make_job(repository, "--test", "--json", "--", "-k", "one", call=calls)) == 0
    assert calls.commands == [["-m", "pytest", "-k", "one"]]
    assert calls.more[0]["stdout"] is sys.stderr
    calls = Calls()
    assert run(make_job(repository, "--test", "--", "--all", call=calls)) == 0
    assert calls.commands == [["-m", "pytest", "-n", "3", "--dist", "worksteal", "--all"]]


def test_run_starts_training(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    installed(repository)
    calls = Calls()
    assert run(make_job(repository, "--run", "--", "--max_steps", "5", call=calls)) == 0
    assert calls.commands == [[str(repository / "train_model.py"), "--max_steps", "5"]]
    assert "chat" not in capsys.readouterr().out  # nothing was made
    (repository / "final_model/tiny").mkdir(parents=True)
    (repository / "final_model/tiny/config.json").write_text("{}")
    assert run(make_job(repository, "--run", call=calls)) == 0
    out = capsys.readouterr().out
    assert "to make sense" in out and out.rstrip().endswith("-m outcore.cli chat final_model/tiny")
    calls.code = 7
    assert run(make_job(repository, "--run", call=calls)) == 7 and saved(repository)["ok"]
    assert "chat" not in capsys.readouterr().out
    (repository / "train_model.py").unlink()
    assert run(make_job(repository, "--run", call=calls)) == 3
    assert "clone is incomplete" in capsys.readouterr().out


def test_a_first_run_waits_for_what_it_needs_alone(repository: Path) -> None:
    """DeepSpeed, of which the default run uses nothing, and the verification come after it."""
    environment, order = fake_environment(repository / ".venv"), []

    class Started(FakeStream):
        def __call__(self, command, *rest):
            order.append("deepspeed" if "deepspeed==0.19.8" in command else "packages")
            pins = read_pins(repository / "requirements/cpu.txt") | (
                {} if order[-1] == "packages" else {"deepspeed": "0.19.8"}
            )
            for name, version in pins.items():
                add_package(environment, name, version)
            add_package(environment, "outcore", "0.1.0", repository.resolve().as_uri())
            return super().__call__(command, *rest)

    call = Calls()
    job = make_job(repository, "--run", stream=Started(), call=lambda *a, **k: order.append("run") or call(*a, **k))
    assert run(job) == 0
    assert order.index("run") < order.index("deepspeed") and "packages" in order[: order.index("run")]


@pytest.mark.parametrize(("flags", "builds"), [
    ([], False), (["--run"], False), (["--run", "--", "--engine", "stream"], False),
    (["--deepspeed"], True), (["--test"], True), (["--run", "--", "--engine", "deepspeed"], True),
    (["--run", "--", "--engine=deepspeed"], True),
])  # fmt: skip
def test_extensions_of_deepspeed_are_built_when_its_engine_is_asked_for(
    repository: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], builds: bool
) -> None:
    installed(repository, tests=True)
    built: list[object] = []
    monkeypatch.setattr(job_module, "build_all", lambda *arguments: built.append(arguments) or ())
    assert run(make_job(repository, *flags, call=Calls())) == 0 and bool(built) == builds
    (repository / ".venv/torch_extensions/cpu_adam").mkdir(parents=True)
    assert run(make_job(repository, *flags, call=Calls())) == 0 and built, "what was asked for once is kept up to date"


def test_native_windows_in_words(repository, monkeypatch, capsys):
    windows = gpu_machine(os_family="windows", os_name="Windows 11")
    installed(repository, "windows")
    deepspeed = ReportRow("deepspeed", "not installed", "deepspeed", "missing", True, "train inside WSL2")
    monkeypatch.setattr(job_module, "probe_rows", lambda *arguments: [deepspeed])
    assert run(make_job(repository, which=windows)) == 1
    said = capsys.readouterr().out
    for word in ("no Windows wheels", "no build for Windows", "wsl --install", "train inside WSL2", "What works here"):
        assert word in said


def test_environment_of_the_children(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("PYTHONHOME", "/x")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "Hopper")
    job = make_job(repository)
    job.detect()
    environ = job._child_environment()
    assert "RANK" not in environ and "PYTHONHOME" not in environ and "TORCH_CUDA_ARCH_LIST" not in environ
    done = job._execute([sys.executable, "-c", "import os; print(os.environ.get('RANK'))"])
    assert done.stdout.strip() == "None"


def test_warnings_and_gpu_are_shown(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(make_job(repository, "--dry-run", which=gpu_machine(capability=(7, 0), is_wsl2=True))) == 0
    said = capsys.readouterr().out
    assert "under WSL2" in said and "RTX 4070" in said and "warning:" in said


def test_check_looks_at_what_is_installed(repository: Path) -> None:
    installed(repository, "cuda12")
    job = make_job(repository, "--check")
    job.detect()
    assert job.chosen.name == "cuda12"
    job = make_job(repository)
    job.detect()
    assert job.chosen.name == "cpu"


def test_with_installs_what_panels_and_the_server_need(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    installed(repository)
    assert run(make_job(repository, "--with", "ui,serve", "--dry-run", "--json")) == 0
    plan = json.loads(capsys.readouterr().out)
    assert {"gradio", "fastapi", "lm-eval"} <= set(plan["packages"])
    assert any("ui.txt" in command and "serve.txt" in command for command in plan["commands"])
    with pytest.raises(SystemExit, match="2"):
        make_job(repository, "--with", "panels")
    assert "'panels' is none of ui, serve, evaluate" in capsys.readouterr().err

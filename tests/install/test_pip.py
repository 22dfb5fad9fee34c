import io
import os
import sys
from pathlib import Path

import pytest

from outcore.install import pip
from outcore.install.errors import InstallError
from outcore.install.pip import explain, install, pip_steps, stream_command
from outcore.install.progress import InstallProgress
from outcore.install.requirement_set import choose_set
from tests.install.fakes import REPOSITORY, FakeStream, fake_environment, gpu_machine, machine
from tests.refused import failing
from tests.waiting import until

NO_NETWORK = """WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...: Failed to
establish a new connection: [Errno -3] Temporary failure in name resolution)': /simple/torch/
ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)
ERROR: No matching distribution found for torch==2.13.0"""


def run_install(tmp_path: Path, stream: FakeStream, which=None) -> str:
    environment = fake_environment(tmp_path / "v")
    chosen = choose_set(which or machine(), "auto", REPOSITORY)
    out = io.StringIO()
    install(
        environment, chosen, REPOSITORY, {"PATH": "/bin"}, stream, InstallProgress(out), tmp_path / "logs" / "pip.log"
    )
    return out.getvalue()


def test_torch_comes_first_and_is_repeated_for_deepspeed() -> None:
    steps = pip_steps(choose_set(gpu_machine("570.1", "12.8"), "auto", REPOSITORY, further=["test"]), REPOSITORY)
    assert [step.title for step in steps] == [
        "build tools", "torch==2.10.0", "deepspeed==0.19.8", "cuda12.txt + test.txt", "outcore itself (editable)",
    ]  # fmt: skip
    assert steps[2].arguments == ("--no-build-isolation", "torch==2.10.0", "deepspeed==0.19.8")
    assert dict(steps[2].extra_environment) == {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    assert steps[3].arguments.count("-r") == 2
    windows = pip_steps(choose_set(machine(os_family="windows"), "auto", REPOSITORY), REPOSITORY)
    assert not any("deepspeed" in step.title for step in windows)


def test_every_step_is_called(tmp_path: Path) -> None:
    stream = FakeStream((0, "Looking in indexes: secret\nCollecting x\n  Downloading a/b/x-1.whl (1 MB)\nnoise"))
    shown = run_install(tmp_path, stream)
    assert len(stream.commands) == 5
    python = str(tmp_path / "v/bin/python")
    assert all(command[:4] == [python, "-m", "pip", "install"] for command in stream.commands)
    assert all("--no-input" in command for command in stream.commands)
    assert stream.environs[2]["DS_BUILD_OPS"] == "0" and "DS_BUILD_OPS" not in stream.environs[1]
    assert "Downloading x-1.whl (1 MB)" in shown and "secret" not in shown and "noise" not in shown
    assert "noise" in (tmp_path / "logs/pip.log").read_text()
    assert "[5/5] outcore itself (editable): done" in shown


@pytest.mark.parametrize(("code", "output", "why", "fix"), [
    (1, NO_NETWORK, "cannot be reached", "run `python setup.py` again"),
    (1, "ReadTimeoutError: Read timed out.", "cannot be reached", "connection"),
    (1, "ERROR: Could not install packages: [Errno 28] No space left on device", "full", "--venv"),
    (1, "/v/bin/python: No module named pip", "is broken", "rm -rf"),
    (1, "Traceback (most recent call last):\n File 'x/pip/_internal/cli.py'\nImportError: cannot import name 'y'",
     "ImportError: cannot import name 'y'", "rm -rf"),
    (1, "SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]", "certificate", "clock"),
    (1, "ProxyError('Cannot connect to proxy.', OSError('Tunnel connection failed: 407", "proxy", "HTTPS_PROXY"),
    (1, "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", "damaged", "cache purge"),
    (1, "ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: '/v/lib'",
     "not writable", "--venv"),
    (1, "ERROR: No matching distribution found for torch==2.13.0", "no torch==2.13.0", "3.11-3.13"),
    (1, "ERROR: ResolutionImpossible: for help visit\nERROR: conflicting dependencies a 1 and a 2",
     "different versions", "fresh environment"),
    (-9, "Collecting torch", "killed", "close other programs"),
    (7, "ERROR: something new", "ERROR: something new (exit code 7)", "pip.log"),
    (7, "", "no message", "pip.log"),
])  # fmt: skip
def test_each_failure_has_its_words(tmp_path: Path, code: int, output: str, why: str, fix: str) -> None:
    stream = FakeStream((0, ""), (code, output))
    with pytest.raises(InstallError) as caught:
        run_install(tmp_path, stream)
    assert len(stream.commands) == 2  # nothing after the failure
    assert "torch==2.13.0" in caught.value.what
    assert why in caught.value.why and fix in caught.value.fix, caught.value
    assert "\n" not in caught.value.why


def test_pip_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="did not start"):
        run_install(tmp_path, FakeStream(failing(FileNotFoundError(2, "No such file or directory", "python"))))


def test_full_disk_without_an_environment(tmp_path: Path) -> None:
    environment = fake_environment(tmp_path / "v").__class__(tmp_path / "gone", "")
    error = explain(pip.PipStep("x", ()), 1, "No space left on device", environment, tmp_path / "log")
    assert "unknown free" in error.why


def test_stream_command_hands_over_lines(tmp_path: Path) -> None:
    heard: list[str] = []
    code = stream_command(["sh", "-c", "echo one; echo two >&2; echo $WORD; exit 3"], {"WORD": "w"}, heard.append)
    assert code == 3 and heard == ["one", "two", "w"]


def test_interrupted_stream_ends_its_child(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"

    def interrupt(line: str) -> None:
        pid_file.write_text(line)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream_command(["sh", "-c", "echo $$; exec sleep 60"], dict(os.environ), interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_moves() -> None:
    out = Terminal()
    progress = InstallProgress(out)
    progress.begin("working")
    progress.detail("file 1")
    until(lambda: "file 1" in out.getvalue())
    progress.end(False)
    text = out.getvalue()
    assert "file 1" in text and "\r" in text and text.rstrip().endswith(")") and "working: FAILED" in text


def test_progress_in_a_file_is_lines() -> None:
    out = io.StringIO()
    progress = InstallProgress(out)
    progress.begin("working")
    progress.detail("a")
    progress.detail("a")
    progress.end()
    assert out.getvalue().splitlines()[:2] == ["working ...", "    a"] and "\r" not in out.getvalue()
    assert InstallProgress()._out is sys.stdout

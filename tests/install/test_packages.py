import io
import os
import re
import sys
from pathlib import Path

import pytest

from outcore.install import progress as progress_module
from outcore.install.errors import InstallError
from outcore.install.packages import install, install_steps, stream_command
from outcore.install.progress import InstallProgress
from outcore.install.requirement_set import choose_set
from outcore.install.uv import UV, uv_settings
from tests.install.fakes import REPOSITORY, FakeStream, fake_environment, gpu_machine, machine
from tests.refused import failing
from tests.waiting import until

NO_NETWORK = """WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError(...: Failed to
establish a new connection: [Errno -3] Temporary failure in name resolution)': /simple/torch/
ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: none)
ERROR: No matching distribution found for torch==2.13.0"""


HAS_UV, LISTED = (0, ""), (0, "")
"""Answers to the installation of uv and to `pip config list`."""


def run_install(tmp_path: Path, stream: FakeStream, which=None) -> str:
    environment = fake_environment(tmp_path / "v")
    chosen = choose_set(which or machine(), "auto", REPOSITORY)
    out = io.StringIO()
    install(
        environment, chosen, REPOSITORY, {"PATH": "/bin"}, stream, InstallProgress(out), tmp_path / "logs" / "pip.log"
    )
    return out.getvalue()


def test_deepspeed_comes_after_torch() -> None:
    steps = install_steps(choose_set(gpu_machine("570.1", "12.8"), "auto", REPOSITORY, further=["test"]), REPOSITORY)
    assert [step.title for step in steps] == [
        "cuda12.txt + test.txt", "deepspeed==0.19.8", "outcore itself (editable)",
    ]  # fmt: skip
    assert steps[1].arguments == ("--no-build-isolation", "torch==2.10.0", "deepspeed==0.19.8")
    assert dict(steps[1].extra_environment) == {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    assert steps[0].arguments.count("-r") == 3
    windows = install_steps(choose_set(machine(os_family="windows"), "auto", REPOSITORY), REPOSITORY)
    assert not any("deepspeed" in step.title for step in windows)


def test_every_step_is_called(tmp_path: Path) -> None:
    settings = "global.find-links='/wheels'\n:env:.cert='/ca.pem'"
    output = "Using Python: secret\nResolved 1 package\n  Downloading a/b/x-1.whl (1 MB)\nnoise"
    stream = FakeStream(HAS_UV, (0, settings), (0, output))
    shown = run_install(tmp_path, stream)
    python, *commands = str(tmp_path / "v/bin/python"), *stream.commands
    assert commands[0][:4] == [python, "-m", "pip", "install"] and commands[0][-1] == UV
    assert commands[1] == [python, "-m", "pip", "config", "list"] and len(commands) == 2 + 3
    for command, environ in zip(commands[2:], stream.environs[2:], strict=True):
        assert command[:5] == [str(tmp_path / "v/bin/uv"), "pip", "install", "--python", python]
        assert "--find-links /wheels" in " ".join(command) and environ["SSL_CERT_FILE"] == "/ca.pem"
    assert stream.environs[3]["DS_BUILD_OPS"] == "0" and "DS_BUILD_OPS" not in stream.environs[2]
    assert "secret" not in shown and "noise" not in shown
    assert "noise" in (tmp_path / "logs/pip.log").read_text()
    assert "[3/3] outcore itself (editable): done" in shown


@pytest.mark.parametrize(("answers", "words"), [
    (((1, "no such package"),), "uv==0.13.9 could not be installed"),
    ((HAS_UV, (0, "install.client-cert='/me.pem'")), "no equal for pip's client-cert"),
    ((HAS_UV, (2, "unknown command")), "does not list its settings"),
])  # fmt: skip
def test_pip_installs_where_uv_cannot_be_told_all(tmp_path: Path, answers: tuple, words: str) -> None:
    stream = FakeStream(*answers)
    assert words in run_install(tmp_path, stream)
    steps = stream.commands[len(answers) :]
    assert len(steps) == 3
    assert all(command[1:4] == ["-m", "pip", "install"] and "--no-input" in command for command in steps)


def test_uv_is_told_what_pip_is_told() -> None:
    listed = [
        "global.index-url='https://mirror/simple'", "global.find-links='/a /b'", ":env:.find-links='/c'",
        "install.constraint='/caps.txt'", "download.dest='/x'", ":env:.no_index='true'", "global.pre='0'",
        "global.default-timeout='180'", "global.proxy='http://p:1'", "global.progress-bar='off'",
    ]  # fmt: skip
    found = uv_settings(listed)
    pairs = " ".join(found.flags)
    assert "--default-index https://mirror/simple" in pairs and "--constraint /caps.txt" in pairs
    assert "--find-links /c" in pairs and "/a" not in found.flags, "a variable wins over the file"
    assert "--no-index" in found.flags and "--prerelease" not in found.flags and "unsafe-best-match" in found.flags
    assert found.variables == {"UV_HTTP_TIMEOUT": "180", "HTTPS_PROXY": "http://p:1", "HTTP_PROXY": "http://p:1"}
    assert not found.unknown and uv_settings(["global.require-hashes='1'"]).unknown == ("require-hashes",)


@pytest.mark.parametrize(("code", "output", "why", "fix"), [
    (1, NO_NETWORK, "cannot be reached", "run `python setup.py` again"),
    (1, "ReadTimeoutError: Read timed out.", "cannot be reached", "connection"),
    (1, "ERROR: Could not install packages: [Errno 28] No space left on device", "full", "--venv"),
    (1, "/v/bin/python: No module named pip", "is broken", "rm -rf"),
    (1, "Traceback (most recent call last):\n File 'x/pip/_internal/cli.py'\nImportError: cannot import name 'y'",
     "ImportError: cannot import name 'y'", "rm -rf"),
    (1, "SSLError(SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED]", "certificate", "clock"),
    (1, "ProxyError('Cannot connect to proxy.', OSError('Tunnel connection failed: 407", "proxy", "HTTPS_PROXY"),
    (1, "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE", "damaged", "uv cache clean"),
    (1, "ERROR: Could not install packages due to an OSError: [Errno 13] Permission denied: '/v/lib'",
     "not writable", "--venv"),
    (1, "ERROR: No matching distribution found for torch==2.13.0", "no torch==2.13.0", "3.11-3.13"),
    (1, "ERROR: ResolutionImpossible: for help visit\nERROR: conflicting dependencies a 1 and a 2",
     "different versions", "fresh environment"),
    (1, "error: Request failed\n  cause: client error\n  cause: dns error", "cannot be reached", "connection"),
    (1, "error: No solution found\n  cause: Because there is no version of torch==2.13.0 and you require torch==2.13.0",
     "no torch==2.13.0", "3.11-3.13"),
    (1, "error: No solution found\n  cause: Because a was not found in the package registry", "no a for", "index"),
    (1, "error: No solution found\n  cause: Because a==1 depends on b<2 and you require b==2, we can conclude that",
     "different versions: cause: Because a==1", "fresh environment"),
    (2, "error: failed to create file\n  cause: Permission denied (os error 13)", "not writable", "--venv"),
    (-9, "Collecting torch", "killed", "close other programs"),
    (7, "ERROR: something new", "ERROR: something new (exit code 7)", "pip.log"),
    (7, "", "no message", "pip.log"),
])  # fmt: skip
def test_each_failure_has_its_words(tmp_path: Path, code: int, output: str, why: str, fix: str) -> None:
    stream = FakeStream(HAS_UV, LISTED, (code, output))
    with pytest.raises(InstallError) as caught:
        run_install(tmp_path, stream)
    assert len(stream.commands) == 3  # nothing after the failure
    assert "cpu.txt could not be installed" in caught.value.what
    assert why in caught.value.why and fix in caught.value.fix, caught.value
    assert "\n" not in caught.value.why


def test_pip_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="did not start"):
        run_install(tmp_path, FakeStream(failing(FileNotFoundError(2, "No such file or directory", "python"))))


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


def test_progress_in_a_file_is_steps_with_their_times() -> None:
    out = io.StringIO()
    progress = InstallProgress(out)
    progress.begin("working")
    progress.detail("a")
    progress.end()
    assert re.fullmatch(r"working \.\.\.\nworking: done \(.+\)\n", out.getvalue())
    assert InstallProgress()._out is sys.stdout


def test_a_long_step_is_heard_of_also_where_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook or over a pipe: "verifying every part" takes minutes."""
    now_s = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now_s[0])
    out = io.StringIO()
    progress = InstallProgress(out)
    progress.begin("verifying every part")
    for now_s[0], part in ((1.0, "torch"), (12.0, "cupy"), (13.0, "kvikio"), (24.0, "kvikio")):
        progress.detail(part)
    progress.end()
    assert out.getvalue().splitlines() == [
        "verifying every part ...",
        "verifying every part (12.0 s) cupy",
        "verifying every part (24.0 s) kvikio",
        "verifying every part: done (24.0 s)",
    ]

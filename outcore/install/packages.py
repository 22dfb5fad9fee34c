"""Packages, installed by uv (by pip where uv cannot be told all that pip is), each failure as one clear error.

The whole output goes to logs/setup_packages.log; people see what is being fetched and for how long. DeepSpeed comes
after torch, which its source package asks what it is."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outcore.common.quantities import format_gb
from outcore.install.environment import Environment
from outcore.install.errors import InstallError
from outcore.install.progress import InstallProgress
from outcore.install.requirement_set import DEEPSPEED, RequirementSet
from outcore.install.uv import UV, UvSettings, uv_settings

Stream = Callable[[Sequence[str], Mapping[str, str], Callable[[str], None]], int]
"""(command, environment, called with each output line) -> exit code."""

_NETWORK = re.compile(
    r"NewConnectionError|Failed to establish a new connection|Temporary failure in name resolution|Name or service not "
    r"known|nodename nor servname|Network is unreachable|ConnectTimeout|ReadTimeout|Read timed out|Connection "
    r"(?:refused|reset|aborted)|Max retries exceeded|getaddrinfo failed|RemoteDisconnected|IncompleteRead|"
    r"error sending request|tcp connect error|dns error|operation timed out",
    re.I,
)
_SHOWN = re.compile(
    r"^\s*(Collecting|Downloading|Building|Installing collected|Preparing|Resolved|Prepared|Installed)\b"
)
PIP = ("-m", "pip", "install", "--disable-pip-version-check", "--no-input")


@dataclass(frozen=True)
class Step:
    """One call of the installer."""

    title: str
    arguments: tuple[str, ...]
    extra_environment: tuple[tuple[str, str], ...] = ()


def install_steps(chosen: RequirementSet, repository: Path) -> tuple[Step, ...]:
    """Commands to be called, in order."""
    files = [file for file in chosen.files if file.stem != DEEPSPEED]
    listed = [repository / "requirements" / "build.txt", *files]
    steps = [Step(" + ".join(file.name for file in files), tuple(a for file in listed for a in ("-r", str(file))))]
    if DEEPSPEED in chosen.pins:
        pins = [f"{name}=={chosen.pins[name]}" for name in ("torch", DEEPSPEED)]
        # A source package: without build isolation it sees the pinned torch. Its set-up asks every CUDA builder and
        # fails on a GPU machine without nvcc unless told that it is built for the CPU; the extensions are built later,
        # for whatever accelerator is there, so nothing is lost by it.
        quiet = (("DS_BUILD_OPS", "0"), ("DS_ACCELERATOR", "cpu"))
        steps.append(Step(pins[-1], ("--no-build-isolation", *pins), quiet))
    steps.append(Step("outcore itself (editable)", ("--no-deps", "-e", str(repository))))
    return tuple(steps)


def install(
    environment: Environment,
    chosen: RequirementSet,
    repository: Path,
    environ: Mapping[str, str],
    stream: Stream,
    progress: InstallProgress,
    log_path: Path,
) -> None:
    """Run every step; InstallError at the first that fails. Nothing is stamped here."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("a", encoding="utf-8") as log:

        def run(command: Sequence[str], variables: Mapping[str, str], lines: list[str]) -> int:
            def heard(line: str) -> None:
                lines.append(line)
                log.write(line + "\n")
                if _SHOWN.match(line) and "finished with status" not in line:
                    progress.detail(_short(line))

            try:
                return stream(command, {**environ, **variables}, heard)
            except OSError as error:
                raise InstallError(
                    f"{command[0]} did not start",
                    str(error),
                    f"make the environment anew: `rm -rf {environment.prefix}`",
                ) from error

        program, variables = _installer(environment, run, progress)
        steps = install_steps(chosen, repository)
        for number, step in enumerate(steps, 1):
            progress.begin(f"[{number}/{len(steps)}] {step.title}")
            lines: list[str] = []
            code = run([*program, *step.arguments], {**variables, **dict(step.extra_environment)}, lines)
            progress.end(code == 0)
            if code != 0:
                raise explain(step, code, "\n".join(lines), environment, log_path)


def _installer(
    environment: Environment, run: Callable[..., int], progress: InstallProgress
) -> tuple[list[str], dict[str, str]]:
    """(command to which packages are added, variables): uv's, which pip installs when missing, or pip's, told why."""
    python, listed, settings, why_not = str(environment.python), [], UvSettings(), ""
    if "uv" not in environment.installed() and run([python, *PIP, UV], {}, []):
        why_not = f"{UV} could not be installed"
    elif run([python, "-m", "pip", "config", "list"], {}, listed):
        why_not = "pip does not list its settings"
    else:
        settings = uv_settings(listed)
        if settings.unknown:
            why_not = f"uv has no equal for pip's {', '.join(settings.unknown)}"
    if why_not:
        progress.say(f"installer:   pip, because {why_not}")
        return [python, *PIP], {}
    uv = [str(environment.bin_dir / "uv"), "pip", "install", "--python", python]
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):  # else each process would compile torch again
        uv.append("--compile-bytecode")
    return [*uv, *settings.flags], settings.variables


def explain(step: Step, code: int, output: str, environment: Environment, log_path: Path) -> InstallError:
    """The reason of a failed pip in one line, and what to do about it."""
    what, clean = f"{step.title} could not be installed", f"{environment.bin_dir / 'uv'} cache clean"
    if "No space left on device" in output or "Errno 28" in output:
        free = format_gb(shutil.disk_usage(environment.prefix).free) if environment.prefix.exists() else "unknown"
        fix = f"free space there (`{clean}` helps), or use another drive: --venv DIR"
        return InstallError(what, f"a drive is full ({free} free under {environment.prefix}, /tmp counts too)", fix)
    if "CERTIFICATE_VERIFY_FAILED" in output or "SSLError" in output or "invalid peer certificate" in output:
        return InstallError(
            what,
            "the registry's certificate was not accepted (a proxy in between, or a wrong clock)",
            "set the clock, or tell pip your company's certificate: `pip config set global.cert FILE`",
        )
    if re.search("ProxyError|Tunnel connection failed|tunnel error|proxy connect", output):
        return InstallError(what, "the proxy refused the connection", "check HTTPS_PROXY, then run again")
    if _NETWORK.search(output):
        return InstallError(
            what,
            "the package registry cannot be reached (no network, or its name does not resolve)",
            "check the connection and run `python setup.py` again: what is already there is kept",
        )
    if "No module named pip" in output or ("Traceback" in output and "pip/_internal" in output.replace("\\", "/")):
        return InstallError(
            what,
            f"pip in {environment.prefix} is broken: {_last_error(output)}",
            f"make the environment anew: `rm -rf {environment.prefix} && python setup.py`",
        )
    if re.search("DO NOT MATCH THE HASHES|Hash mismatch|BadZipFile|is not a valid wheel|invalid zip", output, re.I):
        return InstallError(what, "a downloaded file is damaged", f"`{clean}`, then run again")
    if re.search("Permission denied|Errno 13|os error 13|Read-only file system", output):
        return InstallError(
            what, f"{environment.prefix} is not writable for you", "use an environment of your own: --venv DIR"
        )
    missing = re.search(r"No matching distribution found for (\S+)|Because there is no version of (\S+)", output)
    missing = missing or re.search(r"Because (\S+) was not found in the package registry", output)
    if missing:
        return InstallError(
            what,
            f"the registry has no {next(filter(None, missing.groups()))} for this Python and processor",
            "use Python 3.11-3.13 on x86_64, or check that pip's index is the ordinary one: `pip config list`",
        )
    if re.search("ResolutionImpossible|conflicting dependencies|No solution found", output):
        return InstallError(
            what,
            f"two packages want different versions: {_last_error(output)}",
            "use a fresh environment: `python setup.py --venv .venv`",
        )
    if code in (-9, 137):
        return InstallError(what, "it was killed, most likely for memory", "close other programs, then run again")
    return InstallError(what, f"{_last_error(output)} (exit code {code})", f"the whole output is in {log_path}")


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|error|cause|\w*Error)\b", line)]
    return (errors or lines or ["no message"])[-1]


def _short(line: str) -> str:
    """'Downloading <address>/torch-2.13.0-...whl (899.8 MB)' -> 'Downloading torch-2.13.0-...whl (899.8 MB)'."""
    return re.sub(r"\S*/(\S+)", r"\1", line.strip())[:100]


def stream_command(command: Sequence[str], environ: Mapping[str, str], heard: Callable[[str], None]) -> int:
    """Run a command, hand over each line as it comes; the child is ended when this process is interrupted."""
    process = subprocess.Popen(
        list(command),
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            heard(line.rstrip("\n"))
        return process.wait()
    except BaseException:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
        raise

"""The steps of `python setup.py`, in the order that setup.py calls them; every failure becomes one message and a code.

Second run with nothing to do: detection, a look at the installed versions and the verification, 10-15 s on two cores.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from outcore.common.files import user_folder
from outcore.common.quantities import format_gb, format_gib
from outcore.install.browser import install_chromium
from outcore.install.environment import Environment, find_environment, make_environment
from outcore.install.errors import EXIT_INTERRUPTED, EXIT_NOT_READY, EXIT_OK, InstallError, from_os_error
from outcore.install.extensions import BuildResult, any_was_built, build_all, extension_environment, sanitise_arch_list
from outcore.install.options import SET_NAMES, Options, asks_for_deepspeed, parse_options
from outcore.install.packages import Stream, install, stream_command
from outcore.install.plan import WINDOWS_WORDS, make_plan, print_plan
from outcore.install.progress import InstallProgress
from outcore.install.requirement_set import NEEDED_BYTES, RequirementSet, choose_set
from outcore.install.verify.doctor import probe_rows
from outcore.install.verify.host_checks import configured_offload_path, host_rows, launcher_row, offload_row
from outcore.install.verify.report import FILE, make_report, print_table, write_report
from outcore.install.verify.rows import MISSING, ReportRow
from outcore.machine import Machine, Runner, detect_machine, drive_of, run_command

OUTPUT_FOLDERS = ("checkpoints", "logs", "final_model")
# Variables of a surrounding launcher or interpreter that would mislead the children.
DROPPED_VARIABLES = ("PYTHONHOME", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE")

TEST_PROCESSES = 4
"""Each holds torch and tiny models, about 1.5 GB."""


def call_to_its_end(command: Sequence[str], **options: Any) -> int:
    """The exit code. A Ctrl-C goes to the child too, which may have something to save and is waited for, where
    `subprocess.call` kills it after a quarter of a second; KeyboardInterrupt where it died of it."""
    with subprocess.Popen(command, **options) as child:
        while True:
            with suppress(KeyboardInterrupt):
                code = child.wait()
                break
    if code == -signal.SIGINT:
        raise KeyboardInterrupt
    return code


def wants_extensions(options: Options, environ: Mapping[str, str]) -> bool:
    """Whether DeepSpeed's extensions are built now, or kept up to date."""
    return asks_for_deepspeed(options) or any_was_built(Path(environ["TORCH_EXTENSIONS_DIR"]))


class InstallJob:
    """One run of the set-up. Use as a context manager: errors end in `exit_code` and a message, not in a traceback."""

    def __init__(
        self,
        argv: Sequence[str],
        repository: str | Path,
        *,
        detect: Callable[[], Machine] = detect_machine,
        runner: Runner = run_command,
        stream: Stream = stream_command,
        call: Callable[..., int] = call_to_its_end,
    ) -> None:
        self.options = parse_options(argv)
        self._command = shlex.join(("python", "setup.py", *argv))
        self.repository = Path(repository).resolve()
        self.exit_code = EXIT_OK
        self.rows: list[ReportRow] = []
        self.build_results: tuple[BuildResult, ...] = ()
        self._run_code = EXIT_OK
        self.progress = InstallProgress(sys.stderr if self.options.json else sys.stdout)
        self._detect, self._runner, self._stream, self._call = detect, runner, stream, call
        self._machine: Machine | None = None
        self._environment: Environment | None = None
        self._chosen: RequirementSet | None = None

    def __enter__(self) -> InstallJob:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> bool:
        if error is None:
            return False
        if isinstance(error, OSError) and not isinstance(error, BlockingIOError):
            error = from_os_error(error)
        if isinstance(error, InstallError):
            self.exit_code = error.exit_code
            self.progress.say(f"\nset-up failed: {error}")
            self._report_error(str(error))
            return True
        if isinstance(error, KeyboardInterrupt):
            self.exit_code = EXIT_INTERRUPTED
            self.progress.say(f"\ninterrupted: run `{self._command}` again, it goes on where it stopped")
            self._report_error("interrupted")
            return True
        return False

    @property
    def machine(self) -> Machine:
        assert self._machine is not None, "detect() comes first"
        return self._machine

    @property
    def environment(self) -> Environment:
        assert self._environment is not None, "detect() comes first"
        return self._environment

    @property
    def chosen(self) -> RequirementSet:
        assert self._chosen is not None, "detect() comes first"
        return self._chosen

    def detect(self) -> None:
        """Detect this machine, the environment to use and the packages that match."""
        self._machine = machine = self._detect()
        self._environment = find_environment(self.repository, self.options.venv)
        gpus = ", ".join(f"{gpu.name} ({format_gib(gpu.vram_bytes)})" for gpu in machine.gpus) or "no CUDA GPU"
        wsl = " under WSL2" if machine.is_wsl2 else ""
        self.progress.say(f"machine:     {machine.os_name}{wsl}, {machine.cpu_name}, {machine.cpu_threads} threads, "
                          f"{format_gib(machine.ram_total_bytes)} RAM, {gpus}")  # fmt: skip
        if machine.os_family == "windows":
            self.progress.say(WINDOWS_WORDS)
        requested = self.options.set_name
        stamped = self.environment.read_stamp().get("set")
        if self.options.check and requested == "auto" and stamped in SET_NAMES:
            requested = str(stamped)  # verify what is installed, whatever would be chosen today
        further = (*["test"] * self.options.test, *self.options.extras)
        self._chosen = choose_set(machine, requested, self.repository, further)
        self.progress.say(f"packages:    requirements/{self.chosen.file.name} because {self.chosen.reason}")
        for warning in self.chosen.warnings:
            self.progress.say(f"warning:     {warning}")
        self.progress.say(f"environment: {self.environment.prefix} ({self.environment.how})")

    def print_plan(self) -> None:
        """--dry-run: what would be installed and built. Nothing is touched."""
        environment, chosen = self.environment, self.chosen
        directory = Path(self._child_environment()["TORCH_EXTENSIONS_DIR"])
        builds = wants_extensions(self.options, self._child_environment())
        plan = make_plan(environment, chosen, self.repository, directory if builds else None)
        if self.options.json:
            print(json.dumps(plan, indent=2))
        else:
            print_plan(plan, self.progress)

    def install_packages(self) -> None:
        """Environment and packages, when anything is missing; without DeepSpeed where a run comes first."""
        for name in OUTPUT_FOLDERS:
            (self.repository / name).mkdir(exist_ok=True)
        self._install(self.chosen.without_deepspeed() if self._runs_first else self.chosen)

    def run(self) -> None:
        """--run: train. The installation is ready when the run ended well; what is left of it comes after."""
        if not self.options.run:
            return
        if not self._runs_first:
            self._build_extensions()
        script = self.repository / "train_model.py"
        if not script.exists():
            raise InstallError(f"{script} is not there", "the clone is incomplete", "clone the repository again")
        self._run_code = self._start([str(script), *self.options.rest])

    def install_deepspeed(self) -> None:
        """The rest of the packages after a run; extensions where they are asked for or were built before."""
        if self._runs_first:
            self._install(self.chosen)
        if not self.options.run or self._runs_first:
            self._build_extensions()

    @property
    def _runs_first(self) -> bool:
        """Whether a run comes that does not use DeepSpeed."""
        return self.options.run and not asks_for_deepspeed(self.options)

    def _install(self, chosen: RequirementSet) -> None:
        """Environment and these packages, when anything is missing; the stamp comes last."""
        environment = self.environment
        why = environment.needs_install(chosen, self.repository)
        if why is None:
            self.progress.say("packages:    all pinned versions are installed")
            return
        self.progress.say(f"installing:  {why}")
        self._check_space()
        if environment.exists:
            environment.remove_stamp()
        make_environment(environment, self._execute)
        log_path = self.repository / "logs" / "setup_packages.log"
        environ = self._child_environment(for_deepspeed=False)
        self._compile_kernels(environ)
        install(environment, chosen, self.repository, environ, self._stream, self.progress, log_path)
        unmet = environment.unmet_pins(chosen.pins)
        if unmet:
            names = ", ".join(f"{name} ({found or 'not there'})" for name, found in unmet.items())
            raise InstallError(
                "the installer ended well, yet not every pinned version is installed",
                names,
                f"make the environment anew: `rm -rf {environment.prefix} && python setup.py`",
            )
        environment.write_stamp({"set": chosen.name, "torch": chosen.pins["torch"], "tests": self.options.test})

    def _compile_kernels(self, environ: Mapping[str, str]) -> None:
        """Begin with the C++ kernels while packages are fetched. Whoever needs them waits for this builder's lock, and
        says what is wrong when it failed."""
        script = self.repository / "outcore" / "optim" / "build.py"
        command = [str(self.environment.python), "-P", str(script), str(self.environment.prefix)]
        with (self.repository / "logs" / "setup_kernels.log").open("w", encoding="utf-8") as log, suppress(OSError):
            subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _build_extensions(self) -> None:
        """DeepSpeed's extensions where its engine is asked for, or was before: a compiler takes minutes for them, and
        our engine uses none."""
        environ = self._child_environment()
        if "deepspeed" not in self.chosen.pins:
            return
        Path(environ["TORCH_EXTENSIONS_DIR"]).mkdir(
            parents=True, exist_ok=True
        )  # where DeepSpeed would build by itself
        if not wants_extensions(self.options, environ):
            return
        log_path = self.repository / "logs" / "setup_build.log"
        self.build_results = build_all(
            self.environment, self.chosen.accelerator, environ, self._stream, self.progress, log_path
        )

    def verify(self) -> None:
        """Use every part once; a row each."""
        environment, chosen = self.environment, self.chosen
        offload = self.options.offload_path or configured_offload_path(self.repository)
        self.rows = host_rows(self.machine, environment, chosen, self.repository, self._runner)
        if environment.exists:
            self.progress.begin("verifying every part")
            try:
                environ = self._child_environment()
                self.rows += probe_rows(
                    environment, chosen, self.repository, environ, self.build_results, self.progress.detail
                )
            finally:
                self.progress.end(bool(self.rows))
            if "deepspeed" in chosen.pins:
                self.rows.append(launcher_row(environment))
        else:
            found = f"{environment.prefix} does not exist"
            self.rows.append(
                ReportRow("environment", found, "a virtual environment", MISSING, True, "`python setup.py`")
            )
        self.rows.append(offload_row(offload))

    def report(self) -> None:
        """The table (or JSON), setup_report.json in the user's folder, and what to do next."""
        content = make_report(self.rows, self.machine, self.chosen.name, str(self.environment.prefix))
        path = user_folder() / FILE
        write_report(content, path)
        self.exit_code = EXIT_OK if content["ok"] else EXIT_NOT_READY
        if self.options.json:
            print(json.dumps(content, indent=2), flush=True)
        else:
            self.progress.say()
            print_table(self.rows, sys.stdout)
        broken = [row for row in self.rows if not row.holds]
        if broken:
            self.progress.say("\nnot ready: training needs these")
            for row in broken:
                self.progress.say(f"  {row.part}: {row.found}\n    fix: {row.fix}")
            return
        self.progress.say(f"\nready. The report is in {path}.")
        if not self.options.test and not self.options.run:
            self._say_how_to_start()

    def follow_up(self) -> None:
        """--test; only on a machine that is ready. A run that failed before is the job's exit code."""
        self.exit_code = self._run_code or self.exit_code
        if self.exit_code != EXIT_OK:
            return
        if self.options.test:
            install_chromium(self.progress.say)
            self.exit_code = self._start(["-m", "pytest", *self._pytest_arguments()])
        if self.options.run and self._run_code == EXIT_OK:
            self._say_how_to_talk()

    def _pytest_arguments(self) -> list[str]:
        """Arguments of pytest. Without a GPU the whole suite, flags alone, runs in a process per core (at most
        `TEST_PROCESSES`): each takes a stretch of it, and of another's when its own is done. Tests of a GPU measure its
        memory and must be alone on it."""
        rest = list(self.options.rest)
        is_whole = all(word.startswith("-") for word in rest)
        processes = min(TEST_PROCESSES, os.cpu_count() or 1) if is_whole and self.chosen.name == "cpu" else 1
        return [*(["-n", str(processes), "--dist", "worksteal"] if processes > 1 else []), *rest]

    def _start(self, arguments: list[str]) -> int:
        sys.stdout.flush()
        out = {"stdout": sys.stderr} if self.options.json else {}
        command = [str(self.environment.python), *arguments]
        return self._call(command, cwd=self.repository, env=self._child_environment(), **out)

    def _child_environment(self, for_deepspeed: bool = True) -> dict[str, str]:
        """Environment variables of the interpreter's children."""
        prefix = self.environment.prefix
        environ = {name: value for name, value in os.environ.items() if name not in DROPPED_VARIABLES}
        environ["VIRTUAL_ENV"] = str(prefix)
        environ["PATH"] = os.pathsep.join([str(self.environment.bin_dir), environ.get("PATH", "")])
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(self.repository), environ.get("PYTHONPATH")]))
        if "TORCH_CUDA_ARCH_LIST" in environ:
            environ["TORCH_CUDA_ARCH_LIST"] = sanitise_arch_list(environ["TORCH_CUDA_ARCH_LIST"])
            if not environ["TORCH_CUDA_ARCH_LIST"]:
                del environ["TORCH_CUDA_ARCH_LIST"]
        if for_deepspeed:
            environ |= extension_environment(self.chosen.accelerator, prefix, environ)
            environ |= {"HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}
        return environ

    def _execute(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            list(command), capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, env=self._plain()
        )

    def _plain(self) -> Mapping[str, str]:
        return {name: value for name, value in os.environ.items() if name not in DROPPED_VARIABLES}

    def _check_space(self) -> None:
        if self.environment.exists and "torch" in self.environment.installed():
            return  # the big part is there; pip says so when the rest does not fit
        drive = drive_of(self.environment.prefix)
        free, needed = drive.free_bytes or 0, NEEDED_BYTES[self.chosen.name]
        if free < needed:
            raise InstallError(
                "not enough space to install",
                f"{format_gb(free)} free on {drive.mount_point}, the {self.chosen.name} set needs {format_gb(needed)}",
                "free space there, or put the environment on another drive: `python setup.py --venv DIR`",
            )

    def _say_how_to_start(self) -> None:
        prefix = self.environment.prefix
        shown = prefix.relative_to(self.repository) if prefix.is_relative_to(self.repository) else prefix
        activate = rf"{shown}\Scripts\activate" if os.name == "nt" else f"source {shown}/bin/activate"
        self.progress.say(f"activate:  {activate}")
        self.progress.say("train:     deepspeed --num_gpus=1 train_model.py   (python train_model.py does the same)")

    def _say_how_to_talk(self) -> None:
        """The line that starts a chat with the model just trained: the newest one in final_model/."""
        made = sorted(self.repository.glob("final_model/*/config.json"), key=lambda path: path.stat().st_mtime)
        if made:
            folder = made[-1].parent.relative_to(self.repository)
            if not self.options.rest:
                self.progress.say("\nThe model is too small, and trained too short, to make sense: every part works.")
            self.progress.say(f"\ntalk with it: {self.environment.python} -m outcore.cli chat {folder}")

    def _report_error(self, message: str) -> None:
        """An unfinished set-up leaves a report that says so, instead of an older one that says OK."""
        if self._machine is None or self.options.dry_run:
            return
        set_name = self._chosen.name if self._chosen else "none"
        prefix = str(self._environment.prefix) if self._environment else ""
        content = make_report(self.rows, self._machine, set_name, prefix, error=message)
        try:
            write_report(content, user_folder() / FILE)
        except OSError as error:
            self.progress.say(f"the report could not be written: {error}")
        if self.options.json:
            print(json.dumps(content, indent=2), flush=True)

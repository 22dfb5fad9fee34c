"""The test: look at the machine, try the run, judge, report; the exit code.

Exit codes: 0 GO, 3 GO WITH WARNINGS, 1 NO-GO, 2 wrong usage, 130 interrupted."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.common.files import nearest_existing, newest, user_folder, write_atomic
from outcore.common.output import printable
from outcore.common.quantities import GB, format_s
from outcore.common.words import own_command
from outcore.config import ConfigError, TrainConfig, read_deepspeed_file
from outcore.machine import Machine, detect_machine
from outcore.performance.against_plan import check_space, compare, judge, project
from outcore.performance.health import before_the_trial, during_the_trial
from outcore.performance.show import Check, Findings, show
from outcore.plan import MEASURED_PROFILE, differs

TRIAL_TIMEOUT_S = 900.0
"""Loading and compiling a large model takes minutes; what takes longer hangs."""
HEARD_S = 10.0
"""Seconds after which the test says what the trial is at."""
PROBE_TIMEOUT_S = 180.0
RUN_NAME = "performance-test"
REPORT = "performance_report.json"


@dataclass(frozen=True)
class Effort:
    """Extent of a trial."""

    steps: int
    steps_limit_s: float
    most_save_bytes: int


EFFORTS = {"default": Effort(8, 60.0, 40 * GB), "quick": Effort(3, 20.0, 4 * GB)}
"""Default: under three minutes with models that load in one; quick: the least that says something."""


def run_test(config: TrainConfig, argv: Sequence[str], flags: list[str], root: Path, args: argparse.Namespace) -> int:
    """The whole test. `flags`: those of `argv` that are train_model.py's; `args`: our own; `root`: the repository."""
    started_s = time.monotonic()
    reports = args.report or user_folder()
    try:
        test = PerformanceTest(config, tuple(argv), flags, root, args)
        found = test.run(started_s)
        written = write(found, reports)
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: the report cannot be written: {error}. Name another folder with --report.", file=sys.stderr)
        return 2
    show(found)
    print(f"report: {written}")
    return found.verdict.exit_code


class PerformanceTest:
    """One test, stage by stage."""

    def __init__(
        self, config: TrainConfig, argv: tuple[str, ...], flags: list[str], root: Path, args: argparse.Namespace
    ) -> None:
        self.config, self.argv, self.flags, self.root = config, argv, flags, root
        self.effort = EFFORTS["quick" if args.quick else "default"]
        self.num_steps = args.steps or self.effort.steps
        self.may_probe = not args.no_probe
        self.checkpoints = Path(config.checkpoint_dir).expanduser()
        file = read_deepspeed_file(config.deepspeed_config)
        self.offload_path = config.nvme_offload_path or file.values.get("nvme_offload_path")
        self.drive = Path(self.offload_path or config.checkpoint_dir).expanduser()

    def run(self, started_s: float) -> Findings:
        """Every stage; what fails is in the findings."""
        machine = detect_machine()
        checks = [] if self._has_profile(machine) or not self.may_probe else self._probe()
        self._stage("looking at the machine")
        checks += before_the_trial(machine, drive=self.drive, offloads=bool(self.offload_path))
        trial, failure = self._trial()
        rows, projection = [], None
        is_saved = self.config.save_strategy != "no"
        if trial is not None:
            checks += during_the_trial(trial)
            rows, projection = compare(trial), project(trial, datetime.datetime.now(), is_saved=is_saved)
            if trial["forecast_problem"]:
                checks.append(Check("plan", "note", trial["forecast_problem"]))
        plan = (trial or {}).get("forecast")
        if trial is not None and not failure and is_saved:
            free_bytes = shutil.disk_usage(nearest_existing(self.checkpoints)).free
            checkpoint_bytes = int(trial.get("saved_bytes") or trial.get("state_bytes") or 0)
            checks += check_space(free_bytes, checkpoint_bytes, self.config.save_total_limit)
        verdict = judge(checks, rows, projection, failure, fits=plan["fits"] if plan else None)
        return Findings(
            created_at=datetime.datetime.now().isoformat(timespec="seconds"),
            argv=self.argv,
            elapsed_s=time.monotonic() - started_s,
            verdict=verdict,
            checks=tuple(checks),
            rows=tuple(rows),
            projection=projection,
            trial=trial,
        )

    def _stage(self, words: str) -> None:
        print(f"- {words}", flush=True)

    def _has_profile(self, machine: Machine) -> bool:
        try:
            profile = newest(MEASURED_PROFILE)
            return profile.is_file() and not differs(machine, Machine.load(profile))
        except (ValueError, OSError):
            return False

    def _probe(self) -> list[Check]:
        """Measure this machine's links, quickly; its failure is a check's words."""
        self._stage(f"measuring this machine's links ({own_command('probe')} --quick), once")
        command = [sys.executable, "-m", "outcore", "probe", "--quick", "--path"]
        command += [str(nearest_existing(self.drive)), "--logs", str(MEASURED_PROFILE.parent)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, env=_with_module_path(self.root)
            )
        except subprocess.TimeoutExpired:
            return [Check("links", "warning", f"the probe gave no answer within {format_s(PROBE_TIMEOUT_S)}")]
        if done.returncode:
            return [Check("links", "warning", f"the probe failed: {_last_line(done.stderr)}")]
        return [Check("links", "ok", f"measured now, quickly; {own_command('probe')} measures them thoroughly")]

    def _trial(self) -> tuple[dict[str, Any] | None, str]:
        """(what the trial run left, '') or (None, why it failed)."""
        self._stage("trying the run: load, engine, steps, checkpoint")
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix=".performance-", dir=self.checkpoints) as saved,
            tempfile.TemporaryDirectory(prefix="outcore-performance-") as temporary,
        ):
            result, log = Path(temporary) / "trial.json", Path(temporary) / "trial.log"
            command = [sys.executable, "-m", "outcore.performance.trial", str(result), str(self.num_steps)]
            command += [str(self.effort.steps_limit_s), str(self.effort.most_save_bytes), "--"]
            command += [*self.flags, f"--run_name={RUN_NAME}", f"--checkpoint_dir={saved}", "--save_strategy=steps"]
            command += [f"--log_dir={temporary}/logs", f"--export_dir={temporary}/export", "--report_to=none"]
            command += ["--resume_from_checkpoint=null", "--no_export"]
            with open(log, "w") as sink:
                child = subprocess.Popen(
                    command, env=_with_module_path(self.root), stdout=sink, stderr=subprocess.STDOUT
                )
                try:
                    code = self._ended(child, log)
                finally:
                    if child.poll() is None:
                        child.kill()
                        child.wait()
            if code == 0 and result.is_file():
                return json.loads(result.read_text(encoding="utf-8")), ""
            return None, _why_failed(code, log.read_text(encoding="utf-8", errors="replace"))

    def _ended(self, child: subprocess.Popen, log: Path) -> int | None:
        """The trial's exit code, None when its time is up; what it is at is said while it is waited for."""
        began_s = time.monotonic()
        while (waited_s := time.monotonic() - began_s) < TRIAL_TIMEOUT_S:
            with suppress(subprocess.TimeoutExpired):
                return child.wait(timeout=min(HEARD_S, TRIAL_TIMEOUT_S - waited_s))
            words = _last_line(log.read_text(encoding="utf-8", errors="replace"))
            self._stage(f"  {format_s(time.monotonic() - began_s)}: {printable(words)[:120]}")
        return None


def write(found: Findings, folder: Path) -> Path:
    """Path of performance_report.json, which has everything. OSError when it cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / REPORT
    write_atomic(path, json.dumps(found.to_dict(), indent=1, default=str))
    return path


def _with_module_path(root: Path) -> dict[str, str]:
    """The environment of a child that stays in the user's folder, where relative paths of flags belong, and finds
    outcore in `root`."""
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _why_failed(code: int | None, log: str) -> str:
    if code is None:
        return f"it did not end within {format_s(TRIAL_TIMEOUT_S)}"
    errors = [line for line in log.splitlines() if line.startswith("error: ")]
    if errors:
        return errors[-1].removeprefix("error: ")
    if code < 0:
        killed = " (the system ends the largest process when RAM is full)" if code == -9 else ""
        return f"it was ended by signal {-code}{killed}"
    return f"exit code {code}: {_last_line(log)}"


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"

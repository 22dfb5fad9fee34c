"""Loggers: where a run reports beside metrics.jsonl - TensorBoard, and trackio or wandb where they are installed.

Every logger has log_header, log_step, log_eval and close; LoggerGroup may be empty, so callers never test for None. A
logger that fails (full disk, no network) is switched off with one sentence and the run goes on: metrics.jsonl is the
record. Nothing is sent anywhere unless the user names the service in report_to."""

from __future__ import annotations

import importlib
import importlib.util
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from outcore.common.words import did_you_mean
from outcore.monitor.sensors import describe

INSTALL_HINTS = {
    "tensorboard": "pip install tensorboard",
    "wandb": "pip install wandb",
    "trackio": "pip install trackio",
    "mlflow": "pip install mlflow-skinny",
}


MLFLOW_VALUE_CHARS = 500
"""Most of a parameter's value that every mlflow server takes."""


class Logger(Protocol):
    """Protocol of a logger, as the loop calls it; records are metrics.jsonl lines."""

    def log_header(self, header: dict[str, Any]) -> None: ...

    def log(self, group: str, record: dict[str, Any]) -> None:
        """Take a step's record (group "train") or an evaluation's ("eval")."""

    def close(self) -> None: ...


class TensorBoardLogger:
    """Scalars in TensorBoard's event files under `folder` (through tensorboard's own writer; no TensorFlow, no torch).

    After a resume the newest event file carries on; TensorBoard drops older points of repeated steps by itself
    (`purge_step`, written as a session start)."""

    def __init__(self, folder: Path | str, *, purge_step: int | None = None) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        # The generated modules fill themselves in at run time, which type checkers cannot follow.
        self._events: Any = event_pb2
        self._summaries: Any = summary_pb2
        self._writer = EventFileWriter(str(folder), flush_secs=30)
        if purge_step is not None:
            self._add_event(purge_step, file_version="brain.Event:2")
            self._add_event(purge_step, session_log=self._events.SessionLog(status=self._events.SessionLog.START))

    def log_header(self, header: dict[str, Any]) -> None:
        """Do nothing: TensorBoard has no place for it that people look at."""

    def close(self) -> None:
        self._writer.close()

    def log(self, group: str, record: dict[str, Any]) -> None:
        summary = self._summaries.Summary
        values = [summary.Value(tag=tag, simple_value=value) for tag, value in scalars(record, group)]
        if values:
            self._add_event(record["step"], summary=summary(value=values))

    def _add_event(self, step: int, **content: Any) -> None:
        self._writer.add_event(self._events.Event(step=step, wall_time=time.time(), **content))


class TrackerLogger:
    """wandb or trackio: both offer `init(project, name, config)`, then `log(scalars, step)` and `finish()`."""

    def __init__(self, module: Any, project: str, run_name: str, **settings: Any) -> None:
        self._module = module
        self._settings = {"project": project, "name": run_name, **settings}
        self._run: Any = None

    def log_header(self, header: dict[str, Any]) -> None:
        if self._run is None:
            self._run = self._module.init(config=header, **self._settings)

    def close(self) -> None:
        if self._run is not None:
            self._run = None
            self._module.finish()

    def log(self, group: str, record: dict[str, Any]) -> None:
        self.log_header({})
        self._module.log(dict(scalars(record, group)), step=record["step"])


class MlflowLogger:
    """mlflow, at the tracking server that its own settings name (MLFLOW_TRACKING_URI; else files in ./mlruns)."""

    def __init__(self, module: Any, experiment: str, run_name: str) -> None:
        self._module, self._experiment, self._run_name = module, experiment, run_name
        self._is_open = False

    def log_header(self, header: dict[str, Any]) -> None:
        if self._is_open:
            return
        self._module.set_experiment(self._experiment)
        self._module.start_run(run_name=self._run_name)
        self._is_open = True
        said = {name: str(value)[:MLFLOW_VALUE_CHARS] for name, value in (header.get("config") or {}).items()}
        self._module.log_params(said)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._module.end_run()

    def log(self, group: str, record: dict[str, Any]) -> None:
        self.log_header({})
        self._module.log_metrics(dict(scalars(record, group)), step=record["step"])


class LoggerGroup:
    """Several loggers as one; the first failure of each switches it off and is said once.

    Args:
        loggers: by name.
        say: takes the sentence about a logger that failed."""

    def __init__(self, loggers: dict[str, Logger], say: Callable[[str], None]) -> None:
        self._loggers = dict(loggers)
        self._say = say

    @property
    def names(self) -> tuple[str, ...]:
        """The loggers that still work."""
        return tuple(self._loggers)

    def add(self, name: str, logger: Logger) -> None:
        """One more (e.g. a MetricsServer)."""
        self._loggers[name] = logger

    def log_header(self, header: dict[str, Any]) -> None:
        self._each(lambda logger: logger.log_header(header))

    def log_step(self, record: dict[str, Any]) -> None:
        self._each(lambda logger: logger.log("train", record))

    def log_eval(self, record: dict[str, Any]) -> None:
        self._each(lambda logger: logger.log("eval", record))

    def close(self) -> None:
        self._each(lambda logger: logger.close())
        self._loggers = {}

    def _each(self, act: Callable[[Logger], None]) -> None:
        for name, logger in list(self._loggers.items()):
            try:
                act(logger)
            except Exception as error:  # third-party code: whatever it raises must not stop the run
                del self._loggers[name]
                self._say(
                    f"Reporting to {name} failed ({type(error).__name__}: {describe(error)}) and is off for the rest "
                    "of this run; metrics.jsonl has everything."
                )


def check_report_to(report_to: str | Iterable[str]) -> tuple[str, ...]:
    """The names in `report_to` ("tensorboard,wandb", a list, "all", "none"), checked.

    Raises:
        ValueError: a name that does not exist (with the nearest that does), or a tool that is not installed."""
    names = report_to.split(",") if isinstance(report_to, str) else list(report_to)
    names = list(dict.fromkeys(name.strip().lower() for name in names if name.strip()))
    if names in ([], ["none"]):
        return ()
    if "none" in names:
        raise ValueError(f"report_to has 'none' beside {', '.join(n for n in names if n != 'none')}: choose one.")
    if "all" in names:
        return tuple(name for name in INSTALL_HINTS if _is_installed(name))
    for name in names:
        if name not in INSTALL_HINTS:
            meant = did_you_mean(name, [*INSTALL_HINTS, "all", "none"], 1)
            raise ValueError(f"report_to has no {name!r}; it knows {', '.join(INSTALL_HINTS)}, all and none.{meant}")
        if not _is_installed(name):
            hint = INSTALL_HINTS[name]
            raise ValueError(f"report_to asks for {name}, which is not installed: {hint}, or leave it out.")
    return tuple(names)


def make_loggers(
    report_to: str | Iterable[str],
    run_dir: Path | str,
    *,
    resume_step: int | None = None,
    project: str = "outcore",
    enabled: bool = True,
    say: Callable[[str], None] = print,
) -> LoggerGroup:
    """The loggers that `report_to` names, for the run whose log folder is `run_dir`.

    Args:
        report_to: tensorboard, wandb, trackio, mlflow, all (that are installed) or none; several with commas or a list.
        run_dir: TensorBoard's event files go to its subfolder "tensorboard"; its name is the run's name elsewhere.
        resume_step: of a resumed run; TensorBoard then forgets points of later steps.
        enabled: False (ranks other than 0) checks the names and reports nowhere.
        say: takes one sentence for a logger that fails, now or later.

    Raises:
        ValueError: see check_report_to."""
    names = check_report_to(report_to)
    run_dir = Path(run_dir)
    group = LoggerGroup({}, say)
    for name in names if enabled else ():
        try:
            if name == "tensorboard":
                purge_step = None if resume_step is None else resume_step + 1
                group.add(name, TensorBoardLogger(run_dir / "tensorboard", purge_step=purge_step))
            elif name == "mlflow":
                group.add(name, MlflowLogger(importlib.import_module(name), project, run_dir.name))
            else:
                folder = {"dir": str(run_dir)} if name == "wandb" else {}
                group.add(name, TrackerLogger(importlib.import_module(name), project, run_dir.name, **folder))
        except Exception as error:
            say(
                f"Reporting to {name} could not start ({type(error).__name__}: {describe(error)}): the run goes on "
                "without it; metrics.jsonl has everything."
            )
    return group


def scalars(record: dict[str, Any], group: str) -> list[tuple[str, float]]:
    """The finite numbers of a metrics line as ("train/loss", 2.1), nested ones as ("train/phase_s/forward", 0.3)."""
    found: list[tuple[str, float]] = []
    for name, value in record.items():
        if name == "step" or isinstance(value, bool):
            continue
        if isinstance(value, dict):
            found += scalars(value, f"{group}/{name}")
        elif isinstance(value, (int, float)) and math.isfinite(value):
            found.append((f"{group}/{name}", float(value)))
    return found


def _is_installed(name: str) -> bool:
    # A bare folder of that name in the working directory (wandb makes one) is found too, but has no origin.
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None

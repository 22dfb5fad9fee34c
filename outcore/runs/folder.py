"""Folders where a run keeps its things: checkpoints/<run>, logs/<run>, final_model/<run>; and what it is called."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outcore.checkpoint import list_checkpoints
from outcore.common import describe_errno, make_folder
from outcore.config import ConfigError, TrainConfig
from outcore.data import weighted_source
from outcore.runs.lock import RunLock


@dataclass(frozen=True)
class RunFolder:
    """The folders of one run."""

    name: str
    checkpoints: Path
    logs: Path
    export: Path

    @property
    def metrics(self) -> Path:
        """metrics.jsonl of the run."""
        return self.logs / "metrics.jsonl"

    @property
    def is_in_use(self) -> bool:
        """True when a run of this name has left something."""
        return bool(list_checkpoints(self.checkpoints)) or self.metrics.exists() or self.export.exists()

    def lock(self, say: Callable[[str], None] = print) -> RunLock:
        """Keep every other process out of this run. RunInUse when one is in it; ConfigError for unwritable folders."""
        parents = list(dict.fromkeys([self.checkpoints.parent, self.logs.parent, self.export.parent]))
        for _ in range(MOST_TRIES):
            made = [folder for parent in parents for folder in (parent, *parent.parents) if not folder.exists()]
            for parent in parents:
                _make(parent)
            try:
                lock = RunLock.take(self.name, parents, say)
            except FileNotFoundError:  # a run that was refused has just taken its empty folders away
                continue
            lock.made = sorted(set(made), key=lambda folder: -len(folder.parts))
            return lock
        raise ConfigError(f"{parents[0]} disappears whenever it is made: does another program clean up there?")

    def make(self) -> None:
        """Create the folders. ConfigError when a folder cannot be written."""
        for folder in (self.checkpoints, self.logs):
            _make(folder)

    def remove_empty(self) -> None:
        """Take back folders in which nothing was written: a refused run leaves none."""
        for folder in (self.checkpoints, self.logs):
            with suppress(OSError):  # not empty, or never made
                folder.rmdir()


def _make(folder: Path) -> None:
    try:
        make_folder(folder)
        probe = folder / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written ({describe_errno(error.errno)}): fix its permissions, or point "
            "--checkpoint_dir, --log_dir and --export_dir at folders that can."
        ) from error


MOST_TRIES = 10
MOST_SOURCES = 3
"""Sources of a mixture named in a run's name."""


def default_name(config: TrainConfig) -> str:
    """<model>-<data>, from what the user named: tiny-embedded, Qwen3-4B-notes, Qwen3-4B-pairs-lora-dpo."""
    model = config.preset or config.model_name_or_path or config.config_file or config.model_module or "tiny"
    sources = [weighted_source(name).name for name in config.dataset[:MOST_SOURCES]]
    parts = [re.split(r"[/\\]", part.rstrip("/\\"))[-1] for part in (model, *sources)]
    stems = [re.sub(r"\.(json|jsonl|csv|txt|parquet|py|gz|zst)(:.*)?$", "", part) for part in parts]
    suffix = "-lora" * bool(config.lora_r) + f"-{config.method}" * (config.method != "sft")
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(stems) + suffix).strip("-.") or "run"


def folder_of(config: TrainConfig, name: str) -> RunFolder:
    """The folders of the run called `name`."""
    checkpoints, logs, export = (
        Path(p).expanduser() for p in (config.checkpoint_dir, config.log_dir, config.export_dir)
    )
    return RunFolder(name, checkpoints / name, logs / name, export / name)


def next_name(config: TrainConfig) -> str:
    """The name that a new run gets: the user's, else the first of base, base-2, base-3 ... that is not in use."""
    base = config.run_name or default_name(config)
    names = (base if number == 1 else f"{base}-{number}" for number in itertools.count(1))
    return base if config.run_name else next(name for name in names if not folder_of(config, name).is_in_use)


def numbered_names(config: TrainConfig, base: str) -> list[str]:
    """Names base, base-2, base-3 ... that exist, in order."""
    root = Path(config.checkpoint_dir).expanduser()
    found = []
    for path in root.glob(f"{base}*") if root.is_dir() else []:
        match = re.fullmatch(re.escape(base) + r"(?:-(\d+))?", path.name)
        if match:
            found.append((int(match.group(1) or 1), path.name))
    return [name for _, name in sorted(found)] or [base]

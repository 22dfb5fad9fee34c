"""Which run this process writes, and where it goes on: settled by rank 0 alone, under the run's lock."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from outcore.checkpoint import Checkpoint, CheckpointError, list_checkpoints, newest_checkpoint, open_checkpoint
from outcore.common.words import did_you_mean
from outcore.config import ConfigError, TrainConfig
from outcore.runs.folder import RunFolder, default_name, folder_of, numbered_names
from outcore.runs.lock import RunInUse, RunLock


@dataclass(frozen=True)
class TakenRun:
    """A run that this process alone may write, until the lock is released."""

    folder: RunFolder
    checkpoint: Checkpoint | None
    """Checkpoint where it goes on; None: at the beginning."""
    lock: RunLock | None
    """Rank 0's."""


def take_run_together(config: TrainConfig, say: Callable[[str], None], world_size: int, *, is_main: bool) -> TakenRun:
    """`take_run` on rank 0; the other ranks follow, also where it refuses (torch.distributed is there)."""
    if world_size == 1:
        return take_run(config, say)
    taken = None
    told: list[Any] = [None, None, None]
    if is_main:
        try:
            taken = take_run(config, say)
            told = [taken.folder.name, taken.checkpoint and taken.checkpoint.path, None]
        except (ValueError, RuntimeError, OSError) as error:
            told = [None, None, error]
    torch.distributed.broadcast_object_list(told, src=0)
    name, path, error = told
    if error is not None:
        raise error
    if taken is not None:
        return taken
    return TakenRun(folder_of(config, name), path and open_checkpoint(path, verify=False), None)


def take_run(config: TrainConfig, say: Callable[[str], None]) -> TakenRun:
    """Lock the run's name, then settle where it starts.

    A new run never writes into an older one: without `run_name` it takes the next free number; with one that is in
    use it is refused. `auto` resumes the newest run of the name that has a complete checkpoint.
    Raises ConfigError, CheckpointError or RunInUse with what to do."""
    base = config.run_name or default_name(config)
    wanted = config.resume_from_checkpoint
    if wanted == "auto":
        taken = _take_newest(config, base, say)
        if taken is not None:
            return taken
        say(f"resume_from_checkpoint auto: run {base} has no checkpoint yet, so it starts from the beginning.")
    elif wanted:
        return _take_wanted(config, Path(wanted).expanduser(), say)
    if config.run_name:
        folder = folder_of(config, config.run_name)
        lock = folder.lock(say)
        if folder.is_in_use and wanted is None:
            lock.release()
            raise ConfigError(
                f"run_name {config.run_name} is in use. Continue that run with --resume_from_checkpoint auto, or "
                "choose another --run_name."
            )
        return TakenRun(folder, None, lock)
    for number in itertools.count(1):
        folder = folder_of(config, base if number == 1 else f"{base}-{number}")
        if folder.is_in_use:
            continue
        try:
            lock = folder.lock(say)
        except RunInUse:
            continue
        if not folder.is_in_use:  # another process may have had it, and ended, since we looked
            return TakenRun(folder, None, lock)
        lock.release()
    raise AssertionError("numbers do not end")


def _take_newest(config: TrainConfig, base: str, say: Callable[[str], None]) -> TakenRun | None:
    """The newest run of a name at its newest whole checkpoint; None when no run of the name has one."""
    damaged: list[str] = []

    def on_bad(words: str) -> None:
        damaged.append(words)
        say(words)

    for name in reversed([base] if config.run_name else numbered_names(config, base)):
        folder = folder_of(config, name)
        lock = folder.lock(say)  # before its checkpoints are read: whoever writes it removes old ones
        checkpoint = newest_checkpoint(folder.checkpoints, on_bad)
        if checkpoint is not None:
            return TakenRun(folder, checkpoint, lock)
        lock.release()
    if damaged:
        raise CheckpointError(
            f"Run {base} has checkpoints, but none of them is whole: see above. Bring one back from a copy, or "
            "start a new run with another --run_name."
        )
    return None


def _take_wanted(config: TrainConfig, path: Path, say: Callable[[str], None]) -> TakenRun:
    """The checkpoint that the user named, in its own run or as the start of another one."""
    _check_wanted(path)
    own = path.resolve().parent
    folder = folder_of(config, config.run_name or own.name)
    lock = folder.lock(say)
    try:
        checkpoint = _open_wanted(path)
        if folder.checkpoints.resolve() != own and folder.is_in_use:
            raise ConfigError(
                f"run {folder.name} is in use, and {path} is not one of its checkpoints: going on from it would "
                f"overwrite that run. Choose another --run_name, or continue {folder.name} with "
                "--resume_from_checkpoint auto."
            )
    except BaseException:
        lock.release()
        raise
    return TakenRun(folder, checkpoint, lock)


def _check_wanted(path: Path) -> None:
    """ConfigError when the checkpoint that the user named is no folder."""
    if path.is_dir():
        return
    others = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
    what = "is a file: name its folder." if path.is_file() else f"no such folder.{did_you_mean(path.name, others, 1)}"
    raise ConfigError(
        f"--resume_from_checkpoint {path}: {what} A checkpoint is a folder <run>/step-00000123; `auto` takes the "
        "newest one of the run."
    )


def _open_wanted(path: Path) -> Checkpoint:
    """The checkpoint that the user named, with a way out when it is damaged. CheckpointError."""
    try:
        return open_checkpoint(path)
    except CheckpointError as error:
        if list_checkpoints(path):  # the run's folder: the error names the newest one in it
            raise
        others = [p for p in list_checkpoints(path.parent) if p != path]
        way = (
            f"Use {others[-1]} instead, or --run_name {path.parent.name} --resume_from_checkpoint auto, which takes "
            "the newest one that is whole."
            if others
            else "Copy it again from where it came from, or start a new run."
        )
        raise CheckpointError(f"{error} {way}") from error

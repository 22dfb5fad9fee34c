"""Checkpoints that survive: written aside, synced, renamed; verified on load; rotated without losing the only one.

A checkpoint is `checkpoints/<run>/step-00000123/` with safetensors shards (`model-*` 16-bit weights, `master-*` exact
fp32 weights, `exp_avg-*` and `exp_avg_sq-*` moments, `rng-*` generator states), `trainer.json` (the loop's state) and
`manifest.json` (`checkpoint.manifest`), which is written last. Tensors go by parameter name, so any engine, residency
or number of ranks can resume. Every listed file and every folder that holds one is on the drive before the rename. Cost
of a save: one pass over the states; of a load: one for the checksums, one to read. Anything incomplete is named so that
it is never taken for a checkpoint.

A run that goes back to an earlier checkpoint leaves later ones behind, so the newest is not the one of the highest
step: a manifest counts (`order`) when its checkpoint was written or gone back to."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outcore.checkpoint.manifest import EXPORT, TRAINER, CheckpointError, Manifest
from outcore.checkpoint.manifest import NAME as MANIFEST
from outcore.common import describe_errno, file_errors, fsync_folder, fsync_tree, make_folder, remove_tree, write_json
from outcore.common.output import say
from outcore.common.quantities import format_gb

SPACE_MARGIN_BYTES = 256 << 20
"""Free space that a save leaves on the drive, so that logs can still be written."""
_REPLACED = ".old.part"
_STEP_FOLDER = re.compile(r"step-(\d{8,})$")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint folder."""

    path: Path
    manifest: Manifest
    state: Mapping[str, Any]
    """The loop's state as saved."""
    damaged_export: tuple[str, ...] = ()
    """Faults of files below `export/`, in words; such files are made again when a run resumes."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step

    def trainer_state(self) -> dict[str, Any]:
        """The loop's state as saved."""
        return dict(self.state)

    def check_readable(self) -> None:
        """CheckpointError for one of a foreign trainer (`--method`, `--train_vision`), which only that reads."""
        method = self.state.get("method")
        if method is not None:
            raise CheckpointError(
                f"{self.path}: is of a run by {method}, whose checkpoints only its trainer reads. Let the run come to "
                "its end (the same command with --resume_from_checkpoint auto), which exports the model."
            )

    def files(self, prefix: str) -> list[str]:
        """Listed files whose path below the folder begins so; nothing else in the folder is read."""
        return sorted(name for name in self.manifest.files if name.startswith(prefix))


def step_folder(step: int) -> str:
    """Folder name of a step: step-00000123."""
    return f"step-{step:08d}"


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raise CheckpointError when the drive has no room for a save of `needed_bytes`."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes + SPACE_MARGIN_BYTES:
        raise CheckpointError(
            f"The drive of {folder} is too full for a checkpoint: it needs {format_gb(needed_bytes)} and a margin of "
            f"{format_gb(SPACE_MARGIN_BYTES)}, {format_gb(free_bytes)} are free. Earlier checkpoints are intact. "
            "Free some space, lower --save_total_limit, or point --checkpoint_dir at another drive."
        )


def save_checkpoint(
    run_folder: Path,
    step: int,
    write: Callable[[Path, Callable[[Path, int], None]], dict[str, Any]],
    *,
    needed_bytes: int,
    keep: int,
    best_step: int | None = None,
    is_writer: bool = True,
    barrier: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda words: None,
) -> Path:
    """Make `run_folder/step-…`: `write(folder, on_file)` fills a folder aside and returns the loop's JSON state.

    `on_file(path, crc32)` tells the checksum of a file just written, so that it need not be read again. Called on every
    rank; only the writer touches manifest and names. After the rename the oldest checkpoints beyond `keep` are removed
    (`rotate`); what fails from then on is said, and the save stands. Any failure before leaves the earlier checkpoints
    as they were and removes the half-written folder. FileError names phase and path."""
    final = run_folder / step_folder(step)
    aside = run_folder / f".{step_folder(step)}.part"
    phase = f"saving the checkpoint of step {step}"
    with file_errors(phase, run_folder):
        if is_writer:
            make_folder(run_folder)
            sweep_unfinished(run_folder)
            check_space(run_folder, needed_bytes)
            aside.mkdir()
    barrier()
    checksums: dict[Path, int] = {}
    try:
        with file_errors(phase, aside):
            state = write(aside, checksums.__setitem__)
        barrier()
        if is_writer:
            with file_errors(phase, aside):
                write_json(aside / TRAINER, {**state, "step": step})
                sha = state.get("config_sha256")
                Manifest.of(aside, step, _next_order(run_folder), checksums, sha).save(aside)
                fsync_tree(aside)
                if final.exists():  # a run resumed from an older step comes by again
                    os.rename(final, run_folder / f".{final.name}{_REPLACED}")
                os.rename(aside, final)
                fsync_folder(run_folder)
    except BaseException:
        if is_writer:
            shutil.rmtree(aside, ignore_errors=True)
            with suppress(OSError):
                finish_replacing(run_folder)
        raise
    if is_writer:
        try:
            sweep_unfinished(run_folder)
            rotate(run_folder, keep, step, best_step)
        except OSError as error:
            say(
                f"WARNING: the checkpoint of step {step} is saved, and older ones could not be removed: "
                f"{error.filename or run_folder}: {describe_errno(error.errno)}"
            )
    barrier()
    return final


def sweep_unfinished(run_folder: Path) -> list[Path]:
    """Remove what an interrupted save left behind; returns the removed folders."""
    finish_replacing(run_folder)
    left = [path for path in run_folder.glob(".step-*.part") if path.is_dir()]
    for path in left:
        remove_tree(path)
    return left


def finish_replacing(run_folder: Path) -> None:
    """A save of a step that has a checkpoint renames the old one aside, then the new one into place. Where it was
    killed between the two, finish it, or undo it should the new one not verify."""
    for old in sorted(run_folder.glob(f".step-*{_REPLACED}")):
        final = run_folder / old.name.removeprefix(".").removesuffix(_REPLACED)
        if final.exists():
            continue
        new = run_folder / f".{final.name}.part"
        try:
            open_checkpoint(new)
        except CheckpointError:
            new = old
        try:
            os.rename(new, final)
        except OSError:
            if not final.exists():  # else another rank was here
                raise
        fsync_folder(run_folder)


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Checkpoint folders of a run that carry a manifest, oldest first: before all others those that the run left
    behind when it went back to an earlier one. OSError when the folder cannot be read."""
    if not run_folder.is_dir():
        return []
    found = [p for p in _step_folders(run_folder) if _has_manifest(p)]
    left_behind = _left_behind(found)
    return sorted(found, key=lambda path: (path not in left_behind, _step_of(path)))


def _step_folders(run_folder: Path) -> list[Path]:
    with file_errors("listing checkpoints", run_folder):
        return [path for path in run_folder.iterdir() if _STEP_FOLDER.match(path.name)]


def _has_manifest(path: Path) -> bool:
    try:
        return (path / MANIFEST).is_file()
    except OSError:  # it is there and cannot be looked at: whoever opens it is told why
        return True


def _left_behind(checkpoints: list[Path]) -> set[Path]:
    """Folders after which one of a lower step came."""
    orders = {path: order for path in checkpoints if (order := _order_of(path)) is not None}
    left, first_step = set(), math.inf
    for path in sorted(orders, key=lambda path: (orders[path], _step_of(path)), reverse=True):
        if _step_of(path) > first_step:
            left.add(path)
        first_step = min(first_step, _step_of(path))
    return left


def _step_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def _order_of(path: Path) -> int | None:
    """When it was written or gone back to; None: its manifest cannot be read."""
    try:
        return Manifest.load(path).order
    except CheckpointError:
        return None


def _next_order(run_folder: Path) -> int:
    return 1 + max((_order_of(path) or 0 for path in list_checkpoints(run_folder)), default=0)


def go_back_to(checkpoint: Checkpoint) -> list[Path]:
    """Make a checkpoint the newest of its run, from which training goes on; returns those that are left behind."""
    run_folder = checkpoint.path.parent
    before = list_checkpoints(run_folder)
    was_left = _left_behind(before)
    if before[-1].name == checkpoint.path.name:
        return []
    with file_errors("going back to a checkpoint", checkpoint.path):
        checkpoint.manifest.with_order(_next_order(run_folder)).save(checkpoint.path)
    return sorted(_left_behind(before) - was_left, key=_step_of)


def mend_export(checkpoint: Checkpoint, write: Callable[[Path], None]) -> Checkpoint:
    """Make the files below `export/` again where they were damaged: `write(checkpoint folder)` makes them. OSError."""
    if not checkpoint.damaged_export:
        return checkpoint
    folder = checkpoint.path
    with file_errors("mending a checkpoint's export files", folder):
        remove_tree(folder / EXPORT)
        write(folder)
        fsync_tree(folder / EXPORT)
        fsync_folder(folder)
        found = Manifest.of(folder / EXPORT, 0, 0, {}, None).files
        kept = {name: entry for name, entry in checkpoint.manifest.files.items() if not name.startswith(f"{EXPORT}/")}
        files = kept | {f"{EXPORT}/{name}": entry for name, entry in found.items()}
        manifest = replace(checkpoint.manifest, files=files)
        manifest.save(folder)
    return replace(checkpoint, manifest=manifest, damaged_export=())


def rotate(run_folder: Path, keep: int, step: int, best_step: int | None = None) -> list[Path]:
    """Remove the oldest checkpoints beyond `keep`; that of `step`, just saved, and the best are never removed. OSError.

    Later ones, which a run that went back has left behind, count as older than all others."""
    by_age = sorted(list_checkpoints(run_folder), key=lambda path: _step_of(path) <= step)
    old = [path for path in by_age[: -max(keep, 1)] if _step_of(path) != best_step]
    for path in old:
        # Renamed first: a removal that is interrupted must not leave something that looks like a checkpoint.
        doomed = path.with_name(f".{path.name}.part")
        os.rename(path, doomed)
        remove_tree(doomed)
    return old


QUIET_S = 10.0
"""Seconds after which a check that goes on says so: a large checkpoint is read for minutes."""


def open_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """A complete checkpoint, every listed file's size and CRC-32 checked.

    Raises CheckpointError naming the file that is missing, cut short, damaged or cannot be read."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint folder.")
    if not _has_manifest(path):
        newest = list_checkpoints(path)
        hint = f" It holds checkpoints, though: use {newest[-1]}." if newest else ""
        raise CheckpointError(f"{path}: has no {MANIFEST}, so it is not a complete checkpoint.{hint}")
    manifest = Manifest.load(path)
    damaged_export, told_s, read_bytes = [], time.monotonic(), 0
    for name in manifest.files:
        problem = manifest.problem(path, name, verify=verify)
        with suppress(OSError):
            read_bytes += (path / name).stat().st_size
        if time.monotonic() - told_s >= QUIET_S:
            told_s = time.monotonic()
            say(f"verifying {path}: {format_gb(read_bytes)} read")
        if problem is None:
            continue
        if not name.startswith(f"{EXPORT}/"):
            raise CheckpointError(problem)
        damaged_export.append(problem)
    return Checkpoint(path, manifest, _read_state(path, manifest), tuple(damaged_export))


def _read_state(path: Path, manifest: Manifest) -> dict[str, Any]:
    """trainer.json, which must be of the manifest's step, as must the folder's name."""
    file = path / TRAINER
    try:
        state = json.loads(file.read_text(encoding="utf-8"))
        step = state["step"]
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {describe_errno(error.errno)}.") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file}: damaged: {type(error).__name__}: {error}.") from error
    named = int(match[1]) if (match := _STEP_FOLDER.match(path.name)) else manifest.step
    if not manifest.step == step == named:
        raise CheckpointError(
            f"{path}: contradicts itself: its name says step {named}, {MANIFEST} step {manifest.step}, {TRAINER} step "
            f"{step!r}: files of several checkpoints were mixed."
        )
    return state


def newest_checkpoint(
    run_folder: Path, on_bad: Callable[[str], None] = lambda message: None, *, before: Path | None = None
) -> Checkpoint | None:
    """The newest checkpoint of a run that verifies; others are reported through `on_bad` and passed over.

    `before`: only those that are older than this one."""
    with file_errors("looking for checkpoints", run_folder):
        finish_replacing(run_folder)
    found = list_checkpoints(run_folder)
    if before is not None:
        found = found[: found.index(before)] if before in found else []
    elif run_folder.is_dir():
        for path in sorted(set(_step_folders(run_folder)) - set(found)):
            on_bad(f"passing over a damaged checkpoint: {path}: has no {MANIFEST}, so it is not complete.")
    for path in reversed(found):
        try:
            return open_checkpoint(path)
        except CheckpointError as error:
            on_bad(f"passing over a damaged checkpoint: {error}")
    return None

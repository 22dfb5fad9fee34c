"""Checkpoints that survive: written aside, fsynced, renamed; verified on load; rotated without losing the only one.

A checkpoint is `checkpoints/<run>/step-00000123/` with safetensors shards (`model-*` 16-bit weights, `master-*` exact
fp32 weights, `exp_avg-*` and `exp_avg_sq-*` moments, `rng-*` generator states), `trainer.json` (the loop's state) and
`manifest.json` (sizes and CRC-32 of every file), which is written last. Tensors go by parameter name, so any engine,
residency or number of ranks can resume. Cost of a save: one pass over the states; of a load: one for the checksums,
one to read. Anything incomplete is named so that it is never taken for a checkpoint.

A run that goes back to an earlier checkpoint leaves later ones behind, so the newest is not the one of the highest
step: a manifest counts (`order`) when its checkpoint was written or gone back to.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.checkpoint.shards import CheckpointError, crc32_of
from outcore.common.quantities import format_gb
from outcore.optim import state_format

MANIFEST = "manifest.json"
TRAINER = "trainer.json"
FORMAT_VERSION = 1
SPACE_MARGIN_BYTES = 256 << 20
"""Free space that a save leaves on the drive, so that logs can still be written."""
_REPLACED = ".old.part"
_STEP_FOLDER = re.compile(r"step-(\d{8,})$")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint folder."""

    path: Path
    step: int
    manifest: dict[str, Any]

    def trainer_state(self) -> dict[str, Any]:
        """The loop's state as saved."""
        return json.loads((self.path / TRAINER).read_text(encoding="utf-8"))


def step_folder(step: int) -> str:
    """Folder name of a step: step-00000123."""
    return f"step-{step:08d}"


def check_space(folder: Path, needed_bytes: int) -> None:
    """Raise OSError-like CheckpointError when the drive has no room for a save of `needed_bytes`."""
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
) -> Path:
    """Make `run_folder/step-…`: `write(folder, on_file)` fills a folder aside and returns the loop's JSON state.

    `on_file(path, crc32)` tells the checksum of a file just written, so that it need not be read again.
    Called on every rank; only the writer touches manifest and names. After the rename the oldest checkpoints beyond
    `keep` are removed (`rotate`). Any failure leaves the earlier checkpoints as they were and removes the half-written
    folder.
    """
    final = run_folder / step_folder(step)
    aside = run_folder / f".{step_folder(step)}.part"
    if is_writer:
        run_folder.mkdir(parents=True, exist_ok=True)
        sweep_unfinished(run_folder)
        check_space(run_folder, needed_bytes)
        aside.mkdir()
    barrier()
    checksums: dict[Path, int] = {}
    try:
        state = write(aside, checksums.__setitem__)
        barrier()
        if is_writer:
            _write_json(aside / TRAINER, state)
            _write_manifest(aside, step, checksums, _next_order(run_folder))
            _fsync_folder(aside)
            if final.exists():  # a run resumed from an older step comes by again
                os.rename(final, run_folder / f".{final.name}{_REPLACED}")
            os.rename(aside, final)
            _fsync_folder(run_folder)
            sweep_unfinished(run_folder)
            rotate(run_folder, keep, step, best_step)
    except BaseException:
        if is_writer:
            shutil.rmtree(aside, ignore_errors=True)
        raise
    barrier()
    return final


def _write_json(path: Path, value: Any) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _write_manifest(folder: Path, step: int, checksums: dict[Path, int], order: int) -> None:
    files = {
        str(path.relative_to(folder)): {
            "bytes": path.stat().st_size,
            "crc32": checksums[path] if path in checksums else crc32_of(path),
        }
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    _write_json(folder / MANIFEST, {"format_version": FORMAT_VERSION, "step": step, "order": order, "files": files})


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sweep_unfinished(run_folder: Path) -> list[Path]:
    """Remove what an interrupted save left behind; returns the removed folders."""
    finish_replacing(run_folder)
    left = [path for path in run_folder.glob(".step-*.part") if path.is_dir()]
    for path in left:
        shutil.rmtree(path)
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
        _fsync_folder(run_folder)


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Checkpoint folders of a run that carry a manifest, oldest first: before all others those that the run left
    behind when it went back to an earlier one."""
    if not run_folder.is_dir():
        return []
    found = [p for p in run_folder.iterdir() if _STEP_FOLDER.match(p.name) and (p / MANIFEST).is_file()]
    left_behind = _left_behind(found)
    return sorted(found, key=lambda path: (path not in left_behind, _step_of(path)))


def _left_behind(checkpoints: list[Path]) -> set[Path]:
    """Those that one of the same or a lower step came after."""
    orders = {path: order for path in checkpoints if (order := _order_of(path)) is not None}
    left, first_step = set(), math.inf
    for path in sorted(orders, key=lambda path: (orders[path], _step_of(path)), reverse=True):
        if _step_of(path) >= first_step:
            left.add(path)
        first_step = min(first_step, _step_of(path))
    return left


def _step_of(path: Path) -> int:
    return int(path.name.split("-")[1])


def _order_of(path: Path) -> int | None:
    """0: written by an older version, which counted steps only; None: the manifest cannot be read."""
    try:
        return int(json.loads((path / MANIFEST).read_text(encoding="utf-8")).get("order", 0))
    except (OSError, ValueError, TypeError, AttributeError):
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
    aside = checkpoint.path / f".{MANIFEST}.part"
    _write_json(aside, {**checkpoint.manifest, "order": _next_order(run_folder)})
    os.replace(aside, checkpoint.path / MANIFEST)
    _fsync_folder(checkpoint.path)
    return sorted(_left_behind(before) - was_left, key=_step_of)


def rotate(run_folder: Path, keep: int, step: int, best_step: int | None = None) -> list[Path]:
    """Remove the oldest checkpoints beyond `keep`; that of `step`, just saved, and the best are never removed.

    Later ones, which a run that went back has left behind, count as older than all others.
    """
    by_age = sorted(list_checkpoints(run_folder), key=lambda path: _step_of(path) <= step)
    old = [path for path in by_age[: -max(keep, 1)] if _step_of(path) != best_step]
    for path in old:
        # Renamed first: a removal that is interrupted must not leave something that looks like a checkpoint.
        doomed = path.with_name(f".{path.name}.part")
        os.rename(path, doomed)
        shutil.rmtree(doomed)
    return old


def open_checkpoint(path: Path, *, verify: bool = True) -> Checkpoint:
    """A complete checkpoint, every file's size and CRC-32 checked.

    Raises CheckpointError naming the file that is missing, cut short or damaged.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint folder.")
    manifest_path = path / MANIFEST
    if not manifest_path.is_file():
        newest = list_checkpoints(path)
        hint = f" It holds checkpoints, though: use {newest[-1]}." if newest else ""
        raise CheckpointError(f"{path}: has no {MANIFEST}, so it is not a complete checkpoint.{hint}")
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        files, step, version = manifest["files"], int(manifest["step"]), manifest["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{manifest_path}: damaged ({error}).") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path}: has format version {version}; this program reads version {FORMAT_VERSION}.")
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing, though the manifest lists it.")
        if file.stat().st_size != expected["bytes"]:
            raise CheckpointError(
                f"{file}: has {file.stat().st_size} bytes, the manifest says {expected['bytes']}: it was cut short."
            )
        if verify and crc32_of(file) != expected["crc32"]:
            raise CheckpointError(f"{file}: its checksum is wrong: the file was changed or damaged.")
    return Checkpoint(path, step, manifest)


def differences(checkpoint: Checkpoint, fingerprint: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """(what it was, what it is) by name, of what the checkpoint's run had otherwise than `fingerprint` (nested by one
    level). What an older version did not write down is not compared."""
    theirs, mine = (_flat(f) for f in (checkpoint.trainer_state()["fingerprint"], fingerprint))
    return {name: (theirs[name], value) for name, value in mine.items() if theirs.get(name, value) != value}


def check_same_run(checkpoint: Checkpoint, fingerprint: dict[str, Any], allowed: frozenset[str] = frozenset()) -> None:
    """Raise CheckpointError when the checkpoint's run had settings other than `fingerprint` and `allowed`."""
    for name, (was, value) in differences(checkpoint, fingerprint).items():
        if name in allowed:
            continue
        if name == "parameters":
            raise CheckpointError(
                f"{checkpoint.path}: is of another model: it has {was:,} parameters, this run's model {value:,}. "
                "Resume with the model, preset and LoRA settings that it was made with."
            )
        raise CheckpointError(
            f"{checkpoint.path}: was made with {name} {was!r}, this run has {value!r}: it would not continue the same "
            f"training. Use the same {_FLAGS_OF.get(name, '--' + name)}, {_way_on(name)}."
        )


def changed_settings(checkpoint: Checkpoint, settings: dict[str, Any]) -> list[str]:
    """A line for people for each of `settings`, which a run may change on its way, that the checkpoint had otherwise.

    What an older version did not write down is not compared.
    """
    theirs = checkpoint.trainer_state().get("settings", {})
    lines = []
    for name, value in settings.items():
        was = theirs.get(name, value)
        if was == value:
            continue
        line = f"resume: {name} {was} -> {value}: training goes on with {value}"
        if name == "state_format":
            after, before = state_format(value), state_format(was)
            rounded = ["the moments are rounded to 8 bits"] * (after.moments8 and not before.moments8)
            rounded += ["the masters are rounded to 24 bits"] * (after.short_residual and not before.short_residual)
            line += f"; {' and '.join(rounded)} once" if rounded else "; the states are converted exactly"
        lines.append(line)
    return lines


def _way_on(name: str) -> str:
    if name.startswith(("schedule ", "train_batch_size", "seed")):
        return "or add --continue_with_changes to go on with the new value"
    return "or start a new run from the exported model (--model_name_or_path)"


_FLAGS_OF = {
    "train_batch_size": "--per_device_train_batch_size x --gradient_accumulation_steps x processes",
    "schedule kind": "--lr_scheduler_type",
    "schedule peak_lr": "--learning_rate",
    "schedule warmup_steps": "--warmup_steps",
    "schedule total_steps": "--max_steps or --num_train_epochs",
}


def _flat(fingerprint: dict[str, Any]) -> dict[str, Any]:
    """{'schedule': {'total_steps': 5}} as {'schedule total_steps': 5}."""
    flat: dict[str, Any] = {}
    for name, value in fingerprint.items():
        flat.update({f"{name} {k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value})
    return flat


def newest_checkpoint(run_folder: Path, on_bad: Callable[[str], None] = lambda message: None) -> Checkpoint | None:
    """The newest checkpoint of a run that verifies; damaged ones are reported through `on_bad` and passed over."""
    finish_replacing(run_folder)
    for path in reversed(list_checkpoints(run_folder)):
        try:
            return open_checkpoint(path)
        except CheckpointError as error:
            on_bad(f"passing over a damaged checkpoint: {error}")
    return None

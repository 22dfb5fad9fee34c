"""Where a run keeps its things: checkpoints/<run>, logs/<run>, final_model/<run>; and which run a resume means."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outcore.checkpoint.folders import Checkpoint, list_checkpoints, newest_checkpoint, open_checkpoint
from outcore.checkpoint.shards import CheckpointError
from outcore.train.configure.arguments import ConfigError, nearest
from outcore.train.configure.config import TrainConfig


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

    def make(self) -> None:
        """Create the folders. ConfigError when a folder cannot be written."""
        for folder in (self.checkpoints, self.logs, self.export.parent):
            try:
                folder.mkdir(parents=True, exist_ok=True)
                probe = folder / ".writable"
                probe.touch()
                probe.unlink()
            except OSError as error:
                raise ConfigError(
                    f"{folder} cannot be written ({error.strerror}): fix its permissions, or point --checkpoint_dir, "
                    "--log_dir and --export_dir at folders that can."
                ) from error


def default_name(config: TrainConfig) -> str:
    """<model>-<data>, from what the user named: tiny-embedded, Qwen3-4B-notes."""
    model = config.preset or config.model_name_or_path or config.config_file or config.model_module or "tiny"
    parts = [re.split(r"[/\\]", part.rstrip("/\\"))[-1] for part in (model, config.dataset)]
    stems = [re.sub(r"\.(json|jsonl|csv|txt|parquet|py|gz|zst)(:.*)?$", "", part) for part in parts]
    suffix = "-lora" if config.lora_r else ""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(stems) + suffix).strip("-.") or "run"


def folder_of(config: TrainConfig, name: str) -> RunFolder:
    """The folders of the run called `name`."""
    checkpoints, logs, export = (
        Path(p).expanduser() for p in (config.checkpoint_dir, config.log_dir, config.export_dir)
    )
    return RunFolder(name, checkpoints / name, logs / name, export / name)


def _open_wanted(path: Path) -> Checkpoint:
    """The checkpoint that the user named, with a way out when it is none. ConfigError or CheckpointError."""
    if not path.is_dir():
        others = [p.name for p in path.parent.iterdir() if p.is_dir()] if path.parent.is_dir() else []
        what = "is a file: name its folder." if path.is_file() else f"no such folder.{nearest(path.name, others)}"
        raise ConfigError(
            f"--resume_from_checkpoint {path}: {what} A checkpoint is a folder <run>/step-00000123; `auto` takes the "
            "newest one of the run."
        )
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


def _in_use(folder: RunFolder) -> bool:
    return bool(list_checkpoints(folder.checkpoints)) or folder.metrics.exists() or folder.export.exists()


def choose_run(config: TrainConfig, say: Callable[[str], None]) -> tuple[RunFolder, Checkpoint | None]:
    """The run's folders, and the checkpoint to resume from, if any.

    A new run never writes into an older one: without `run_name` it takes the next free number; with one that is in
    use it is refused. `auto` resumes the newest run of the name that has a complete checkpoint.
    Raises ConfigError or CheckpointError with what to do.
    """
    base = config.run_name or default_name(config)
    wanted = config.resume_from_checkpoint
    if wanted == "auto":
        candidates = [base] if config.run_name else _numbered(config, base)
        for name in reversed(candidates):
            folder = folder_of(config, name)
            checkpoint = newest_checkpoint(folder.checkpoints, on_bad=say)
            if checkpoint is not None:
                return folder, checkpoint
        if any(list_checkpoints(folder_of(config, name).checkpoints) for name in candidates):
            raise CheckpointError(
                f"Run {base} has checkpoints, but none of them is whole: see above. Bring one back from a copy, or "
                "start a new run with another --run_name."
            )
        say(f"resume_from_checkpoint auto: run {base} has no checkpoint yet, so it starts from the beginning.")
    elif wanted:
        checkpoint = _open_wanted(Path(wanted).expanduser())
        own = folder_of(config, checkpoint.path.resolve().parent.name)
        folder = folder_of(config, config.run_name or own.name)
        if folder.checkpoints.resolve() != checkpoint.path.resolve().parent and _in_use(folder):
            raise ConfigError(
                f"run {folder.name} is in use, and {checkpoint.path} is not one of its checkpoints: going on from it "
                f"would overwrite that run. Choose another --run_name, or continue {folder.name} with "
                "--resume_from_checkpoint auto."
            )
        return folder, checkpoint
    if config.run_name:
        folder = folder_of(config, config.run_name)
        if _in_use(folder) and wanted is None:
            raise ConfigError(
                f"run_name {config.run_name} is in use. Continue that run with --resume_from_checkpoint auto, or "
                "choose another --run_name."
            )
        return folder, None
    number = 1
    while _in_use(folder_of(config, base if number == 1 else f"{base}-{number}")):
        number += 1
    return folder_of(config, base if number == 1 else f"{base}-{number}"), None


def _numbered(config: TrainConfig, base: str) -> list[str]:
    """Names base, base-2, base-3 ... that exist, in order."""
    root = Path(config.checkpoint_dir).expanduser()
    found = []
    for path in root.glob(f"{base}*") if root.is_dir() else []:
        match = re.fullmatch(re.escape(base) + r"(?:-(\d+))?", path.name)
        if match:
            found.append((int(match.group(1) or 1), path.name))
    return [name for _, name in sorted(found)] or [base]

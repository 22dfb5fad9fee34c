"""`outcore export RUN`: a run's model as a folder that `from_pretrained` loads. Needs no GPU, and the run may have been
interrupted.

    outcore export my-run                  the best checkpoint where the run kept one, else the newest
    outcore export my-run --merge          with LoRA: the base with the adapter in it; also of an exported adapter
    outcore export my-run/step-00000100    that one
    outcore export my-run --gguf q4_k      final_model/my-run, or the folder of another model, as one file for llama.cpp
"""

from __future__ import annotations

from pathlib import Path

from outcore.checkpoint.export import (
    FOLDER,
    export_checkpoint,
    has_adapter,
    how_to_load,
    is_adapter,
    merge_adapter,
    merge_checkpoint,
    model_folder,
)
from outcore.checkpoint.folders import Checkpoint, list_checkpoints, open_checkpoint, step_folder
from outcore.checkpoint.shards import CheckpointError
from outcore.common.output import tell_error
from outcore.common.quantities import format_gb
from outcore.config.commands import export_flags
from outcore.formats.gguf_files import default_file, write_gguf


def find_checkpoint(path: Path, root: Path, *, last: bool = False) -> Checkpoint:
    """The checkpoint at `path`, or of the run whose name or folder it is the best one (with `last` the newest);
    checksums verified. ValueError where there is neither, CheckpointError for one that is damaged."""
    if not path.exists() and (root / path).is_dir():
        path = root / path
    if not path.exists():
        there = sorted(folder.name for folder in root.iterdir() if list_checkpoints(folder)) if root.is_dir() else []
        raise ValueError(f"{path}: no such run or checkpoint. Runs in {root}: {', '.join(there) or 'none'}.")
    found = list_checkpoints(path)
    if not found or (path / "manifest.json").is_file():
        return open_checkpoint(path)
    best = (open_checkpoint(found[-1], verify=False).trainer_state().get("best") or {}).get("step")
    if last or best is None or path / step_folder(best) not in found:
        return open_checkpoint(found[-1])
    return open_checkpoint(path / step_folder(best))


def _has_adapter_alone(run: Path, root: Path) -> bool:
    """True for an exported adapter's folder, and for a run that kept no checkpoint of ours beside its exported adapter:
    none, or a foreign trainer's, which only that reads."""
    ours = any((step / FOLDER).is_dir() for step in list_checkpoints(root / run))
    return not ours and is_adapter(model_folder(run))


def main(argv: list[str] | None = None) -> int:
    """The subcommand; returns its exit code."""
    args = export_flags().parse_args(argv)
    try:
        if args.gguf is not None:
            vain = [f"--{name}" for name in ("checkpoint_dir", "last", "merge", "adapter") if getattr(args, name)]
            if vain:
                raise ValueError(
                    f"{' and '.join(vain)} would do nothing beside --gguf, which packs a whole model's folder. "
                    "Leave it out, or export the checkpoint to a folder first (--out DIR) and then that with --gguf."
                )
            source = model_folder(args.run)
            target = args.out or default_file(source, args.gguf)
            file = write_gguf(source, target, args.gguf, overwrite=args.overwrite)
            print(f"{file}  ({format_gb(file.stat().st_size)})")
            return 0
        if args.overwrite:
            raise ValueError("--overwrite goes with --gguf; no folder is replaced: give another with --out.")
        if args.merge and _has_adapter_alone(args.run, args.checkpoint_dir or Path("checkpoints")):
            adapter = model_folder(args.run)
            folder = merge_adapter(adapter, args.out or Path("final_model") / f"{adapter.absolute().name}-merged")
            print(f"the adapter {adapter}, merged: {folder}  ({how_to_load(folder)})")
            return 0
        checkpoint = find_checkpoint(args.run, args.checkpoint_dir or Path("checkpoints"), last=args.last)
        run = checkpoint.path.absolute().parent.name
        merged = "-merged" if args.merge else ""
        target = args.out or Path("final_model") / f"{run}-step-{checkpoint.step}{merged}"
        if args.adapter and not has_adapter(checkpoint):
            raise ValueError(f"{checkpoint.path}: all weights were trained, there is no adapter. Leave it out.")
        folder = merge_checkpoint(checkpoint, target) if args.merge else export_checkpoint(checkpoint, target)
    except (CheckpointError, ValueError, OSError, RuntimeError) as error:
        return tell_error("export", error)
    print(f"step {checkpoint.step} of run {run}: {folder}  ({how_to_load(folder)})")
    if args.merge and (packed := checkpoint.trainer_state()["fingerprint"].get("quantize", "none")) != "none":
        print(
            f"the adapter was trained over a base in {packed} and is merged into the base as published; what the run "
            "itself merges at its end (--lora_export merged) has the base that it was trained over"
        )
    return 0

"""`outcore export CHECKPOINT`: a checkpoint as a folder that `from_pretrained` loads. Needs no GPU and no run."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from outcore.checkpoint.export import export_checkpoint, how_to_load
from outcore.checkpoint.folders import Checkpoint, list_checkpoints, open_checkpoint
from outcore.checkpoint.shards import CheckpointError


def find_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at `path`, or the newest one of the run whose folder it is; checksums verified."""
    found = list_checkpoints(path)
    return open_checkpoint(found[-1] if found and not (path / "manifest.json").is_file() else path)


def main(argv: list[str] | None = None) -> int:
    """The subcommand; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="outcore export",
        description="Write a checkpoint's 16-bit model (a LoRA checkpoint's adapter) for from_pretrained.",
    )
    parser.add_argument("checkpoint", type=Path, help="checkpoints/RUN/step-..., or checkpoints/RUN for its newest")
    parser.add_argument("--out", type=Path, help="new folder (default: final_model/RUN-STEP)")
    args = parser.parse_args(argv)
    try:
        checkpoint = find_checkpoint(args.checkpoint)
        run = checkpoint.path.absolute().parent.name
        target = args.out or Path("final_model") / f"{run}-step-{checkpoint.step}"
        folder = export_checkpoint(checkpoint, target)
    except (CheckpointError, OSError) as error:
        print(f"outcore export: {error}", file=sys.stderr)
        return 1
    print(f"step {checkpoint.step} of run {run}: {folder}  ({how_to_load(folder)})")
    return 0

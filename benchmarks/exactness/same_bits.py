"""Digests of short runs of both engines, to see that a change of the code changes no bit.

    python benchmarks/exactness/same_bits.py            (in each of two working trees; equal lines: equal bits)

A run of a tiny preset on the CPU a line: the losses and every tensor of the checkpoint's shards. About 15 s a run.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMON = "--preset tiny --max_steps 3 --seq_length 64 --eval_strategy no --export false"
RUNS = {
    "stream": "--engine stream",
    "stream clip 8-bit": "--engine stream --max_grad_norm 0.5 --state_format split8 --precision bf16",
    "stream tiles": "--engine stream --tiling on --max_grad_norm 0",
    "stream drive": "--engine stream --nvme_offload_path {folder}/nvme --ram_budget_gib 0",
    "stream lora": "--engine stream --lora_r 4",
    "deepspeed": "--engine deepspeed",
    "deepspeed staged": "--engine deepspeed --zero_stage infinity --nvme_offload_path {folder}/nvme --precision bf16",
}


def digest(folder: Path, flags: str) -> str:
    """One run in a folder of its own; the first 16 digits of what it computed."""
    where = f"--run_name same --checkpoint_dir {folder}/c --log_dir {folder}/l --export_dir {folder}/o"
    command = [sys.executable, "train_model.py", *f"{COMMON} {where} {flags}".format(folder=folder).split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        return f"exit code {done.returncode}: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
    lines = [json.loads(line) for line in (folder / "l/same/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = hashlib.sha256(repr([(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]).encode())
    for shard in sorted((folder / "c/same").glob("step-*/*.safetensors")):
        found.update(shard.name.encode() + shard.read_bytes())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    for name, flags in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "nvme").mkdir()
            print(f"{name}: {digest(Path(folder), flags)}", flush=True)

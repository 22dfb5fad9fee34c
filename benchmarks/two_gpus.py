"""Two GPUs against one: the same losses for the same global batch, and each rank its half of the drive's bytes.

    python benchmarks/two_gpus.py --preset llama-1b --nvme /nvme --out two_gpus.json          (two GPUs)
    python benchmarks/two_gpus.py --preset tiny --nvme /tmp/x --steps 4 --seq_length 64 --micro_batch 4   (dry run, CPU)

Both runs are `deepspeed --num_gpus=N train_model.py` with parameters, optimizer states, everything on NVMe. Bytes of a
rank are those that its process moved (/proc/PID/io: what reached the drive, not the page cache) between two steps of
metrics.jsonl. Exit code 1 when a loss differs by more than --tolerance, or a rank's bytes are not within 5 % of half of
what one GPU's process moved.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from zero_stages import command, read

ROOT = Path(__file__).resolve().parents[1]
SETTING, POLL_S, TIMEOUT_S = "infinity-nvme", 0.02, 600.0


def ranks_below(parent: int) -> dict[int, int]:
    """Local rank -> process, of the training processes that descend from `parent`."""
    parents, found = {}, {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (OSError, IndexError, ValueError):
            continue
    for pid in parents:
        above = pid
        while above in parents and above != parent:
            above = parents[above]
        if above != parent or pid == parent:
            continue
        try:
            words = (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0")
            is_training = b"train_model.py" in (Path("/proc") / str(pid) / "cmdline").read_bytes()
        except OSError:
            continue
        rank = next((int(word[11:]) for word in words if word.startswith(b"LOCAL_RANK=")), None)
        if rank is not None and is_training and rank not in found:
            found[rank] = pid
    return found


def drive_bytes_of(pid: int) -> int:
    """That the process has read from and written to drives."""
    fields = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(fields["read_bytes"]) + int(fields["write_bytes"])


def measure(num_gpus: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run: losses, seconds, and drive bytes of a step by rank."""
    folder.mkdir()
    argv = [*command(SETTING, argparse.Namespace(**{**vars(args), "num_gpus": num_gpus}), folder, 29600 + num_gpus)]
    argv += ["--max_in_cpu_gb", "0"]
    metrics, seen = folder / "logs" / SETTING / "metrics.jsonl", {}
    begin_s = time.monotonic()
    with open(folder / "log", "w") as log, subprocess.Popen(argv, cwd=ROOT, stdout=log, stderr=log) as run:
        while run.poll() is None:
            if time.monotonic() - begin_s > TIMEOUT_S:
                run.kill()
            text = metrics.read_text() if metrics.exists() else ""
            steps = sum('"event"' not in line for line in text.splitlines())
            if steps and steps not in seen:
                try:
                    seen[steps] = {rank: drive_bytes_of(pid) for rank, pid in ranks_below(run.pid).items()}
                except OSError:  # it has just ended
                    break
            time.sleep(POLL_S)
    if run.returncode:
        raise SystemExit(f"{num_gpus} GPU(s) failed ({run.returncode}):\n{(folder / 'log').read_text()[-4000:]}")
    first, last = min(s for s in seen if s > args.warm), max(s for s in seen if len(seen[s]) == num_gpus)
    per_step = {rank: (seen[last][rank] - seen[first][rank]) / (last - first) for rank in seen[last]}
    return {**read(folder, SETTING), "num_gpus": num_gpus, "drive_bytes_per_step_by_rank": per_step}


def main() -> int:
    """Both runs and the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-1b")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--seq_length", type=int, default=1024)
    parser.add_argument("--micro_batch", type=int, default=8, help="rows of a step over all GPUs")
    parser.add_argument("--nvme", type=Path, required=True)
    parser.add_argument("--tolerance", type=float, default=0.005, help="largest relative difference of a loss")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.accumulation = 1
    with tempfile.TemporaryDirectory() as temporary:
        one, two = (measure(n, args, Path(temporary) / str(n)) for n in (1, 2))
    off = max(abs(a - b) / a for a, b in zip(one["losses"], two["losses"], strict=True))
    whole = one["drive_bytes_per_step_by_rank"][0]
    shares = [two["drive_bytes_per_step_by_rank"][rank] / whole for rank in (0, 1)] if whole else []
    for result in (one, two):
        moved = ", ".join(f"{b / 1e9:.2f}" for b in result["drive_bytes_per_step_by_rank"].values())
        print(f"{result['num_gpus']} GPU(s): {result['median_step_s']:.2f} s a step, drive GB a step by rank: {moved}")
    print(f"largest relative difference of a loss {off:.3%}; ranks' shares of one GPU's bytes {shares}")
    if args.out:
        settings = {key: str(value) for key, value in vars(args).items()}
        args.out.write_text(json.dumps({"settings": settings, "one": one, "two": two}, indent=1))
    return 0 if off <= args.tolerance and shares and all(abs(share - 0.5) <= 0.025 for share in shares) else 1


if __name__ == "__main__":
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sys.exit(main())

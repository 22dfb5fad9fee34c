"""The same model and data through stage none, ZeRO-3 in RAM, ZeRO-Infinity on NVMe, streaming: losses and speed.

    python benchmarks/zero_stages.py --preset llama-1b --steps 20 --nvme /nvme --out results.json
    python benchmarks/zero_stages.py --preset llama-1b --steps 20 --nvme /nvme --num_gpus 2 --out results2.json

Each setting is a real `deepspeed --num_gpus=N train_model.py` from the same seed. `--together` runs
the settings at the same time on the same GPUs: for comparing losses, not speeds. Prints seconds per step (median after
the first two), peak GPU memory of the allocator, RSS, drive bytes per step, and the largest relative difference of the
loss to the first setting over all steps. Exit code 1 when a run failed or a loss differs by more than --tolerance.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {
    "none": ["--engine", "deepspeed", "--zero_stage", "none"],
    "zero3-ram": ["--engine", "deepspeed", "--zero_stage", "zero3", "--offload_optimizer", "cpu"],
    "infinity-nvme": ["--engine", "deepspeed", "--zero_stage", "infinity"],
    "stream-ram": ["--engine", "stream"],
}
DEFAULT_SETTINGS = "none,zero3-ram,infinity-nvme"


def command(name: str, args: argparse.Namespace, folder: Path, port: int) -> list[str]:
    """The training command of one setting."""
    run = ["deepspeed", f"--num_gpus={args.num_gpus}", f"--master_port={port}", "train_model.py"]
    run += ["--preset", args.preset, "--seq_length", str(args.seq_length), "--max_steps", str(args.steps)]
    run += ["--per_device_train_batch_size", str(args.micro_batch // args.num_gpus)]
    run += [
        "--gradient_accumulation_steps",
        str(args.accumulation),
        "--lr",
        "3e-4",
        "--warmup_steps",
        str(min(5, args.steps)),
    ]
    run += ["--eval_steps", "0", "--max_eval_samples", "8", "--sample_tokens", "0", "--save_strategy", "no"]
    run += ["--no_export", "--report_to", "none", "--run_name", name, "--log_dir", str(folder / "logs")]
    run += ["--checkpoint_dir", str(folder / "checkpoints"), "--export_dir", str(folder / "export")]
    run += SETTINGS[name]
    if name == "infinity-nvme":
        run += ["--nvme_offload_path", str(args.nvme), "--strict_offload"]
    return run


def read(folder: Path, name: str) -> dict:
    """Losses and medians of a finished run, from its metrics.jsonl."""
    lines = [json.loads(line) for line in (folder / "logs" / name / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    late = steps[2:] or steps
    result = {"losses": [line["loss"] for line in steps], "grad_norms": [line["grad_norm"] for line in steps]}
    result["eval_loss"] = [line["eval_loss"] for line in lines if line.get("event") == "eval"]
    for key in ("step_s", "gpu_mem_peak_bytes", "ram_rss_bytes", "nvme_read_bytes", "nvme_write_bytes", "tokens_per_s"):
        values = [line[key] for line in late if line[key] is not None]
        result[f"median_{key}"] = statistics.median(values) if values else None
    return result


def main() -> int:
    """Run the settings and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-1b")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seq_length", type=int, default=1024)
    parser.add_argument("--micro_batch", type=int, default=4, help="rows per micro-batch over all GPUs")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--num_gpus", type=int, default=1)
    parser.add_argument("--nvme", type=Path, default=Path("nvme"))
    parser.add_argument("--only", default=DEFAULT_SETTINGS, help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--tolerance", type=float, default=0.005, help="largest relative difference of a loss")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    names = args.only.split(",")
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        running: dict[str, subprocess.Popen] = {}
        for number, name in enumerate(names):
            log = open(folder / f"{name}.log", "w")  # noqa: SIM115  # lives as long as the child
            print(f"running {name}", flush=True)
            running[name] = subprocess.Popen(
                command(name, args, folder, 29600 + number),
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ,
            )
            if not args.together:
                running[name].wait()
        failed = [name for name, child in running.items() if child.wait() != 0]
        for name in failed:
            print(f"--- {name} failed:\n" + (folder / f"{name}.log").read_text()[-3000:])
        results = {name: read(folder, name) for name in names if name not in failed}
    if not results:
        return 1
    first = next(iter(results))
    print(
        f"\n{args.preset}, {args.num_gpus} GPU(s), {args.micro_batch * args.accumulation * args.seq_length} tokens/step"
    )
    header = ("s/step", "peak GPU GiB", "RSS GiB", "read GB", "write GB", "loss diff")
    print(f"{'setting':14}" + "".join(f"{title:>13}" for title in header))
    worst = 0.0
    for name, result in results.items():
        pairs = zip(result["losses"], results[first]["losses"], strict=True)
        difference = max(abs(a - b) / b for a, b in pairs)
        result["max_relative_loss_difference"] = difference
        worst = max(worst, difference)
        row = [result[f"median_{k}_bytes"] or 0 for k in ("gpu_mem_peak", "ram_rss", "nvme_read", "nvme_write")]
        cells = [f"{result['median_step_s']:.2f}", f"{row[0] / 2**30:.2f}", f"{row[1] / 2**30:.1f}"]
        cells += [f"{row[2] / 1e9:.1f}", f"{row[3] / 1e9:.1f}", f"{difference:.2%}"]
        losses = f"   loss {result['losses'][0]:.3f} -> {result['losses'][-1]:.3f}"
        print(f"{name:14}" + "".join(f"{cell:>13}" for cell in cells) + losses)
    if args.out:
        settings = {k: str(v) for k, v in vars(args).items()}
        args.out.write_text(json.dumps({"settings": settings, "results": results}, indent=1))
    return 1 if failed or worst > args.tolerance else 0


if __name__ == "__main__":
    sys.exit(main())

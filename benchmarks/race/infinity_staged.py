"""ZeRO-Infinity through DeepSpeed's own offload and through outcore's staged one: seconds, drive bytes, memory, losses.

    python benchmarks/race/infinity_staged.py --nvme /mnt/nvme --out staged.json                  (all, 20-30 minutes)
    python benchmarks/race/infinity_staged.py --nvme /mnt/nvme --only ours-all,stock-all --out a.json (a part of it)
    python benchmarks/race/infinity_staged.py --nvme /mnt/nvme --deterministic --only ours-ram,ours-opt,ours-all  (bits)
    python benchmarks/race/infinity_staged.py --table a.json,b.json         (no run: a Markdown table of those results)
    python benchmarks/race/infinity_staged.py --nvme /tmp/x --preset tiny --cpu --seq_length 64 --micro_batch 2 \
        --steps 2 --only ours-ram,ours-opt,ours-all                                    (dry run without a GPU)

Every variant is a process of its own with the same model, tokens and seed: llama-1b, 16,384 tokens a step, torch's
allocator capped at 6.5 GiB. `-ram`: everything in RAM; `-opt`: optimizer states on NVMe, parameters in RAM; `-all`:
both on NVMe. `ours-*` keeps the lossless split master (10 B per parameter), `ours-*-fp32` plain fp32 states (12 B),
`ours-*-little` has as much staging memory as a ring of 1 GiB needs instead of what a run takes by itself, so that less
stays in the ring from one update to the next; with `ours-all-gradients` the gradients live on NVMe as well;
`ours-all-lean` keeps no weight on the GPU longer than it is used, as stock must with parameters on NVMe.
Stock DeepSpeed runs with the swap sizes of outcore's builder, which do not crash, and the drive settings of its tuner
on the measured machine (queue depth 32, 8 threads); `stock-ram-sg3e7` with the sub-group size that was best in
`stream_race.py --group sweep`. Ratios are to the fastest stock of a residency.

Drive bytes are the block device's, of all processes; they are compared with the drive's mixed rate, taken right before
and right after each variant of ours (`drive_rate.py`). A variant's row is printed when it is over, the table with the
acceptance figures that the variants at hand allow at the end, also when SIGTERM ends the benchmark. Exit code 1 when a
variant failed.

On a GPU kernels add up in any order: the same variant run twice differs in the fifth digit of a loss. `--deterministic`
trains as `train_model.py --deterministic` does, in a fixed order; only then losses of ours are compared bit by bit, and
a bit that differs gives exit code 1. It costs speed, so seconds are taken without it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from drive_rate import RatesAround
from staged_table import header, markdown, report, row

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TUNED_AIO = {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 8}
ZERO = {
    "ram": {"zero_stage": "zero3"},
    "opt": {"zero_stage": "infinity", "nvme_offload_params": False},
    "all": {"zero_stage": "infinity", "max_in_cpu_gb": 0.0},
}
LITTLE_STAGING_BYTES = {"opt": 1024 << 20, "all": 2464 << 20}
"""For a ring of 1 GiB and, with parameters on NVMe, what these need of llama-1b."""
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"stock-{where}": {"where": where, "outcore": {"offload": "stock"}} for where in ZERO},
    "stock-ram-sg3e7": {"where": "ram", "outcore": {"offload": "stock"}, "zero": {"sub_group_size": 30_000_000}},
    **{f"ours-{where}": {"where": where, "outcore": {"state_format": "split"}} for where in ZERO},
    **{f"ours-{where}-fp32": {"where": where, "outcore": {"state_format": "fp32"}} for where in ZERO},
    "ours-all-gradients": {"where": "all", "outcore": {"state_format": "split", "nvme_offload_gradients": True}},
    "ours-all-lean": {
        "where": "all",
        "outcore": {"state_format": "split"},
        "zero": {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0},
    },
    **{
        f"ours-{where}-little": {"where": where, "outcore": {"state_format": "split", "staging_bytes": n_bytes}}
        for where, n_bytes in LITTLE_STAGING_BYTES.items()
    },
}
COMPARED = (
    "preset", "seq_length", "micro_batch", "accumulation", "warm", "steps", "cap_gib", "cpu", "deterministic",
)  # fmt: skip
"""Settings that results in one table have in common."""
RATES = "rates"
"""Subfolder for measuring the drive's rate."""
TIMEOUT_S = 900


def train(options: dict[str, Any]) -> dict[str, Any]:
    """Child: a variant's seconds per step, phases, drive bytes, memory and losses."""
    sys.path.insert(0, str(ROOT))
    import torch
    from race_common import DeviceWatch, cap_allocator, drive_bytes, rss_bytes, synchronize

    from outcore.config import ProcessFacts, TrainConfig, resolve, understand
    from outcore.engine.deepspeed.build import build_engine, init_process_group
    from outcore.engine.deepspeed.build import resolve as decide
    from outcore.engine.deepspeed.settings import RunFacts
    from outcore.machine.host import detect_ram
    from outcore.model import ModelSettings
    from outcore.train.process.random_state import fix_order

    if options["deterministic"]:
        fix_order()
    has_cuda = not options["cpu"]
    watch = DeviceWatch() if has_cuda else None  # before anything of this process is on the device
    init_process_group(has_cuda, 0)
    if has_cuda:
        cap_allocator(options["cap_gib"])
    model = ModelSettings(
        preset=options["preset"], precision="bf16", seq_length=options["seq_length"], gradient_checkpointing=True
    )
    zero = dict(ZERO[options["where"]])
    if options["where"] != "ram":
        zero |= {"nvme_offload_path": options["nvme"], "strict_offload": True}
    run = RunFacts(
        device="cuda" if has_cuda else "cpu", ram_available_bytes=detect_ram(Path("/")).available_bytes
    )  # fmt: skip
    said = TrainConfig(
        per_device_train_batch_size=options["micro_batch"], gradient_accumulation_steps=options["accumulation"],
        learning_rate=1e-4, max_grad_norm=1.0, **zero,
    )  # fmt: skip
    config = {"aio": TUNED_AIO, "outcore": options["outcore"], "zero_optimization": {"overlap_comm": True}}
    config["zero_optimization"] |= options.get("zero", {})
    resolved, _ = decide(resolve(said, understand(config), ProcessFacts("bf16")), model, run, None)
    engine = build_engine(resolved, model, None, say=lambda line: print(line, flush=True))
    generator = torch.Generator().manual_seed(0)
    shape = (options["micro_batch"], options["seq_length"])

    def batches() -> list:
        rows = [torch.randint(0, 4096, shape, generator=generator) for _ in range(options["accumulation"])]
        return [{"input_ids": ids, "labels": ids.clone()} for ids in rows]

    times, losses, phases = [], [], []
    for _ in range(options["warm"]):
        losses.append(engine.train_step(batches(), 1e-4).loss)
        print(f"warm-up step: loss {losses[-1]:.5f}", flush=True)
    if watch is not None:
        torch.cuda.reset_peak_memory_stats()
        watch.restart()
    before, begin_s = drive_bytes(options["nvme"]), time.perf_counter()
    for _ in range(options["steps"]):
        synchronize()
        start_s = time.perf_counter()
        result = engine.train_step(batches(), 1e-4)
        synchronize()
        times.append(time.perf_counter() - start_s)
        losses.append(result.loss)
        phases.append(result.phase_s)
        print(f"step: {times[-1]:.3f} s, loss {losses[-1]:.5f}", flush=True)
    after, timed_s = drive_bytes(options["nvme"]), time.perf_counter() - begin_s
    params = engine.loaded.facts.trainable_params
    found = {
        "step_s": statistics.median(times), "times_s": times, "losses": losses, "params": params,
        "phase_s": {name: statistics.median(p.get(name, 0.0) for p in phases) for name in phases[0]},
        "rss": rss_bytes(), "versions": {"torch": torch.__version__},
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }  # fmt: skip
    if before and after:
        moved = {kind: (after[kind] - before[kind]) / options["steps"] for kind in after}
        found |= {"drive_bytes": moved, "drive_bytes_per_param": sum(moved.values()) / params}
        found["drive_bytes_per_s"] = sum(moved.values()) * options["steps"] / timed_s
    if watch is not None:
        found |= {"gpu_peak_bytes": torch.cuda.max_memory_reserved(), "gpu_driver_bytes": watch.stop()}
        found["gpu_tensor_bytes"] = torch.cuda.max_memory_allocated()
    engine.close()
    return found


def run_child(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One variant in a process of its own; {"error": ...} when it failed."""
    options = {
        "preset": args.preset, "seq_length": args.seq_length, "micro_batch": args.micro_batch, "cpu": args.cpu,
        "accumulation": args.accumulation, "warm": args.warm, "steps": args.steps, "cap_gib": args.cap_gib,
        "deterministic": args.deterministic, "nvme": str(args.nvme / name), **VARIANTS[name],
    }  # fmt: skip
    Path(options["nvme"]).mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(Path(__file__).resolve()), "--child", name, json.dumps(options)]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=TIMEOUT_S, env=os.environ)
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace")
        return {"error": f"not finished after {TIMEOUT_S} s:\n{said[-3000:]}"}
    finally:
        shutil.rmtree(options["nvme"], ignore_errors=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        return {"error": (done.stdout + done.stderr)[-3000:]}
    return json.loads(lines[-1].removeprefix("RESULT "))


def write(results: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    """What there is so far into --out, which is whole at any moment."""
    if args.out:
        settings = {key: str(value) for key, value in vars(args).items()}
        aside = args.out.with_name(f"{args.out.name}.part")
        aside.write_text(json.dumps({"settings": settings, "results": results}, indent=1))
        aside.replace(args.out)


def end_by_signal(number: int, _: Any) -> None:
    """As an exception, once, so that children are ended, the drive is cleared and the table is printed."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    task = made.add_mutually_exclusive_group(required=True)
    task.add_argument("--nvme", type=Path, help="folder on the drive; subfolders are made and removed")
    task.add_argument(
        "--table", metavar="FILES", help="print results as Markdown, with commas between files; run nothing"
    )
    made.add_argument("--only", help=f"of {', '.join(VARIANTS)}")
    made.add_argument("--preset", default="llama-1b")
    made.add_argument("--seq_length", type=int, default=1024)
    made.add_argument("--micro_batch", type=int, default=16)
    made.add_argument("--accumulation", type=int, default=1)
    made.add_argument("--warm", type=int, default=2)
    made.add_argument("--steps", type=int, default=4)
    made.add_argument("--cap_gib", type=float, default=6.5)
    made.add_argument("--rate_seconds", type=float, default=4.0, help="of each measurement of the drive's rate")
    made.add_argument("--cpu", action="store_true", help="no GPU: a dry run of the same code")
    made.add_argument("--deterministic", action="store_true", help="fixed order of sums; compare bits of ours")
    made.add_argument("--out", type=Path, help="raw results as JSON; results of an earlier part in it are kept")
    return made


def main() -> int:
    """Run the variants and print what they say."""
    if len(sys.argv) > 1 and sys.argv[1] == "--child":
        options = json.loads(sys.argv[3])
        print("RESULT " + json.dumps(train(options)), flush=True)
        return 0
    command = parser()
    args = command.parse_args()
    if args.table:
        print(markdown([Path(file) for file in args.table.split(",")]))
        return 0
    names = args.only.split(",") if args.only else list(VARIANTS)
    unknown = set(names) - set(VARIANTS)
    if unknown:
        command.error(f"unknown variants: {', '.join(sorted(unknown))}")
    results: dict[str, dict[str, Any]] = {}
    rates = RatesAround(args.nvme / RATES, args.rate_seconds)
    if args.out and args.out.exists():
        kept = json.loads(args.out.read_text())
        other = [key for key in COMPARED if kept["settings"].get(key, "False") != str(getattr(args, key))]
        if other:
            command.error(f"{args.out} has results with another {', '.join(other)}: they cannot be compared")
        results = kept["results"]
    signal.signal(signal.SIGTERM, end_by_signal)
    print(header(), flush=True)
    try:
        for name in names:
            on_nvme = name.startswith("ours-") and VARIANTS[name]["where"] != "ram"
            rates.before() if on_nvme else rates.forget()
            results[name] = run_child(name, args)
            print(row(name, results[name]), flush=True)
            write(results, args)
            if on_nvme:
                results[name]["drive_rates_bytes_per_s"] = rates.after()
                write(results, args)
    finally:
        shutil.rmtree(args.nvme / RATES, ignore_errors=True)
        same = report(results)
    return 0 if same and not any("error" in r for r in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

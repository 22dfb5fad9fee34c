"""How far the planner's forecast is from the run: memory, drive bytes and step time of real short runs, 8 GB of VRAM.

    python benchmarks/plan/plan_vs_measured.py --nvme /nvme --out results/            (about 6 minutes on one H200)
    python benchmarks/plan/plan_vs_measured.py --only s-1.2b-fp32,d-0.4b-ram          (parts; --list names them)
    python benchmarks/plan/plan_vs_measured.py --only d-2.9b-budget --steps 3 --warmup 1 --run_limit_s 220
        (half a minute a step on a drive of 2.3 GB/s; takes 32 GB of the drive, which must have 44 GB free)
    python benchmarks/plan/plan_vs_measured.py --dry-run                              (tiny shapes, CPU, minutes)
    python benchmarks/plan/plan_vs_measured.py --again plan_vs_measured.json          (no run: today's planner)

Each run is `train_model.py` in a process of its own, its allocator capped at 8 GB. The forecast is the one that the run
wrote into its plan.json, made with the machine profile that `gds_optimizer.py --quick` measures at the start. Measured:
process memory as the driver sees it (used by the device, less what was used before), the allocator's peak, resident
memory of the process, drive bytes of the block device, seconds per step (medians after --warmup steps). A line per run
says how much of the drive it took at most, with all its files, and how its resident memory compares with its budget.
Writes plan_vs_measured.json and .md. Exit code 1 when a run failed. --again asks today's planner about the runs of such
a file, same settings and machine, and writes FILE-again.md: constants were fitted to those runs, so it is no forecast.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from plan_runs import DEFAULT, RUNS, PlannedRun, config_of
from plan_table import compare, markdown

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
CAP_BYTES = 8 * 10**9
POLL_S = 0.05


def child(cap_bytes: int, report: Path, argv: list[str]) -> int:
    """Cap the allocator, become train_model.py, and leave what the allocator held."""
    import torch

    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, cap_bytes / total))
    sys.argv = [str(ROOT / "train_model.py"), *argv]
    code = 1
    try:
        runpy.run_path(str(ROOT / "train_model.py"), run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        held = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
        report.write_text(json.dumps({"reserved_bytes": held}))
    return code


class Watch(threading.Thread):
    """Highest resident memory of one process, highest use of the GPU and of `drive`, looked at every POLL_S.

    Until `metrics` has a step, resident memory counts as loading's: random weights are made in fp32, a layer or an
    embedding at a time, which no run over weights from files does and no forecast counts.
    """

    def __init__(self, pid: int, gpu: GpuMemory, gpu_before_bytes: int | None, drive: Path, metrics: Path) -> None:
        super().__init__(daemon=True)
        self.metrics, self.loading_rss_bytes = metrics, 0
        self.pid, self.gpu, self.before, self.drive = pid, gpu, gpu_before_bytes, drive
        self.free_before_bytes = shutil.disk_usage(drive).free
        self.drive_bytes = 0
        self.rss_bytes = 0
        self.gpu_bytes = 0
        self.over = threading.Event()

    def run(self) -> None:
        while not self.over.wait(POLL_S):
            try:
                pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
                rss_bytes = pages * os.sysconf("SC_PAGE_SIZE")
                if self.rss_bytes or _has_stepped(self.metrics):
                    self.rss_bytes = max(self.rss_bytes, rss_bytes)
                else:
                    self.loading_rss_bytes = max(self.loading_rss_bytes, rss_bytes)
            except (OSError, IndexError):
                pass
            self.drive_bytes = max(self.drive_bytes, self.free_before_bytes - shutil.disk_usage(self.drive).free)
            used = self.gpu.used_bytes()
            if used is not None and self.before is not None:
                self.gpu_bytes = max(self.gpu_bytes, used - self.before)


def _has_stepped(metrics: Path) -> bool:
    return metrics.exists() and any('"event"' not in line for line in metrics.read_text().splitlines())


class GpuMemory:
    """Memory in use on the first GPU by all processes; None without one."""

    def __init__(self) -> None:
        self._read: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]  # NVML numbers the hidden ones too
            handle = pynvml.nvmlDeviceGetHandleByIndex(int(first or 0))
            self._read = lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
        except Exception:  # no library, no driver, no GPU: each has an error of its own
            return

    def used_bytes(self) -> int | None:
        return None if self._read is None else self._read()


def flags_of(run: PlannedRun, args: argparse.Namespace, folder: Path) -> list[str]:
    """train_model.py's flags of one run."""
    config = folder / f"{run.shape}.json"
    config.write_text(json.dumps(config_of(run.shape, tiny=args.dry_run)))
    seq_length = 64 if args.dry_run else run.seq_length
    flags = ["--config_file", str(config), "--seq_length", str(seq_length), "--max_steps", str(args.steps)]
    flags += ["--per_device_train_batch_size", str(run.micro_batch)]
    flags += ["--gradient_accumulation_steps", str(run.accumulation), "--lr", "1e-4", "--precision", "bf16"]
    flags += ["--max_train_samples", "400", "--max_eval_samples", "4", "--eval_steps", "0", "--sample_tokens", "0"]
    flags += ["--save_strategy", "no", "--no_export", "--report_to", "none", "--run_name", run.name]
    flags += [f"--{kind}_dir={folder / kind}" for kind in ("log", "checkpoint", "export")]
    flags += [f"--data_cache_dir={folder / 'cache'}", *run.flags]
    if args.dry_run and "--ram_budget_gib" in run.flags:
        flags += ["--ram_budget_gib", "0.63"]  # less than Python, torch and a tiny model, so that its states leave RAM
    if run.uses_nvme:
        flags += ["--nvme_offload_path", str(args.nvme)]
    return flags


def measure(run: PlannedRun, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run in its own process: flags, forecast, figures."""
    report, log = folder / f"{run.name}.held.json", folder / f"{run.name}.log"
    argv = flags_of(run, args, folder)
    gpu = GpuMemory()
    before = gpu.used_bytes()
    started_s = time.monotonic()
    with open(log, "w") as sink:
        process = subprocess.Popen(
            [sys.executable, __file__, "--child", str(CAP_BYTES), str(report), "--", *argv],
            cwd=ROOT,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
        watch = Watch(process.pid, gpu, before, args.nvme, folder / "log" / run.name / "metrics.jsonl")
        watch.start()
        try:
            code = process.wait(timeout=args.run_limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            shutil.rmtree(args.nvme / run.name, ignore_errors=True)  # what it had no time to remove
            code = 124
        watch.over.set()
        watch.join()
    result: dict[str, Any] = {"name": run.name, "argv": argv, "rc": code, "wall_s": time.monotonic() - started_s}
    if code:
        print(f"--- {run.name} failed ({code}):\n{log.read_text()[-3000:]}", flush=True)
        return {**result, "log": log.read_text()[-6000:]}
    logs = folder / "log" / run.name
    lines = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
    taken = [line for line in lines if "event" not in line]
    late = taken[args.warmup :]
    plan = json.loads((logs / "plan.json").read_text())

    def median(key: str) -> float | None:
        values = [line[key] for line in late if line.get(key) is not None]
        return statistics.median(values) if values else None

    phases = sorted({name for line in late for name in line["phase_s"]})
    result["forecast"] = plan["forecast"]
    result["said"] = [line for line in plan["said"] if line.startswith("engine")]
    result["measured"] = {
        "driver_vram_bytes": watch.gpu_bytes if before is not None else None,
        "allocator_peak_bytes": max((line["gpu_mem_peak_bytes"] or 0 for line in taken), default=0) or None,
        "reserved_bytes": json.loads(report.read_text())["reserved_bytes"] or None,
        "rss_bytes": watch.rss_bytes,
        "loading_rss_bytes": watch.loading_rss_bytes,
        "drive_peak_bytes": watch.drive_bytes,
        "rss_with_children_bytes": median("ram_rss_bytes"),
        "step_s": median("step_s"),
        "drive_read_bytes": statistics.fmean(line["nvme_read_bytes"] or 0 for line in late),
        "drive_write_bytes": statistics.fmean(line["nvme_write_bytes"] or 0 for line in late),
        "phase_s": {name: statistics.median(line["phase_s"].get(name, 0.0) for line in late) for name in phases},
        "all_step_s": [line["step_s"] for line in taken],
    }
    return result


def words_of(result: dict[str, Any]) -> str:
    """One line about a run that is over."""
    words = f"{result['name']}: {result['wall_s']:.0f} s, exit {result['rc']}"
    if result["rc"]:
        return words
    rss_gib, argv = result["measured"]["rss_bytes"] / 2**30, result["argv"]
    words += f", drive {result['measured']['drive_peak_bytes'] / 1e9:.1f} GB at most, RSS {rss_gib:.2f} GiB"
    if "--ram_budget_gib" in argv:
        budget_gib = float(argv[len(argv) - argv[::-1].index("--ram_budget_gib")])
        words += f" with a budget of {budget_gib:g} GiB ({rss_gib / budget_gib - 1:+.1%})"
    return words


def measure_profile(args: argparse.Namespace) -> dict[str, Any] | None:
    """logs/machine_profile.json, measured now; its links."""
    command = [sys.executable, str(ROOT / "gds_optimizer.py"), "--quick"]
    command += ["--path", str(args.nvme)]
    print("measuring the machine", flush=True)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        print(f"gds_optimizer.py failed ({done.returncode}): {done.stderr[-2000:]}", flush=True)
        return None
    return json.loads((ROOT / "logs" / "machine_profile.json").read_text())["links"]


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names, with commas; 'all' for every one")
    parser.add_argument("--again", type=Path, metavar="FILE", help="results of before: plan them anew, run nothing")
    parser.add_argument("--note", default="", help="with --again: a line below the table, such as what changed since")
    parser.add_argument("--list", action="store_true", help="the runs and their flags")
    parser.add_argument("--nvme", type=Path, default=ROOT / "nvme", help="folder on the drive for states")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="where the tables go")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--time_limit_s", type=float, default=520, help="no run is started after it")
    parser.add_argument("--run_limit_s", type=float, default=200, help="a run that takes longer is ended")
    parser.add_argument("--no_profile", action="store_true", help="use the machine profile that is there")
    parser.add_argument("--dry-run", action="store_true", dest="dry_run", help="tiny shapes, two steps")
    args = parser.parse_args(argv)
    if args.dry_run:
        args.steps, args.warmup = 2, 1
    if not 0 <= args.warmup < args.steps:
        parser.error(f"--warmup {args.warmup} of --steps {args.steps}: no step is left to be measured")
    return args


def again(results: Path, note: str) -> int:
    """Today's forecasts beside what was measured then."""
    from plan_again import AGAIN_NOTE, planned_again  # outcore is found by now

    kept = json.loads(results.read_text())
    runs = [run for run in kept["runs"] if not run["rc"] and run["forecast"]]
    table = markdown([compare(planned_again(run, kept["links"])) for run in runs])
    target = results.with_name(f"{results.stem}-again.md")
    text = f"{AGAIN_NOTE}\n\n{table}" + (f"\n{note}\n" if note else "")
    target.write_text(text)
    print(f"{text}\nwritten: {target}")
    return 0


def main(argv: list[str]) -> int:
    """Profile, runs, tables."""
    args = parse(argv)
    if args.again:
        return again(args.again, args.note)
    names = DEFAULT if args.only is None else tuple(RUNS) if args.only == "all" else tuple(args.only.split(","))
    if args.list:
        for name in names:
            print(f"{name:28} {RUNS[name].words()}")
        return 0
    started_s = time.monotonic()
    args.nvme.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    links = None if args.no_profile else measure_profile(args)
    results, left_out = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for name in names:
            if time.monotonic() - started_s > args.time_limit_s:
                left_out.append(name)
                continue
            result = measure(RUNS[name], args, Path(temporary))
            results.append(result)
            print(words_of(result), flush=True)
            table = [compare(result) for result in results if not result["rc"] and result["forecast"]]
            kept = {"links": links, "steps": args.steps, "left_out": left_out, "table": table, "runs": results}
            (args.out / "plan_vs_measured.json").write_text(json.dumps(kept, indent=1))
            (args.out / "plan_vs_measured.md").write_text(markdown(table))
    print("\n" + markdown([compare(result) for result in results if not result["rc"] and result["forecast"]]))
    if left_out:
        print(f"left out, no time: {', '.join(left_out)}")
    return 1 if any(result["rc"] for result in results) else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        sys.exit(child(int(sys.argv[2]), Path(sys.argv[3]), sys.argv[5:]))
    sys.exit(main(sys.argv[1:]))

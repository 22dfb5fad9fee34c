"""Lanes against the limits of the same run: drive, link, kvikio and DeepSpeed's async_io, and the pinned bytes held.

    python benchmarks/drives/lanes.py --path /nvme --size-gib 4 --repeats 5 --out results.json

Every repeat runs all measures one after the other, each time in another order, because drives, virtual ones above
all, change their rate from minute to minute. A ratio is taken within each repeat; the table shows medians of rates,
and each acceptance line the median of the ratios with their range. PASS: the median reaches the target. TIE: it does
not, but is within 3 % of it and some repeats reach it (rivals limited by the same drive).
Without a GPU the script runs on the CPU as a dry run: the same transfers through plain memory, no verdicts.
Exit code: 0, also with FAIL lines unless --strict (then 1); 2 when data came out wrong or a measure failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lane_bench import Bench
from lane_rivals import CannotRun, deepspeed_measures, kvikio_measures

from outcore.common.quantities import GB, GIB, MIB, format_gib
from outcore.staging import PinnedPool
from outcore.staging.pool.cuda_runtime import CudaRuntime

TIE_WITHIN = 0.03
Rates = dict[str, list[float]]

TORCH_PIN = """
import json, psutil, sys, torch
torch.cuda.init(); torch.empty(1, device="cuda"); torch.empty(1 << 20, pin_memory=True)
def held():
    return psutil.Process().memory_info().rss, psutil.virtual_memory().available
rss, available = held()
memory = torch.empty(int(sys.argv[1]), dtype=torch.uint8, pin_memory=True)
rss_after, available_after = held()
print(json.dumps({"rss_bytes": rss_after - rss, "available_bytes": available - available_after}))
"""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, default=Path("."), help="directory on the drive to measure")
    parser.add_argument("--size-gib", type=float, default=4.0, help="size of the test file")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip", default="", help="comma-separated: kvikio, deepspeed, torch-pin")
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    parser.add_argument("--pool-gib", type=float, default=8.0, help="pinned memory asked for, plus one page")
    parser.add_argument("--limited-gib", type=float, default=1.0, help="pinned memory of the limited lanes")
    parser.add_argument("--write-combined-gib", type=float, default=1.0, help="part of the pool; 0: none")
    parser.add_argument("--slot-mib", type=int, default=8)
    parser.add_argument("--num-slots", type=int, default=48)
    parser.add_argument("--piece-mib", type=int, default=64, help="size of one transfer")
    parser.add_argument("--io-threads", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--strict", action="store_true", help="exit code 1 when an acceptance line fails")
    args = parser.parse_args(arguments)
    if min(args.size_gib, args.repeats, args.pool_gib, args.limited_gib, args.slot_mib, args.piece_mib) <= 0:
        parser.error("sizes and repeats must be positive")
    unknown = set(filter(None, args.skip.split(","))) - {"kvikio", "deepspeed", "torch-pin"}
    if unknown:
        parser.error(f"--skip does not know {', '.join(sorted(unknown))}")
    if not args.path.is_dir():
        parser.error(f"--path {args.path} is not a directory")
    args.piece_bytes = args.piece_mib * MIB
    args.size_bytes = max(1, round(args.size_gib * GIB / args.piece_bytes)) * args.piece_bytes
    free_bytes = shutil.disk_usage(args.path).free
    if free_bytes < args.size_bytes * 1.1:
        parser.error(f"--path has {format_gib(free_bytes)} free, the test file needs {format_gib(args.size_bytes)}")
    return args


def measure_pinned(args: argparse.Namespace, device: torch.device) -> tuple[PinnedPool, dict[str, Any]]:
    """Builds the pool and compares what was asked with what the process and the machine then hold."""
    combined_bytes = round(args.write_combined_gib * GIB) if device.type == "cuda" else 0
    asked_bytes = round(args.pool_gib * GIB) + 4096
    if device.type == "cuda":
        CudaRuntime(device)  # the context is not to be counted
    gc.collect()
    rss_bytes, available_bytes = psutil.Process().memory_info().rss, psutil.virtual_memory().available
    begin_s = time.perf_counter()
    pool = PinnedPool(asked_bytes, device=device)
    result: dict[str, Any] = {
        "asked_bytes": asked_bytes,
        "capacity_bytes": pool.capacity_bytes,
        "rss_bytes": psutil.Process().memory_info().rss - rss_bytes,
        "available_bytes": available_bytes - psutil.virtual_memory().available,
        "build_s": time.perf_counter() - begin_s,
        "is_pinned": pool.is_pinned,
        "notes": list(pool.notes),
    }
    if combined_bytes:  # measured without, used with write-combined memory
        pool.close()
        pool = PinnedPool(asked_bytes, device=device, write_combined_bytes=combined_bytes, probe=False)
        result["write_combined_bytes"] = pool.write_combined_bytes
    if device.type == "cuda" and "torch-pin" not in args.skip:
        command = [sys.executable, "-c", TORCH_PIN, str(asked_bytes)]
        child = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        result["torch_pin_memory"] = json.loads(child.stdout) if child.returncode == 0 else child.stderr[-500:]
    return pool, result


def run_measures(table: dict[str, Callable[[], float]], repeats: int) -> Rates:
    """All measures once to warm up, then `repeats` rounds, each in another (reproducible) order."""
    rates: Rates = {name: [] for name in table}
    for repeat in range(repeats + 1):
        names = list(table)
        random.Random(repeat).shuffle(names)  # a measure also depends on what the drive has just done
        for name in names:
            rate = table[name]()
            if repeat:
                rates[name].append(rate)
        if repeat:
            print(f"  round {repeat} of {repeats}", flush=True)
    return rates


def judge(name: str, target: float, ratios: list[float] | str, judged: bool) -> dict[str, Any]:
    """One acceptance line; `ratios` is a sentence where the comparison could not run."""
    if isinstance(ratios, str):
        return {"line": name, "target": target, "verdict": "NOT RUN", "why": ratios}
    median = statistics.median(ratios)
    verdict = "PASS" if median >= target else "FAIL"
    if verdict == "FAIL" and median >= target * (1 - TIE_WITHIN) and max(ratios) >= target:
        verdict = "TIE"
    if not judged:
        verdict = "dry run"
    return {"line": name, "target": target, "ratio": median, "ratios": ratios, "verdict": verdict}


def acceptance(rates: Rates, missing: dict[str, str], pinned: dict[str, Any], judged: bool) -> list[dict[str, Any]]:
    """The lines of the acceptance, from rates of the same rounds."""

    def ratio(of: str, limits: list[str], combine: Callable[..., float] = min) -> list[float] | str:
        for name in (of, *limits):
            if name not in rates:
                return next((why for key, why in missing.items() if key in name), f"{name!r} was not measured")
        return [rates[of][i] / combine(*(rates[n][i] for n in limits)) for i in range(len(rates[of]))]

    def rival(direction: str, name: str) -> list[float] | str:
        rivals = [n for n in rates if n.startswith(direction) and name in n] or [f"{direction}, {name}"]
        return ratio(f"{direction}, lane", rivals, lambda *each: max(each))

    def only(*each: float) -> float:
        return each[0]

    up, down = "drive -> GPU", "GPU -> drive"
    h2d, d2h = "H2D, one big copy", "D2H, one big copy"
    held = pinned["rss_bytes"] / pinned["capacity_bytes"]
    lines = [
        (f"{up} / min(drive read, H2D)", 0.95, ratio(f"{up}, lane", ["drive read", h2d])),
        (f"{down} / min(drive write, D2H)", 0.95, ratio(f"{down}, lane", ["drive write", d2h])),
        (f"{up} / kvikio tuned", 1.0, rival(up, "kvikio")),
        (f"{down} / kvikio tuned", 1.0, rival(down, "kvikio")),
        (f"{up} / DeepSpeed async_io + copy", 1.0, rival(up, "DeepSpeed")),
        (f"{down} / DeepSpeed copy + async_io", 1.0, rival(down, "DeepSpeed")),
        ("H2D in 16 MiB chunks / one big copy", 0.97, ratio("H2D, 16 MiB chunks, lane", [h2d], only)),
        ("D2H in 16 MiB chunks / one big copy", 0.97, ratio("D2H, 16 MiB chunks, lane", [d2h], only)),
        ("both ways at once / (H2D + D2H)", 0.85, ratio("H2D + D2H at once, lanes", [h2d, d2h], lambda a, b: a + b)),
        (f"{up}, limited / full pinned", 0.90, ratio(f"{up}, lane, limited pinned", [f"{up}, lane"], only)),
        (f"{down}, limited / full pinned", 0.90, ratio(f"{down}, lane, limited pinned", [f"{down}, lane"], only)),
    ]
    result = [judge(*line, judged) for line in lines]
    exact = {"line": "pinned bytes held / asked, within 1 %", "target": 1.0, "ratio": held, "ratios": [held]}
    whole = pinned["capacity_bytes"] == pinned["asked_bytes"]
    verdict = "dry run" if not judged else "PASS" if whole and abs(held - 1) <= 0.01 else "FAIL"
    return [*result, {**exact, "verdict": verdict}]


def show(rates: Rates, lines: list[dict[str, Any]], pinned: dict[str, Any]) -> None:
    print(f"\n{'measure':<50} {'median GB/s':>12} {'range':>16}")
    for name, values in rates.items():
        low, middle, high = (v / GB for v in (min(values), statistics.median(values), max(values)))
        print(f"{name:<50} {middle:>12.2f} {low:>7.2f} - {high:.2f}")
    print(f"\npinned: asked {pinned['asked_bytes']} bytes, pool holds {pinned['capacity_bytes']}, ", end="")
    print(f"RSS grew by {pinned['rss_bytes']}, available RAM fell by {pinned['available_bytes']}")
    print(f"torch's pin_memory of as many bytes: {pinned.get('torch_pin_memory', 'not measured')}")
    for note in pinned["notes"]:
        print(f"note: {note}")
    print(f"\n{'acceptance':<50} {'target':>7} {'ratio':>7} {'range':>15}  verdict")
    for line in lines:
        if "ratio" in line:
            spread = f"{min(line['ratios']):.3f} - {max(line['ratios']):.3f}"
            print(f"{line['line']:<50} {line['target']:>7.2f} {line['ratio']:>7.3f} {spread:>15}  {line['verdict']}")
        else:
            print(f"{line['line']:<50} {line['target']:>7.2f} {'':>7} {'':>15}  {line['verdict']}: {line['why']}")


def machine(device: torch.device) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {"gpu": gpu, "cpu_count": os.cpu_count(), "kernel": platform.release(), "torch": torch.__version__}


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    judged = device.type == "cuda"
    if not judged:
        print("no CUDA device: a dry run on the CPU, nothing is judged")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the test file is removed
    pool, pinned = measure_pinned(args, device)
    path = args.path / f"outcore-lanes-{os.getpid()}.bin"
    missing: dict[str, str] = {}
    setting = (args.slot_mib * MIB, args.num_slots, round(args.limited_gib * GIB), args.io_threads)
    with pool, Bench(path, args.size_bytes, args.piece_bytes, device, pool, *setting) as bench:
        print(f"file {path} of {format_gib(args.size_bytes)}, direct I/O: {bench.file.direct}, {machine(device)}")
        bench.drive(False, True)  # every block is written once: first writes into reserved space are slower
        bench.verify()
        table = bench.measures()
        for name, open_rival in (("kvikio", kvikio_measures), ("DeepSpeed", deepspeed_measures)):
            try:
                if name.lower() in args.skip:
                    raise CannotRun(f"{name} was skipped by --skip")
                table |= open_rival(bench)
            except CannotRun as reason:
                missing[name] = str(reason)
        rates = run_measures(table, args.repeats)
        stats = {
            lane.owner: vars(lane.stats()) for lane in (bench.up, bench.down, bench.limited_up, bench.limited_down)
        }
    lines = acceptance(rates, missing, pinned, judged)
    show(rates, lines, pinned)
    if args.out:
        settings = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
        result = {"machine": machine(device), "settings": settings, "pinned": pinned, "acceptance": lines}
        result |= {"rates_bytes_per_s": rates, "lane_stats": stats, "not_run": missing}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 1 if args.strict and any(line["verdict"] == "FAIL" for line in lines) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, RuntimeError) as error:
        print(f"the measurement failed: {error}", file=sys.stderr)
        sys.exit(2)

"""Where a pass that only writes spends its time: copies of weights, gaps between them, small copies behind them.

    python benchmarks/infer/passes.py --batches 1,64 --out passes.json
    python benchmarks/infer/passes.py --dry_run              (tiny model, CPU, seconds)

`passes_s`: seconds of each pass in the order they ran, untraced. From a trace of a few more: `gaps_ms`, times in which
no weights crossed the link, longest first, with how far into the span they began; `small_waits_ms`, how long each small
copy to the GPU lay behind others, from its call until it began; `rates_gb_per_s`, of each copy of weights.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import Cases, device_of, opened_with, prompts

from outcore.common.quantities import MIB
from outcore.infer import Request, Sampling

BIG_BYTES = 4 * MIB


def traced(step: Any, count: int, device: torch.device) -> list[dict[str, Any]]:
    """Events of so many steps."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(count):
            step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]


def link_facts(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What the trace says of copies to the GPU."""
    calls = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    copies = sorted(
        (e for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"]), key=lambda event: event["ts"]
    )
    big = [e for e in copies if e["args"].get("bytes", 0) >= BIG_BYTES]
    small = [e for e in copies if e["args"].get("bytes", 0) < BIG_BYTES]
    if not big:
        return {}
    start, end = big[0]["ts"], big[-1]["ts"] + big[-1]["dur"]
    busy_us = sum(e["dur"] for e in big)
    gaps = [(b["ts"] - a["ts"] - a["dur"], a["ts"] + a["dur"] - start) for a, b in itertools.pairwise(big)]
    waits = sorted(((e["ts"] - calls.get(e["args"].get("correlation"), e["ts"])) / 1e3 for e in small), reverse=True)
    rates = sorted(e["args"]["bytes"] / e["dur"] / 1e3 for e in big)
    total = sum(e["args"]["bytes"] for e in big)
    return {
        "big_copies": len(big),
        "gb": total / 1e9,
        "span_ms": (end - start) / 1e3,
        "busy_share": busy_us / (end - start),
        "gb_per_s_while_busy": total / busy_us / 1e3,
        "rates_gb_per_s": [rates[0], rates[len(rates) // 2], rates[-1]],
        "gaps_ms": [[round(g / 1e3, 2), round(at / 1e3, 1)] for g, at in sorted(gaps, reverse=True)[:12]],
        "gaps_sum_ms": sum(max(0, g) for g, _ in gaps) / 1e3,
        "small_copies": len(small),
        "small_waits_ms": [round(wait, 2) for wait in waits[:16]],
    }


def slowest_calls(events: list[dict[str, Any]]) -> list[list[Any]]:
    """The host's calls to the driver that took longest in sum: name, count, milliseconds."""
    sums: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver"):
            entry = sums.setdefault(event["name"], [0, 0.0])
            entry[0], entry[1] = entry[0] + 1, entry[1] + event["dur"] / 1e3
    return [[name, *entry] for name, entry in sorted(sums.items(), key=lambda item: -item[1][1])[:6]]


def passes(opened: Any, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Passes of so many answers."""
    engine = opened.engine
    engine.speculates = False
    wanted = args.count + args.traced + 10
    sampling = Sampling(temperature=args.temperature, seed=1, max_tokens=wanted, ignore_eos=True)
    done: list[Any] = []
    for number, ids in enumerate(prompts(batch, args.prompt, args.vocab)):
        engine.submit(Request(f"p{batch}-{number}", ids, sampling), None, done.append)
    while engine.counts.last_pass_rows != batch or engine.num_running != batch:
        engine.step()
    for _ in range(3):
        engine.step()
    times, collections = [], [entry["collections"] for entry in gc.get_stats()]
    for _ in range(args.count):
        began = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - began)
    collected = [entry["collections"] - old for entry, old in zip(gc.get_stats(), collections, strict=True)]
    events = traced(engine.step, args.traced, opened.device)
    while len(done) < batch:
        engine.step()
    ordered = sorted(times)
    return {
        "batch": batch,
        "travelling_gb": opened.placement.travelling_bytes / 1e9,
        "weights_gb_per_s": opened.placement.travelling_bytes / ordered[len(ordered) // 2] / 1e9,
        "median_s": ordered[len(ordered) // 2],
        "passes_s": [round(seconds, 4) for seconds in times],
        "collections": collected,
        **link_facts(events),
        "calls": slowest_calls(events),
    }


def main() -> None:
    """Run the batches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--cap_gib", type=float, default=6.5)
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--count", type=int, default=20, help="passes that are timed")
    parser.add_argument("--traced", type=int, default=3, help="passes that are traced after them")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--queued", action="store_true", help="small copies by the copy engine, as they were")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry_run", action="store_true")
    args = parser.parse_args()
    args.prompt, args.vocab = 512, 32000
    device = device_of(args.cap_gib, dry_run=args.dry_run)
    if args.dry_run:
        args.model, args.batches, args.prompt, args.vocab, args.count = "tiny", "1,3", 24, 200, 3
    batches = [int(count) for count in args.batches.split(",")]
    cases = Cases(device, args.out)
    opened = opened_with(args.model, device, max_sequences=max(batches))
    engine = opened.engine
    for copies in (engine.runner.copies, getattr(engine.runner.small, "_copies", None)):
        if args.queued and copies is not None:
            copies._view = None
    for batch in batches:
        cases.note("passes", lambda b=batch: passes(opened, b, args))
    opened.close()


if __name__ == "__main__":
    main()

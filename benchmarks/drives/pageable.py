"""Does the pageable path feed the link? One upload lane with a small pinned pool, beside homes that are all pinned.

    python benchmarks/drives/pageable.py --out benchmarks/results/pageable-NAME.json     # one GPU, 3 minutes
    python benchmarks/drives/pageable.py --small --out /tmp/pageable.json                # a dry run on the CPU

For every number of copying threads and every slot size the same homes in ordinary RAM go up through the slots of a
pinned pool (--pinned_gib, 1 by default), back to back, as a forward pass takes a frozen base. Beside it in one call:
the same bytes from pinned RAM (the link), and the STREAM triad (DRAM). The bound is min(link, a third of DRAM); the
verdict is the default's rate (`sizing.copies`) over it, wanted 0.9, and which setting was fastest. Exit code 1 below.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from outcore.common.quantities import GB, GIB, MIB
from outcore.machine import usable_cores
from outcore.probe.bench.memory import measure_ram, thread_counts
from outcore.sizing.copies import COPY_THREAD_GB_PER_S, DRAM_PASSES, copy_threads
from outcore.staging import LaneSettings, PinnedPool, UploadLane
from outcore.staging.pool.host_memory import pageable

WANTED = 0.9
ROUNDS = 3


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pinned_gib", type=float, default=1.0)
    parser.add_argument("--layer_mib", type=int, default=416, help="one home: a layer of Llama 8B in bf16")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args(argv)
    if args.small:
        args.pinned_gib, args.layer_mib, args.layers = 0.0625, 8, 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cores = usable_cores()
    dram = max(m.gb_per_s for m in measure_ram(thread_counts(cores, cores), 4.0, 1.0, 64 * MIB if args.small else None))
    link = _link(device, args)
    bound = min(link, dram / DRAM_PASSES)
    cells = []
    for slot_mib in (4,) if args.small else (16, 32, 64):
        for combined in (False, True):
            for threads in sorted({1, 2, 4, 8, 12, 16, copy_threads(cores)}):
                if threads <= cores:
                    rate = _pageable(device, args, slot_mib, threads, combined)
                    cells.append(
                        {
                            "slot_mib": slot_mib,
                            "threads": threads,
                            "write_combined": combined,
                            "gb_per_s": round(rate, 2),
                        }
                    )
                    print(
                        f"slots of {slot_mib} MiB{', combined' if combined else ''}, {threads} threads: {rate:.1f} GB/s"
                    )
    own = [c["gb_per_s"] for c in cells if c["threads"] == copy_threads(cores)]
    best = max(cells, key=lambda cell: cell["gb_per_s"])
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "host": platform.processor() or platform.machine(),
        "cores": cores,
        "pinned_gib": args.pinned_gib,
        "link_gb_per_s": round(link, 2),
        "dram_gb_per_s": round(dram, 2),
        "bound_gb_per_s": round(bound, 2),
        "cells": cells,
        "default_threads": copy_threads(cores),
        "default_gb_per_s": max(own),
        "forecast_gb_per_s": round(min(copy_threads(cores) * COPY_THREAD_GB_PER_S, dram / DRAM_PASSES), 2),
        "best": best,
        "ratio": round(max(own) / bound, 3),
    }
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"link {link:.1f}, DRAM {dram:.1f}, bound {bound:.1f} GB/s; default of {copy_threads(cores)} threads "
        f"{max(own):.1f} GB/s: {found['ratio']:.2f} of the bound (wanted {WANTED}); best {best}"
    )
    return 0 if args.small or found["ratio"] >= WANTED else 1


def _link(device: torch.device, args: argparse.Namespace) -> float:
    """GB/s of the same bytes from RAM that is pinned."""
    n_bytes = args.layer_mib * MIB
    with PinnedPool(2 * n_bytes + 64 * MIB, device=device) as pool:
        home, lane = pool.lease(n_bytes, "home"), UploadLane(pool, None, device, LaneSettings(4 * MIB, 2))
        try:
            return _rate(lane, [home.tensor] * args.layers, device)
        finally:
            lane.close()
            home.release()


def _pageable(device: torch.device, args: argparse.Namespace, slot_mib: int, threads: int, combined: bool) -> float:
    num_slots = max(2, int(args.pinned_gib * GIB) // (slot_mib * MIB))
    n_bytes = num_slots * slot_mib * MIB
    homes = [pageable(args.layer_mib * MIB) for _ in range(args.layers)]
    with PinnedPool(n_bytes, device=device, write_combined_bytes=n_bytes if combined else 0) as pool:
        lane = UploadLane(
            pool,
            None,
            device,
            LaneSettings(slot_mib * MIB, num_slots, write_combined=combined, copy_threads=threads),
            owner="bench",
        )
        try:
            return _rate(lane, homes, device)
        finally:
            lane.close()


def _rate(lane: UploadLane, homes: list[torch.Tensor], device: torch.device) -> float:
    target = [torch.empty_like(homes[0], device=device) for _ in range(2)]
    rates = []
    for _ in range(ROUNDS + 1):
        began_s = time.perf_counter()
        transfers = [lane.submit_host(home, target[i % 2]) for i, home in enumerate(homes)]
        for transfer in transfers:
            transfer.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        rates.append(sum(home.nbytes for home in homes) / (time.perf_counter() - began_s) / GB)
    return statistics.median(rates[1:])  # the first one faults pages in


if __name__ == "__main__":
    sys.exit(main())

"""Does the pageable path feed the link? One upload lane with a small pinned pool, beside homes that are all pinned.

    python benchmarks/drives/pageable.py --out benchmarks/results/pageable-NAME.json     # one GPU, 40 s
    python benchmarks/drives/pageable.py --small --out /tmp/pageable.json                # a dry run on the CPU

For numbers of copying threads and of slots the same homes in ordinary RAM go up through the slots
of a pinned pool (--pinned_gib, 1 by default), back to back, as a forward pass takes a frozen base. Beside it in one
call: the same bytes from pinned RAM (the link), the STREAM triad (DRAM), and the copies alone, threads that move homes
into pinned memory piece by piece without lane and GPU (what the CPU gives). The bound is min(link, a third of DRAM);
the verdict is the default's rate (`sizing.copies`) over it, wanted 0.9, and which setting was fastest. Exit code 1
below.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from outcore.common.quantities import GB, GIB, MIB
from outcore.machine import usable_cores
from outcore.probe.bench.memory import measure_ram, thread_counts
from outcore.sizing.copies import COPY_THREAD_GB_PER_S, DRAM_PASSES, copies_gb_per_s, copy_threads
from outcore.sizing.streaming import NUM_SLOTS, PAGEABLE_SLOTS
from outcore.staging import LaneSettings, PinnedPool, UploadLane
from outcore.staging.pool.host_memory import pageable

WANTED = 0.9
ROUNDS = 3
COPY_S = 0.5
"""Length of one measurement of copies alone."""


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
    cores, default = usable_cores(), copy_threads(usable_cores())
    dram = max(m.gb_per_s for m in measure_ram(thread_counts(cores, cores), 4.0, 1.0, 64 * MIB if args.small else None))
    homes = [pageable(args.layer_mib * MIB) for _ in range(args.layers)]
    counts = [n for n in sorted({4, 8, 12, 16, 24, default}) if n <= cores]
    link = _link(device, homes)
    bound = min(link, dram / DRAM_PASSES)
    alone, cells = [], []
    slot_mib = 4 if args.small else 16
    with _pool(device, args, combined=False) as pool:
        with _slot(pool, slot_mib * MIB * min(PAGEABLE_SLOTS, int(args.pinned_gib * GIB) // (slot_mib * MIB))) as slots:
            for piece_mib in (1, slot_mib):
                for threads in counts:
                    rate = _copies(homes, slots, piece_mib * MIB, threads)
                    alone.append({"piece_mib": piece_mib, "threads": threads, "gb_per_s": round(rate, 2)})
                    print(f"copies alone, pieces of {piece_mib} MiB, {threads} threads: {rate:.1f} GB/s", flush=True)
        most = int(args.pinned_gib * GIB)
        for num in (PAGEABLE_SLOTS, NUM_SLOTS, 64):
            if slot_mib * num * MIB <= most:
                cells += [_cell(pool, homes, device, slot_mib, num, threads, False) for threads in counts]
    with _pool(device, args, combined=True) as pool:
        cells += [_cell(pool, homes, device, slot_mib, PAGEABLE_SLOTS, threads, True) for threads in counts[-3:]]
    own = _of(cells, default, slot_mib, PAGEABLE_SLOTS)
    best = max(cells, key=lambda cell: cell["gb_per_s"])
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "host": platform.processor() or platform.machine(),
        "cores": cores,
        "pinned_gib": args.pinned_gib,
        "link_gb_per_s": round(link, 2),
        "dram_gb_per_s": round(dram, 2),
        "bound_gb_per_s": round(bound, 2),
        "copies_alone": alone,
        "cells": cells,
        "default_threads": default,
        "default_gb_per_s": own,
        "thread_gb_per_s": COPY_THREAD_GB_PER_S,
        "forecast_gb_per_s": round(copies_gb_per_s(cores, dram), 2),
        "best": best,
        "ratio": round(own / bound, 3),
    }
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"link {link:.1f}, DRAM {dram:.1f}, bound {bound:.1f} GB/s; default of {default} threads "
        f"{own:.1f} GB/s: {found['ratio']:.2f} of the bound (wanted {WANTED}); best {best}"
    )
    return 0 if args.small or found["ratio"] >= WANTED else 1


def _of(cells: list[dict[str, Any]], threads: int, slot_mib: int, num_slots: int) -> float:
    wanted = {"threads": threads, "slot_mib": slot_mib, "num_slots": num_slots, "write_combined": False}
    return next(cell["gb_per_s"] for cell in cells if wanted.items() <= cell.items())


@contextmanager
def _pool(device: torch.device, args: argparse.Namespace, *, combined: bool) -> Iterator[PinnedPool]:
    n_bytes = int(args.pinned_gib * GIB)
    with PinnedPool(n_bytes, device=device, write_combined_bytes=n_bytes if combined else 0) as pool:
        yield pool


@contextmanager
def _slot(pool: PinnedPool, n_bytes: int) -> Iterator[torch.Tensor]:
    lease = pool.lease(n_bytes, "copies alone")
    try:
        yield lease.tensor
    finally:
        lease.release()


def _link(device: torch.device, homes: list[torch.Tensor]) -> float:
    """GB/s of as many bytes from RAM that is pinned."""
    n_bytes = homes[0].nbytes
    with PinnedPool(n_bytes + 64 * MIB, device=device) as pool:
        home, lane = pool.lease(n_bytes, "home"), UploadLane(pool, None, device, LaneSettings(4 * MIB, 2))
        try:
            return _rate(lane, [home.tensor] * len(homes), device)
        finally:
            lane.close()
            home.release()


def _copies(homes: list[torch.Tensor], slots: torch.Tensor, piece_bytes: int, threads: int) -> float:
    """GB/s of `threads` that copy pieces of the homes into the slots, each in a range of its own, for `COPY_S`."""
    moved = [0] * threads
    room = max(piece_bytes, slots.nbytes // threads // piece_bytes * piece_bytes)
    end_s = time.perf_counter() + COPY_S

    def copy(index: int) -> Callable[[], None]:
        def work() -> None:
            home = homes[index % len(homes)]
            at, start = index * home.nbytes // threads, index * room % max(1, slots.nbytes - room + 1)
            while time.perf_counter() < end_s:
                source = home.data_ptr() + at % (home.nbytes - piece_bytes + 1) // 4096 * 4096
                target = slots.data_ptr() + start + moved[index] % room
                ctypes.memmove(target, source, piece_bytes)
                at += piece_bytes
                moved[index] += piece_bytes

        return work

    began_s = time.perf_counter()
    workers = [threading.Thread(target=copy(index)) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(moved) / (time.perf_counter() - began_s) / GB


def _cell(
    pool: PinnedPool, homes: list[torch.Tensor], device: torch.device, slot: int, num: int, threads: int, combined: bool
) -> dict[str, Any]:
    """One measurement through a lane: `slot` in MiB."""
    settings = LaneSettings(slot * MIB, num, write_combined=combined, copy_threads=threads)
    lane = UploadLane(pool, None, device, settings, owner="bench")
    try:
        rate = _rate(lane, homes, device)
    finally:
        lane.close()
    slots = f"{num} slots of {slot} MiB{', combined' if combined else ''}"
    print(f"{slots}, {threads} threads: {rate:.1f} GB/s", flush=True)
    told = {"slot_mib": slot, "num_slots": num, "threads": threads, "write_combined": combined}
    return told | {"gb_per_s": round(rate, 2)}


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
    return statistics.median(rates[1:])


if __name__ == "__main__":
    sys.exit(main())

"""Launches of a layer beside a busy CPU optimizer: its workers behind other threads (as they are) and beside them.

    python benchmarks/launches_beside_optimizer.py [--threads N] [--rounds 5]          (as root, one minute)

An eager layer's launches (outcore/probe/bench/host.py) are timed on one thread, alone and while as many workers as
there are cores update fp32 states without a pause. "beside": the workers' nice value is set back to the process's,
which only root may do. Rounds alternate; medians. Without a GPU the layer computes on the CPU, which takes a core too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from optim_rate import parse, pooled

from outcore.optim import state_format
from outcore.optim.extension import ExtensionBackend
from outcore.probe.bench.host import measure_host

NUMEL, SECONDS = 1 << 25, 2.0


def one_round(threads: int, *, behind: bool, device: torch.device) -> tuple[float, float]:
    """(seconds of a layer's launches, parameters per second) at the same time."""
    options = parse(["--threads", str(threads), "--numel", str(NUMEL)])
    before = set(os.listdir("/proc/self/task"))
    step, close, _ = pooled(options, ExtensionBackend(), state_format("fp32"), threads)
    step()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    for tid in set(os.listdir("/proc/self/task")) - before if not behind else ():
        os.setpriority(os.PRIO_PROCESS, int(tid), own)
    over, steps = threading.Event(), []

    def work() -> None:
        while not over.is_set():
            step()
            steps.append(time.perf_counter())

    worker = threading.Thread(target=work)
    begin_s = time.perf_counter()
    worker.start()
    layer_s = measure_host(device, SECONDS)
    over.set()
    worker.join()
    close()
    return layer_s, len(steps) * NUMEL / (steps[-1] - begin_s)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if os.geteuid():
        print("only root may set the workers' nice value back to the process's: run it as root", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    alone_s = statistics.median(measure_host(device, SECONDS / 2) for _ in range(3))
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for _ in range(args.rounds):
        for behind, rounds in found.items():
            rounds.append(one_round(args.threads, behind=behind, device=device))
    print(f"{args.threads} workers, {len(os.sched_getaffinity(0))} cores; a layer alone {1e3 * alone_s:.2f} ms")
    for behind, rounds in found.items():
        layer_s, rate = (statistics.median(values) for values in zip(*rounds, strict=True))
        print(
            f"workers {'behind' if behind else 'beside'}: a layer {1e3 * layer_s:.2f} ms = {layer_s / alone_s:.2f} x "
            f"alone, optimizer {rate / 1e9:.2f} Gparam/s; each {[round(1e3 * s, 2) for s, _ in rounds]} ms"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What a GPU adds to the CPU's updates when states cross the link, and whether memory is the limit, in one run.

    python benchmarks/updates_over_link.py [--numel 1000000000] [--states split] [--threads 16] [--out link.json]

`cpu`: all updates on the CPU. `link`: all on the GPU; gradient, states and parameter come up and go home in chunks.
`together`: the CPU from the first unit on, the GPU from the last, until both meet, as the engine does (`device_help`);
`taken`: the share that the GPU took. `both_cpu`, `both_link`: each at a half of its own, beside the other. `memory`:
`memory_rate_bytes_per_s`. In billions of parameters a second, and in GB/s of RAM: gradients read, states and parameters
read and written. Where both move no more bytes than the CPU alone, memory is the limit, whoever updates.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.race.race_common import memory_rate_bytes_per_s
from outcore.optim import AdamWHyper, ChunkJob, HomeJob, JobBatch, OptimizerPool, Ticket, UpdatesFromHome, state_format

CHUNK_NUMEL, CHUNKS_OF_UNIT, NUM_SLOTS = 1 << 22, 12, 4
HYPER = AdamWHyper(lr=1e-4, step=10, weight_decay=0.01)
WAIT_S = 120.0


def main() -> None:
    """Measure each, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=1_000_000_000)
    parser.add_argument("--states", default="split")
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    form = state_format(args.states)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pinned = device.type == "cuda"
    chunk_numel = min(CHUNK_NUMEL, max(256, args.numel // 4 // CHUNKS_OF_UNIT // 256 * 256))
    num_units = max(4, args.numel // (chunk_numel * CHUNKS_OF_UNIT))
    gradient = torch.full((chunk_numel,), 1e-3, dtype=torch.bfloat16)

    def chunk() -> ChunkJob:
        grad, param = (gradient.clone(), torch.ones(chunk_numel, dtype=torch.bfloat16))
        state = torch.zeros(form.chunk_bytes(chunk_numel), dtype=torch.uint8)
        if pinned:
            grad, state, param = (tensor.pin_memory() for tensor in (grad, state, param))
        return ChunkJob(grad, state, param)

    units = [JobBatch(form, [chunk() for _ in range(CHUNKS_OF_UNIT)]) for _ in range(num_units)]
    numel = sum(unit.numel for unit in units)
    homes = [[HomeJob(form, job) for job in unit.jobs] for unit in units]
    param_bytes = 2 * 2 if form.split_master else 2
    moved = 2 + 2 * form.chunk_bytes(chunk_numel) / chunk_numel + param_bytes
    updates = UpdatesFromHome(device, HomeJob.bytes_of(form, chunk_numel, 2), NUM_SLOTS)
    found: dict[str, Any] = {"states": args.states, "threads": args.threads, "numel": numel, "bytes_per_param": moved}
    found["memory_gb_per_s"] = memory_rate_bytes_per_s(args.threads) / 1e9
    with OptimizerPool(args.threads) as pool:

        def cpu(chosen: list[JobBatch]) -> list[Ticket]:
            return [pool.submit(at, at, unit, HYPER) for at, unit in enumerate(chosen)]

        def link(chosen: list[list[HomeJob]]) -> list[Future[None]]:
            return [updates.submit(unit, HYPER) for unit in chosen]

        def note(name: str, seconds: list[float], of: float = 1.0, **more: float) -> None:
            best_s = min(seconds)
            rate = of * numel / best_s / 1e9
            found[name] = {"params_per_ns": rate, "gb_per_s": rate * moved, "s": best_s, "all_s": seconds, **more}
            print(name, json.dumps(found[name]), flush=True)

        def timed(run: Any) -> float:
            begin_s = time.perf_counter()
            run()
            return time.perf_counter() - begin_s

        def wait_cpu(tickets: list[Ticket]) -> float:
            for ticket in tickets:
                pool.wait(ticket, WAIT_S)
            return time.perf_counter()

        def wait_link(ends: list[Future[None]]) -> float:
            for end in ends:
                end.result(WAIT_S)
            return time.perf_counter()

        def together() -> int:
            tickets, ends = cpu(units), []
            for at in range(num_units - 1, -1, -1):
                if not pool.withdraw(tickets[at]):
                    break
                ends += link([homes[at]])
                if len(ends) > 1:
                    ends[-2].result(WAIT_S)
            wait_link(ends)
            wait_cpu(tickets)
            return len(ends)

        for run in (lambda: wait_cpu(cpu(units)), lambda: wait_link(link(homes))):
            run()  # makes what is new
        note("cpu", [timed(lambda: wait_cpu(cpu(units))) for _ in range(args.repeats)])
        note("link", [timed(lambda: wait_link(link(homes))) for _ in range(args.repeats)])
        taken: list[int] = []
        seconds = [timed(lambda: taken.append(together())) for _ in range(args.repeats)]
        note("together", seconds, taken=sum(taken) / len(taken) / num_units)
        half = num_units // 2
        cpu_s, link_s = [], []
        for _ in range(args.repeats):
            begin_s = time.perf_counter()
            tickets, ends = cpu(units[:half] * 2), link(homes[half:])
            link_s.append(wait_link(ends) - begin_s)
            cpu_s.append(wait_cpu(tickets) - begin_s)
        note("both_cpu", cpu_s, of=2 * half / num_units)
        note("both_link", link_s, of=1 - half / num_units)
    updates.close()
    if args.out:
        args.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

"""Answers of one GPU and of several of one host, one copy of the weights in RAM: tokens a second, and RAM.

    python benchmarks/infer/over_gpus.py --model llama-8b --gpus 1 2 --out over_gpus.json
    python benchmarks/infer/over_gpus.py --dry_run              (tiny model, CPU processes, seconds)

The way of `outcore generate --num_gpus N`: a process for each GPU with every N-th request. All open once; for a smaller
number of GPUs the others wait, and --out has each case as soon as it is over. A pass takes the link's time whatever the
number of answers, and one GPU holds some 15 at once: with few requests the ratio would be that of waves. Seconds are of
all requests after short answers that compiled and captured; weights are random. Exit code 1 when a process failed, when
an answer is missing, or when RAM is above the weights' by more than --ram_growth of them for each process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import device_of, opened_with, prompts, run_requests

from outcore.infer.opening import HostShare


def pss_bytes() -> int:
    """RAM of this process; a page that n processes share counts 1/n."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def answer(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One process; the first says and writes what a case found as soon as it is over."""
    began, world_size = time.perf_counter(), max(args.gpus)
    device = device_of(args.cap_gib, dry_run=args.dry_run, index=rank)
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=world_size)

    def exchange(mine: Any) -> list[Any]:
        found: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(found, mine)
        return found

    libraries_bytes = pss_bytes()
    opened = opened_with(args.model, device, share=HostShare(rank, world_size, exchange), context=args.context)
    asked = prompts(args.requests, args.prompt, args.vocab)
    run_requests(opened, asked[rank::world_size], args.warm_answer, temperature=1.0)  # compiles, captures
    opened_s, table = time.perf_counter() - began, []
    weights_bytes = sum(p.numel() * p.element_size() for p in opened.found.loaded.model.parameters())
    for count in args.gpus:
        exchange(None)
        began = time.perf_counter()
        own = asked[rank::count] if rank < count else []
        mine: dict[str, Any] = {"answered": len(own), "open_s": opened_s}
        mine |= run_requests(opened, own, args.answer, temperature=1.0) if own else {}
        mine |= {"all_s": time.perf_counter() - began, "ram_bytes": pss_bytes() - libraries_bytes}
        if device.type == "cuda":
            mine["torch_peak_bytes"] = torch.cuda.max_memory_allocated(device)
        ranks = exchange(mine)  # memory and its maker stay until the last has read
        if rank == 0:
            table.append(case(args, count, ranks, weights_bytes, table))
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
            args.out.write_text(json.dumps({"device": name, "runs": table}, indent=1))
    exchange(None)
    opened.close()
    torch.distributed.destroy_process_group()


def case(
    args: argparse.Namespace, count: int, ranks: list[dict[str, Any]], weights_bytes: int, table: list[dict[str, Any]]
) -> dict[str, Any]:
    """What a number of GPUs gave, and what is wrong with it; one line on the screen."""
    seconds, answered = max(r["all_s"] for r in ranks), sum(r["answered"] for r in ranks)
    ram_bytes = sum(r["ram_bytes"] for r in ranks)
    found = {"gpus": count, "s": seconds, "tokens_per_s": args.requests * args.answer / seconds}
    found |= {"speed_up": table[0]["s"] / seconds if table else 1.0, "ram_bytes": ram_bytes, "ranks": ranks}
    problems = [] if answered == args.requests else [f"{count} GPUs answered {answered} of {args.requests} requests"]
    # A tiny model is less than what libraries take.
    if not args.dry_run and ram_bytes > weights_bytes * (1 + args.ram_growth * len(ranks)):
        problems.append(f"RAM is {ram_bytes / 1e9:.1f} GB, the weights take {weights_bytes / 1e9:.1f}")
    print(
        f"{count} GPU(s): {found['tokens_per_s']:.1f} tokens/s, {found['speed_up']:.2f}x; open after "
        f"{max(r['open_s'] for r in ranks):.0f} s; RAM {ram_bytes / 1e9:.2f} GB",
        *problems,
        sep="\n",
        flush=True,
    )
    return found | {"problems": problems}


def main() -> int:
    """One line for each number of GPUs, with what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, default=256, help="of all GPUs together")
    parser.add_argument("--answer", type=int, default=16, help="tokens of each")
    parser.add_argument("--cap_gib", type=float, default=6.5)
    parser.add_argument("--ram_growth", type=float, default=0.25)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry_run", action="store_true")
    args = parser.parse_args()
    args.prompt, args.warm_answer, args.vocab, args.context = 512, 4, 32000, 1024
    if args.dry_run:
        args.model, args.prompt, args.answer, args.vocab, args.requests, args.context = "tiny", 24, 8, 200, 8, 64
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        args.out = args.out or Path(folder, "found.json")
        spawn(answer, (args, folder), nprocs=max(args.gpus), join=True)
        runs = json.loads(args.out.read_text())["runs"]
    return 1 if any(found["problems"] for found in runs) else 0


if __name__ == "__main__":
    sys.exit(main())

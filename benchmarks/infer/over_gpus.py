"""Answers of one GPU and of several of one host, one copy of the weights in RAM: tokens a second, and RAM.

    python benchmarks/infer/over_gpus.py --model llama-8b --gpus 1 2 --out over_gpus.json
    python benchmarks/infer/over_gpus.py --dry_run              (tiny model, CPU processes, seconds)

The way of `outcore generate --num_gpus N`: a process for each GPU with every N-th request. All open once; for a smaller
number of GPUs the others wait. Every GPU needs as many requests as it answers at once, 32 with the defaults: a pass
takes the link's time whatever their number. Seconds are of all requests after short answers that compiled and captured;
weights are random. Exit code 1 when a process failed, when an answer is missing, or when RAM is above the weights' by
more than --ram_growth of them for each process.
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
    """One process; its figures go to a file of its own."""
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
    found: dict[str, Any] = {"open_s": time.perf_counter() - began, "counts": {}}
    for count in args.gpus:
        exchange(None)
        began = time.perf_counter()
        own = asked[rank::count] if rank < count else []
        of_count = {"answered": len(own)} | (run_requests(opened, own, args.answer, temperature=1.0) if own else {})
        exchange(None)  # until the last one has its answers
        found["counts"][count] = of_count | {"all_s": time.perf_counter() - began}
    found["ram_bytes"] = pss_bytes() - libraries_bytes
    found["weights_bytes"] = sum(p.numel() * p.element_size() for p in opened.found.loaded.model.parameters())
    if device.type == "cuda":
        found["torch_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    exchange(None)  # memory and its maker stay until the last has read
    opened.close()
    torch.distributed.destroy_process_group()


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What each process found; the exception of one that failed."""
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        spawn(answer, (args, folder), nprocs=max(args.gpus), join=True)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(max(args.gpus))]


def main() -> int:
    """One line for each number of GPUs, then what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, default=64, help="of all GPUs together")
    parser.add_argument("--cap_gib", type=float, default=6.5)
    parser.add_argument("--ram_growth", type=float, default=0.25)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry_run", action="store_true")
    args = parser.parse_args()
    args.prompt, args.answer, args.warm_answer, args.vocab, args.context = 512, 32, 4, 32000, 1024
    if args.dry_run:
        args.model, args.prompt, args.answer, args.vocab, args.requests, args.context = "tiny", 24, 8, 200, 8, 64
    ranks = run(args)
    table: list[dict[str, Any]] = []
    problems: list[str] = []
    for count in args.gpus:
        of_ranks = [rank["counts"][str(count)] for rank in ranks]
        seconds, answered = max(r["all_s"] for r in of_ranks), sum(r["answered"] for r in of_ranks)
        tokens_per_s = args.requests * args.answer / seconds
        speed_up = table[0]["s"] / seconds if table else 1.0
        found = {"gpus": count, "s": seconds, "tokens_per_s": tokens_per_s, "speed_up": speed_up, "ranks": of_ranks}
        table.append(found)
        print(f"{count} GPU(s): {tokens_per_s:.1f} tokens/s, {speed_up:.2f}x")
        if answered != args.requests:
            problems.append(f"{count} GPUs answered {answered} of {args.requests} requests")
    ram_bytes, weights_bytes = sum(rank["ram_bytes"] for rank in ranks), ranks[0]["weights_bytes"]
    print(f"open after {max(rank['open_s'] for rank in ranks):.0f} s; RAM {ram_bytes / 1e9:.2f} GB")
    # A tiny model is less than what libraries take.
    if not args.dry_run and ram_bytes > weights_bytes * (1 + args.ram_growth * len(ranks)):
        problems.append(f"RAM is {ram_bytes / 1e9:.1f} GB, the weights take {weights_bytes / 1e9:.1f}")
    if args.out:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        opened = [{name: value for name, value in rank.items() if name != "counts"} for rank in ranks]
        args.out.write_text(json.dumps({"device": device, "opened": opened, "runs": table}, indent=1))
    print("\n".join(problems) or "ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

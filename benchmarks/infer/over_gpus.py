"""Answers of one GPU and of several of one host, one copy of the weights in RAM: tokens a second, and RAM.

    python benchmarks/infer/over_gpus.py --model llama-8b --gpus 1 2 --requests 128 --out over_gpus.json
    python benchmarks/infer/over_gpus.py --dry_run              (tiny model, CPU processes, seconds)

The way of `outcore generate --num_gpus N`: a process for each GPU with every N-th request. Seconds are of all requests
after an equal round that compiled and captured; weights are random. Exit code 1 when a process failed, when answers
differ from one GPU's in number, or when RAM grows by more than --ram_growth of the weights for each process more.
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


def answer(rank: int, args: argparse.Namespace, count: int, folder: str) -> None:
    """One process; its figures go to a file of its own."""
    device = device_of(args.cap_gib, dry_run=args.dry_run, index=rank)
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=count)

    def exchange(mine: Any) -> list[Any]:
        found: list[Any] = [None] * count
        torch.distributed.all_gather_object(found, mine)
        return found

    libraries_bytes = pss_bytes()
    opened = opened_with(
        args.model, device, share=HostShare(rank, count, exchange) if count > 1 else None, context=args.context
    )
    own = prompts(args.requests, args.prompt, args.vocab)[rank::count]
    run_requests(opened, own, args.answer, temperature=1.0)  # compiles, captures
    exchange(None)
    began = time.perf_counter()
    found = run_requests(opened, own, args.answer, temperature=1.0)
    own_s = found["s"]
    exchange(None)  # until the last one has its answers
    found |= {"own_s": own_s, "s": time.perf_counter() - began, "ram_bytes": pss_bytes() - libraries_bytes}
    found["answered"] = len(own)
    found["weights_bytes"] = sum(p.numel() * p.element_size() for p in opened.found.loaded.model.parameters())
    if device.type == "cuda":
        found["torch_peak_bytes"] = torch.cuda.max_memory_allocated(device)
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    exchange(None)  # memory and its maker stay until the last has read
    opened.close()
    torch.distributed.destroy_process_group()


def run(args: argparse.Namespace, count: int) -> dict[str, Any]:
    """All processes of one number of GPUs; the exception of one that failed."""
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as folder:
        spawn(answer, (args, count, folder), nprocs=count, join=True)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(count)]
    seconds = max(rank["s"] for rank in ranks)
    return {
        "gpus": count,
        "s": seconds,
        "tokens_per_s": args.requests * args.answer / seconds,
        "answered": sum(rank["answered"] for rank in ranks),
        "ram_bytes": sum(rank["ram_bytes"] for rank in ranks),
        "ranks": ranks,
    }


def main() -> int:
    """One line for each number of GPUs, then what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--requests", type=int, default=128, help="of all GPUs together")
    parser.add_argument("--cap_gib", type=float, default=6.5)
    parser.add_argument("--ram_growth", type=float, default=0.5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry_run", action="store_true")
    args = parser.parse_args()
    args.prompt, args.answer, args.vocab, args.context = 512, 64, 32000, 1024
    if args.dry_run:
        args.model, args.prompt, args.answer, args.vocab, args.requests, args.context = "tiny", 24, 8, 200, 8, 64
    table, problems = [], []
    for count in args.gpus:
        found = run(args, count)
        one = table[0] if table else found
        found["speed_up"] = one["s"] / found["s"]
        table.append(found)
        print(
            f"{count} GPU(s): {found['tokens_per_s']:.1f} tokens/s, {found['speed_up']:.2f}x; RAM "
            f"{found['ram_bytes'] / 1e9:.2f} GB",
            flush=True,
        )
        if found["answered"] != args.requests:
            problems.append(f"{count} GPUs answered {found['answered']} of {args.requests} requests")
        allowed = (count - one["gpus"]) * args.ram_growth * found["ranks"][0]["weights_bytes"]
        if not args.dry_run and found["ram_bytes"] > one["ram_bytes"] + allowed:  # a tiny model is less than libraries
            problems.append(f"{count} GPUs take {found['ram_bytes'] / 1e9:.1f} GB, one {one['ram_bytes'] / 1e9:.1f}")
        if args.out:
            args.out.write_text(json.dumps(table, indent=1))
    print("\n".join(problems) or "ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""A context longer than VRAM: the same tokens under a cap, keys and values in RAM, as with everything on the GPU.

    CUDA_VISIBLE_DEVICES=0 python benchmarks/infer/long_context.py --side whole --out whole.json &
    CUDA_VISIBLE_DEVICES=1 python benchmarks/infer/long_context.py --side capped --out capped.json; wait
    python benchmarks/infer/long_context.py --compare whole.json capped.json
    python benchmarks/infer/long_context.py --dry_run              (tiny model, CPU: keys and values in RAM, on a drive)

Greedy, random weights, --context tokens of prompt. Each side writes down its tokens with the two likeliest of every
place. Where the two sides part, `gap` is how much likelier the chosen token was than the next, on either side: in 16
bits a gap below what rounding moves is a tie; behind it the texts are different ones and are not compared.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import Cases, device_of, opened_with, prompts

from outcore.infer import Request, Sampling


def side(name: str, args: argparse.Namespace, device: torch.device, **settings: Any) -> dict[str, Any]:
    """Answer once; tokens, gaps and times."""
    began = time.perf_counter()
    opened = opened_with(args.model, device, context=args.context + args.answer + 64, preset="latency", **settings)
    opening_s, engine = time.perf_counter() - began, opened.engine
    sampling = Sampling(temperature=0, max_tokens=args.answer, ignore_eos=True, logprobs=2)
    prompt = prompts(1, args.context, args.vocab)[0]
    (answer,) = engine.generate([Request("long", prompt, sampling)])
    if answer.error:
        raise RuntimeError(answer.error)
    times, placement = answer.timings, opened.placement
    found = {
        "side": name,
        "context": args.context,
        "tokens": [chosen.token for chosen in answer.tokens],
        "gaps": [chosen.top[0][1] - chosen.top[1][1] for chosen in answer.tokens],
        "opening_s": opening_s,
        "first_token_s": times.first_token_s,
        "s_per_token": (times.total_s - times.first_token_s) / max(1, len(answer.tokens) - 1),
        "passes": engine.counts.passes,
        "kv_home": placement.kv_home,
        "kv_gb": placement.kv_bytes / 1e9,
        "weights_travelling_gb": placement.travelling_bytes / 1e9,
        "placement": placement.lines(),
    }
    opened.close()
    return found


def compared(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """How far two sides agree. ValueError when one gave no answer."""
    for side in (one, other):
        if "tokens" not in side:
            raise ValueError(f"a side gave no answer: {side.get('error', side)}")
    pairs = list(zip(one["tokens"], other["tokens"], strict=True))
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
    found: dict[str, Any] = {"tokens": len(pairs), "same_from_the_start": same, "all_the_same": same == len(pairs)}
    found["smallest_gap"] = min(one["gaps"])
    if same < len(pairs):
        found["gap"] = [one["gaps"][same], other["gaps"][same]]
    return found


def main() -> None:
    """Run a side, or compare two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b")
    parser.add_argument("--cap_gib", type=float, default=6.5)
    parser.add_argument("--context", type=int, default=100_000)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--side", choices=("whole", "capped"))
    parser.add_argument("--compare", type=Path, nargs=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry_run", action="store_true")
    args = parser.parse_args()
    args.vocab = 32000
    if args.compare:
        sides = [json.loads(path.read_text())[-1] for path in args.compare]
        for found in sides:
            print(json.dumps({name: value for name, value in found.items() if name not in ("tokens", "gaps")}))
        print(json.dumps(compared(*sides)))
    elif args.dry_run:
        args.model, args.context, args.answer, args.vocab = "tiny", 600, 8, 200
        device = device_of(args.cap_gib, dry_run=True)
        with tempfile.TemporaryDirectory() as folder:
            whole = side("whole", args, device)
            drive = side("capped", args, device, kv_home="nvme", nvme_path=(Path(folder),))
        print(json.dumps(compared(whole, drive)))
    elif args.side is None:
        parser.error("give --side, --compare or --dry_run")
    else:
        device = device_of(args.cap_gib if args.side == "capped" else 1e6, dry_run=False)
        cases = Cases(device, args.out)
        homes = {"whole": "vram", "capped": "ram"}
        cases.note(args.side, lambda: side(args.side, args, device, kv_home=homes[args.side]))


if __name__ == "__main__":
    main()

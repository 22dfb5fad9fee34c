"""One answer of a model that fits the GPU whole: ours beside transformers with a static cache, compiled.

    python benchmarks/infer/whole.py --model llama-1b --out whole.json
    python benchmarks/infer/whole.py --dry_run              (tiny model, CPU, seconds)

Rivals: `generate` with `cache_implementation="static"`, which compiles (mode reduce-overhead), as users run it; and a
bare loop around the compiled forward that reads each token back, as one must to know when to stop. Ours is timed
request to answer, and by passes. Prompts of 512 tokens, greedy.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from common import Cases, decode_passes, device_of, find, opened_with, prompts, run_requests, synchronise
from offload import filled

PROMPT, ANSWER = 512, 128


def model_of(args: argparse.Namespace, device: torch.device) -> Any:
    """The rival's model, on the device."""
    return filled(find(args.model, "bf16").loaded.model, str(device)).to(device)


def generate_case(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """`generate`, static cache: seconds a token between two lengths of answer."""
    model = model_of(args, device)
    ids = torch.tensor(prompts(1, args.prompt, args.vocab), device=device)
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    options |= {"cache_implementation": "static"}
    found = []
    with torch.inference_mode():
        for count in (2, args.answer, args.answer, 2):
            synchronise()
            began = time.perf_counter()
            model.generate(ids, max_new_tokens=count, min_new_tokens=count, **options)
            synchronise()
            found.append(time.perf_counter() - began)
    return {"ms_per_token": 1e3 * (found[2] - found[3]) / (args.answer - 2), "calls_s": found}


def loop_case(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The compiled forward in a loop, its greedy token read back each time."""
    from transformers import StaticCache

    model = model_of(args, device)
    ids = torch.tensor(prompts(1, args.prompt, args.vocab), device=device)
    cache = StaticCache(config=model.config, max_cache_len=args.prompt + args.answer + 8)
    forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    times = []
    with torch.inference_mode():
        logits = model(ids, past_key_values=cache, use_cache=True).logits
        token = logits[:, -1:].argmax(-1)
        for step in range(args.answer):
            position = torch.tensor([[args.prompt + step]], device=device)
            began = time.perf_counter()
            logits = forward(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True).logits
            token = logits[:, -1:].argmax(-1).clone()
            int(token)
            times.append(time.perf_counter() - began)
    times = sorted(times[8:])
    return {"ms_per_token": 1e3 * times[len(times) // 2], "fastest_ms": 1e3 * times[0]}


def main() -> None:
    """Ours, then the rivals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--cap_gib", type=float, default=6.5)
    parser.add_argument("--cases", default="ours,loop,generate")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry_run", action="store_true")
    args = parser.parse_args()
    args.prompt, args.answer, args.vocab = PROMPT, ANSWER, 32000
    device = device_of(args.cap_gib, dry_run=args.dry_run)
    if args.dry_run:
        args.model, args.prompt, args.answer, args.vocab = "tiny", 24, 24, 200
    cases, wanted = Cases(device, args.out), args.cases.split(",")
    ours = float("nan")
    if "ours" in wanted:
        opened = opened_with(args.model, device, preset="latency", draft_tokens=0)
        entry = cases.note("passes of ours", lambda: decode_passes(opened, 1, args.answer - 8, args.prompt, args.vocab))
        ours = 1e3 * entry.get("s_per_pass", float("nan"))
        asked = prompts(1, args.prompt, args.vocab)
        cases.note("request of ours", lambda: run_requests(opened, asked, args.answer))
        opened.close()
        del opened
        cases.free()
    for name, case in (("loop", loop_case), ("generate", generate_case)):
        if name in wanted:

            def run(case: Any = case) -> dict[str, Any]:
                found = case(args, device)
                return {**found, "ours_over_it": ours / found["ms_per_token"]}

            cases.note(f"transformers compiled, {name}", run)
            torch._dynamo.reset()
            cases.free()


if __name__ == "__main__":
    main()

"""One answer of a model that fits the GPU whole: ours beside transformers with a static cache, compiled.

    python benchmarks/infer/whole.py --model llama-1b --out whole.json
    python benchmarks/infer/whole.py --dry_run              (tiny model, CPU, seconds)

Rivals: `generate` with `cache_implementation="static"`, which compiles (mode reduce-overhead), as users run it; and a
bare loop around the compiled forward that reads each token back, as one must to know when to stop. Ours is timed
by passes, and request to answer: the first one behind opening, then more, each with a prompt of its own, with what went
to the first token, to each after it, to passes and between them. Prompts of 512 tokens, greedy.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import Cases, decode_passes, device_of, find, opened_with, prompts, run_requests, synchronise
from offload import filled

PROMPT, ANSWER, REQUESTS = 512, 128, 4


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
    ms_per_token = 1e3 * (found[2] - found[3]) / (args.answer - 2)
    return {"ms_per_token": ms_per_token, "request_s": found[2], "calls_s": found}


def loop_case(args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The compiled forward in a loop, its greedy token read back each time."""
    from transformers import StaticCache

    model = model_of(args, device)
    ids = torch.tensor(prompts(1, args.prompt, args.vocab), device=device)
    cache = StaticCache(config=model.config, max_cache_len=args.prompt + args.answer + 8)
    forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
    times: list[float] = []
    requests_s = []
    with torch.inference_mode():
        for _ in range(2):  # the first one compiles
            cache.reset()
            synchronise()
            asked, times = time.perf_counter(), []
            token = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)
            for step in range(args.answer):
                began = time.perf_counter()
                position = torch.tensor([[args.prompt + step]], device=device)
                logits = forward(input_ids=token, position_ids=position, past_key_values=cache, use_cache=True).logits
                token = logits[:, -1:].argmax(-1).clone()
                int(token)
                times.append(time.perf_counter() - began)
            requests_s.append(time.perf_counter() - asked)
    times = sorted(times)
    ms_per_token = 1e3 * times[len(times) // 2]
    return {"ms_per_token": ms_per_token, "fastest_ms": 1e3 * times[0], "request_s": requests_s[1]}


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
    ours = request = float("nan")
    if "ours" in wanted:
        opened = opened_with(args.model, device, preset="latency", draft_tokens=0)
        asked, requests = prompts(REQUESTS + 1, args.prompt, args.vocab)[1:], []
        for number, ids in enumerate(asked):  # before the passes, which would warm up what the first request needs
            name = f"request {number} of ours"
            requests.append(cases.note(name, lambda ids=ids: run_requests(opened, [ids], args.answer)))
        request = median(found.get("s", float("nan")) for found in requests[1:])
        entry = cases.note("passes of ours", lambda: decode_passes(opened, 1, args.answer - 8, args.prompt, args.vocab))
        ours = 1e3 * entry.get("s_per_pass", float("nan"))
        opened.close()
        del opened
        cases.free()
    for name, case in (("loop", loop_case), ("generate", generate_case)):
        if name in wanted:

            def run(case: Any = case) -> dict[str, Any]:
                found = case(args, device)
                over = {"ours_over_it": ours / found["ms_per_token"], "request_over_it": request / found["request_s"]}
                return {**found, **over}

            cases.note(f"transformers compiled, {name}", run)
            torch._dynamo.reset()
            cases.free()


if __name__ == "__main__":
    main()

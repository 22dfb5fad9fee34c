"""Generating and scoring beyond VRAM: ours beside accelerate's offload, on one GPU under one cap.

    python benchmarks/infer/offload.py --model llama-8b --cap_gib 6.5 --out offload.json
    python benchmarks/infer/offload.py --dry_run            (tiny model, CPU, seconds)

Weights are random (their values do not change the speed of a dense model). Each case prints one JSON line as it ends,
so a run that is cut short keeps what it has. `link_share`: bytes of weights that crossed the link per second of a pass,
over the link's rate measured in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from outcore.common.quantities import GIB, MIB
from outcore.infer import Request, Sampling
from outcore.infer.opening import FoundModel, InferSettings, OpenedModel, open_found
from outcore.model.load import load_model
from outcore.model.settings import ModelSettings

BLOCK_NUMEL = 1 << 22
PROMPT, ANSWER = 512, 128
CASES = ("decode", "many", "score", "repeat", "accelerate")


class Numbers:
    """A tokenizer that is not asked for words."""

    eos_token_id = None
    chat_template = "plain"

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return "." * len(tokens)


class RandomFeed:
    """Values for every parameter, fast: one random block again and again."""

    def __init__(self, model: Any) -> None:
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._block = torch.randn(BLOCK_NUMEL, generator=torch.Generator().manual_seed(0)).mul_(0.02)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._shapes)

    def groups(self) -> Iterator[dict[str, torch.Tensor]]:
        for name, shape in self._shapes.items():
            numel = torch.Size(shape).numel()
            if len(shape) < 2:
                yield {name: torch.ones(shape)}
                continue
            times = -(-numel // BLOCK_NUMEL)
            yield {name: self._block.repeat(times)[:numel].view(shape)}


def find(model: str, precision: str) -> FoundModel:
    """A preset's shape with random values."""
    loaded = load_model(ModelSettings(preset=model, precision=precision, seq_length=2), lazy=True)
    loaded.feed = RandomFeed(loaded.model)
    loaded.model.eval()
    for parameter in loaded.model.parameters():
        parameter.requires_grad_(False)
    return FoundModel(loaded, Numbers(), model, frozenset(), None)


def opened_with(args: argparse.Namespace, device: torch.device, **settings: Any) -> OpenedModel:
    """Our engine with these settings."""
    found = find(args.model, "bf16" if device.type == "cuda" else "fp32")
    more: dict[str, Any] = {"context": 1024, **settings}
    return open_found(found, InferSettings(**more), device, lambda line: print(line, file=sys.stderr))


def prompts(count: int, length: int, vocab: int) -> list[tuple[int, ...]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, vocab, (count, length), generator=generator)
    return [tuple(row) for row in ids.tolist()]


def run_requests(opened: OpenedModel, asked: list[tuple[int, ...]], answer: int) -> dict[str, Any]:
    """Seconds and rates of answering all of them."""
    engine = opened.engine
    sampling = Sampling(temperature=0, max_tokens=answer, ignore_eos=True)
    before, began = engine.counts.passes, time.perf_counter()
    written = sum(
        len(a.tokens) for a in engine.generate(Request(f"{began}-{i}", ids, sampling) for i, ids in enumerate(asked))
    )
    synchronise()
    seconds = time.perf_counter() - began
    return {
        "s": seconds,
        "tokens_per_s": written / seconds,
        "passes": engine.counts.passes - before,
        "s_per_pass": seconds / max(1, engine.counts.passes - before),
    }


def decode_passes(opened: OpenedModel, batch: int, count: int, prompt: int, vocab: int) -> dict[str, Any]:
    """Passes that only write: median seconds, and the share of the link that they reach."""
    engine = opened.engine
    sampling = Sampling(temperature=0, max_tokens=count + 4, ignore_eos=True)
    done: list[Any] = []
    for i, ids in enumerate(prompts(batch, prompt, vocab)):
        engine.submit(Request(f"d{batch}-{i}", ids, sampling), None, done.append)
    times = []
    while len(done) < batch:
        began = time.perf_counter()
        engine.step()
        synchronise()
        if engine.counts.last_pass_rows == batch and engine.num_running == batch:
            times.append(time.perf_counter() - began)
    times.sort()
    middle = times[len(times) // 2] if times else float("nan")
    travelling = opened.placement.travelling_bytes
    return {
        "batch": batch,
        "s_per_pass": middle,
        "tokens_per_s": batch / middle,
        "weights_gb_per_s": travelling / middle / 1e9,
    }


def accelerate_case(args: argparse.Namespace, device: torch.device, batch: int, answer: int) -> dict[str, Any]:
    """accelerate's device_map with offload to RAM, greedy generate."""
    from accelerate import dispatch_model, infer_auto_device_map

    model = find(args.model, "bf16").loaded.model.to(torch.bfloat16)
    feed = RandomFeed(model)
    parameters = dict(model.named_parameters())
    for group in feed.groups():
        for name, value in group.items():
            parameters[name].data = value.to(torch.bfloat16)
    model.config.use_cache = True
    room = int(args.cap_gib * GIB * 0.6)  # weights; the rest for activations and keys and values
    block = type(next(m for m in model.modules() if type(m).__name__.endswith("DecoderLayer"))).__name__
    device_map = infer_auto_device_map(model, {0: room, "cpu": 10**12}, no_split_module_classes=[block])
    model = dispatch_model(model, device_map, main_device=device)
    vocab = args.vocab
    ids = torch.tensor(prompts(batch, args.prompt, vocab), device=device)
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        model.generate(ids[:, :8], max_new_tokens=2, **options)
        synchronise()
        began = time.perf_counter()
        model.generate(ids, max_new_tokens=1, **options)
        synchronise()
        first = time.perf_counter() - began
        began = time.perf_counter()
        model.generate(ids, max_new_tokens=1 + answer, **options)
        synchronise()
        step = (time.perf_counter() - began - first) / answer
    layers_on_gpu = sum(place == 0 for name, place in device_map.items() if ".layers." in name)
    whole = first + step * (args.answer - 1)
    return {
        "batch": batch,
        "layers_on_gpu": layers_on_gpu,
        "prefill_s": first,
        "s_per_token": step,
        "tokens_per_s_decode": batch / step,
        "tokens_per_s_whole": batch * args.answer / whole,
    }


def link_gb_per_s(device: torch.device) -> float:
    """Of pinned copies to the device, best of three."""
    if device.type != "cuda":
        return float("nan")
    host, there = (
        torch.empty(512 * MIB, dtype=torch.uint8, pin_memory=True),
        torch.empty(512 * MIB, dtype=torch.uint8, device=device),
    )
    best = 0.0
    for _ in range(3):
        synchronise()
        began = time.perf_counter()
        there.copy_(host, non_blocking=True)
        synchronise()
        best = max(best, host.nbytes / (time.perf_counter() - began) / 1e9)
    return best


def synchronise() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", help="a preset of outcore.model.presets")
    parser.add_argument("--cap_gib", type=float, default=6.5)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry_run", action="store_true")
    args = parser.parse_args()
    args.prompt, args.answer, args.vocab = PROMPT, ANSWER, 32000
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not args.dry_run else torch.device("cpu")
    if args.dry_run:
        args.model, args.requests, args.prompt, args.answer, args.vocab = "tiny", 6, 24, 8, 200
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(args.cap_gib * GIB / total, device)
    link = link_gb_per_s(device)
    results: list[dict[str, Any]] = []

    def note(case: str, run: Callable[[], dict[str, Any]]) -> None:
        try:
            found = run()
        except Exception as error:  # one case that fails must not take the others along
            found = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"}
        if device.type == "cuda":
            found["peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
            torch.cuda.reset_peak_memory_stats(device)
        if "weights_gb_per_s" in found:
            found["link_share"] = found["weights_gb_per_s"] / link
        entry = {"case": case, "link_gb_per_s": link, **found}
        results.append(entry)
        print(json.dumps(entry), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(results, indent=1))

    wanted = args.cases.split(",")
    if {"decode", "repeat"} & set(wanted):
        opened = opened_with(args, device, preset="latency" if args.dry_run else "balanced", max_sequences=64)
        if "decode" in wanted:
            for batch in (1, 8) if args.dry_run else (1, 8, 64):
                note("decode", lambda b=batch: decode_passes(opened, b, 12, args.prompt, args.vocab))
        if "repeat" in wanted:
            repeated = tuple(prompts(1, 32, args.vocab)[0] * (args.prompt // 32 or 1))
            note("repetitive prompt, guesses on", lambda: run_requests(opened, [repeated], args.answer))
            opened.engine.speculates = False
            note("repetitive prompt, guesses off", lambda: run_requests(opened, [repeated], args.answer))
        opened.close()
    for kv_home in ("auto", "vram") if "many" in wanted else ():
        extra = {} if device.type == "cpu" or kv_home == "auto" else {"kv_home": kv_home}
        if kv_home == "vram" and device.type == "cpu":
            continue
        opened = opened_with(args, device, preset="throughput", **extra)
        asked = prompts(args.requests, args.prompt, args.vocab)
        note(
            f"{args.requests} requests, kv {opened.placement.kv_home}",
            lambda o=opened, a=asked: run_requests(o, a, args.answer),
        )
        opened.close()
    if "score" in wanted:
        opened = opened_with(args, device, preset="throughput", context=4096 if not args.dry_run else 64)
        texts = prompts(16 if not args.dry_run else 3, 4096 if not args.dry_run else 40, args.vocab)

        def score() -> dict[str, Any]:
            began = time.perf_counter()
            opened.engine.score(texts)
            synchronise()
            seconds = time.perf_counter() - began
            return {"s": seconds, "tokens_per_s": sum(map(len, texts)) / seconds}

        note("score", score)
        opened.close()
    gc.collect()
    if "accelerate" in wanted and device.type == "cuda":
        for batch in (1, 8, 32):
            note("accelerate", lambda b=batch: accelerate_case(args, device, b, 8))
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

"""Generating and scoring beyond VRAM: ours beside accelerate and ZeRO-Inference, on one GPU under one cap.

    python benchmarks/infer/offload.py --model llama-8b --cap_gib 6.5 --cases decode,score --out offload.json
    python benchmarks/infer/offload.py --dry_run            (tiny model, CPU, seconds)

Cases: decode (passes that only write, at 1, 8 and 64 answers), many (256 requests of 512 + 128 tokens, keys and values
where the rule puts them), score (4K documents), accelerate, zero (DeepSpeed's ZeRO-Inference: stage 3, parameters in
pinned RAM; start it with `deepspeed`'s variables unset; DS_ACCELERATOR=cpu has a dry run try it), once (decode and many
by one engine, answers of --once_answer tokens: first pass and seconds a token, from which the rate of whole answers
follows for ours as it does for the rivals; for when a GPU is lent for minutes).
Each prints one JSON line as it ends. `link_share`: bytes of weights that crossed the link per second of a pass, over
the link's rate measured in the same run; `share_of_drive`: those read from a drive, over what it gives for reads alone;
`share_of_bound`: the link's seconds, or those of the same layers' bare arithmetic where they are more, over those of
scoring.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import (
    Cases,
    RandomFeed,
    decode_passes,
    device_of,
    drive_gb_per_s,
    find,
    link_gb_per_s,
    opened_with,
    prompts,
    run_requests,
    synchronise,
)

from outcore.common.quantities import GIB
from outcore.infer import Request, Sampling
from outcore.infer.passes import lay_out_texts

PROMPT, ANSWER = 512, 128
CASES = ("decode", "many", "score", "accelerate", "zero", "once")
USUAL = CASES[:-1]
DRY_RAM_GIB = 0.04
"""RAM in which the tiny mixture has no room, so that a dry run reads experts as they are chosen."""


def filled(model: Any, device: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model with random values of bf16, memory of its own. Its buffers stay as they are: rotary tables are fp32."""
    parameters = dict(model.named_parameters())
    for group in RandomFeed(model).groups():
        for name, value in group.items():
            parameters[name].data = value.to(device, torch.bfloat16, copy=True).to(dtype)
    model.config.use_cache = True
    return model.eval()


def generate_times(model: Any, ids: torch.Tensor, answer: int, whole: int, **options: Any) -> dict[str, Any]:
    """A rival's first pass and seconds a token after it, and what `whole` tokens would be written at."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    with torch.inference_mode():
        model.generate(ids[:, :8], max_new_tokens=2, **options)
        times = []
        for count in (1, 1 + answer):
            synchronise()
            began = time.perf_counter()
            model.generate(ids, max_new_tokens=count, **options)
            synchronise()
            times.append(time.perf_counter() - began)
    step = (times[1] - times[0]) / answer
    batch = len(ids)
    return {
        "batch": batch,
        "prefill_s": times[0],
        "s_per_token": step,
        "tokens_per_s_decode": batch / step,
        "tokens_per_s_whole": batch * whole / (times[0] + step * (whole - 1)),
    }


def spread(preset: str, cap_gib: float, device: torch.device) -> tuple[Any, int]:
    """(the model by accelerate's device_map with offload to RAM, its layers on the GPU)."""
    from accelerate import dispatch_model, infer_auto_device_map

    model = filled(find(preset, "bf16").loaded.model, "cpu")
    room = int(cap_gib * GIB * 0.6)  # weights; the rest for activations and keys and values
    block = type(next(m for m in model.modules() if type(m).__name__.endswith("DecoderLayer"))).__name__
    device_map = infer_auto_device_map(model, {0: room, "cpu": 10**12}, no_split_module_classes=[block])
    layers_on_gpu = sum(place == 0 for name, place in device_map.items() if ".layers." in name)
    return dispatch_model(model, device_map, main_device=device), layers_on_gpu


def accelerate_case(args: argparse.Namespace, device: torch.device, batch: int) -> dict[str, Any]:
    """accelerate's device_map with offload to RAM, greedy generate."""
    model, layers_on_gpu = spread(args.model, args.cap_gib, device)
    ids = torch.tensor(prompts(batch, args.prompt, args.vocab), device=device)
    return {"layers_on_gpu": layers_on_gpu, **generate_times(model, ids, 4, args.answer)}


def zero_case(args: argparse.Namespace, device: torch.device, batches: tuple[int, ...]) -> dict[str, Any]:
    """ZeRO-Inference: ZeRO stage 3 without an optimizer, parameters in pinned RAM, fetched ahead."""
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    found = find(args.model, "bf16")
    hidden = found.loaded.config.hidden_size
    config = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "stage3_prefetch_bucket_size": 2 * hidden * hidden,
            "stage3_param_persistence_threshold": hidden,
            "stage3_max_live_parameters": 2 * hidden * hidden,
            "offload_param": {"device": "cpu", "pin_memory": True},
        },
    }
    keep = HfDeepSpeedConfig(config)
    model = filled(found.loaded.model, "cpu")
    deepspeed.init_distributed()
    deepspeed.zero.Init(module=model, config_dict_or_path=config)  # one by one: all at once exceed the device
    for buffer in model.buffers():  # which it leaves where they are
        buffer.data = buffer.data.to(device)
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.module.eval()
    rows = []
    for batch in batches:
        ids = torch.tensor(prompts(batch, args.prompt, args.vocab), device=device)
        rows.append(generate_times(engine.module, ids, 4, args.answer, synced_gpus=False))
    return {"rows": rows, "config": keep.config["zero_optimization"]}


def many_short(opened: Any, args: argparse.Namespace) -> dict[str, Any]:
    """All requests at once: seconds until each has its first token, and a token after that, told as `generate_times`
    tells them. The context while writing is that of the first tokens of an answer, as for the rivals."""
    engine, done = opened.engine, []
    sampling = Sampling(temperature=0, max_tokens=args.once_answer, ignore_eos=True)
    engine.speculates, guesses = False, engine.speculates
    for i, ids in enumerate(prompts(args.requests, args.prompt, args.vocab)):
        engine.submit(Request(f"many-{i}", ids, sampling), None, done.append)
    synchronise()
    began = time.perf_counter()
    first_s, steps = 0.0, []
    while len(done) < args.requests:
        at = time.perf_counter()
        engine.step()
        running = engine.scheduler.running
        if not first_s and len(running) == args.requests and all(s.num_answer for s in running):
            first_s = time.perf_counter() - began
        elif engine.counts.last_pass_rows == args.requests:
            steps.append(time.perf_counter() - at)
    seconds = time.perf_counter() - began
    engine.speculates = guesses
    found: dict[str, Any] = {"requests": args.requests, "answer": args.once_answer, "s": seconds}
    if first_s and steps:
        step = sorted(steps)[len(steps) // 2]
        whole_s = first_s + step * (args.answer - 1)
        found |= {"prefill_s": first_s, "s_per_token": step, "num_steps": len(steps), "whole_s": whole_s}
        found["tokens_per_s_whole"] = args.requests * args.answer / whole_s
        travelling_gb = opened.placement.travelling_bytes / 1e9
        found |= {"travelling_gb": travelling_gb, "weights_gb_per_s": travelling_gb / step}
    return found | {"kv_home": opened.placement.kv_home}


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-8b", help="a preset of outcore.model.presets")
    parser.add_argument("--cap_gib", type=float, default=6.5)
    parser.add_argument("--cases", default=",".join(USUAL))
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--batches", default="1,8,64", help="answers at once, of the case decode")
    parser.add_argument("--max_sequences", type=int, default=64, help="answers that decode has room for")
    parser.add_argument("--decode_passes", type=int, default=28, help="passes that only write, of the case decode")
    parser.add_argument("--rival_batches", default="1,8,32", help="of accelerate and ZeRO-Inference")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of a prompt")
    parser.add_argument("--kv_home", default="auto", help="of the cases many and once")
    parser.add_argument("--once_answer", type=int, default=24, help="tokens of an answer in the case once")
    parser.add_argument("--nvme_path", help="weights that --ram_gib does not hold go there")
    parser.add_argument("--ram_gib", type=float)
    parser.add_argument("--compile", default="auto", help="auto, on or off")
    parser.add_argument("--quantize", help="nf4 or int8: ours with packed weights")
    parser.add_argument("--expert_cache_gib", type=float, help="for experts as they are chosen; 0: with their layers")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry_run", action="store_true")
    args = parser.parse_args()
    args.answer, args.vocab = ANSWER, 32000
    device = device_of(args.cap_gib, dry_run=args.dry_run)
    if args.dry_run:
        args.model, args.requests, args.prompt, args.answer, args.vocab = "tiny", 6, 24, 8, 200
        args.batches, args.rival_batches, args.once_answer = "1,4", "2", 6
        if args.expert_cache_gib is not None:
            args.model, args.nvme_path, args.ram_gib = "tiny-moe", tempfile.gettempdir(), DRY_RAM_GIB
    cases, wanted = Cases(device, args.out), args.cases.split(",")
    if unknown := set(wanted) - set(CASES):
        parser.error(f"unknown case {sorted(unknown)[0]}; there are {', '.join(CASES)}")
    more: dict[str, Any] = {
        "compile": args.compile,
        "quantize": args.quantize,
        "expert_cache_gib": args.expert_cache_gib,
    }
    if args.nvme_path:
        more |= {"nvme_path": (Path(args.nvme_path),), "ram_gib": args.ram_gib}
    if "once" in wanted:
        home = {"kv_home": args.kv_home} if device.type == "cuda" else {}
        many = {"preset": "throughput", "max_sequences": args.requests, "context": 1024 if not args.dry_run else 64}
        began = time.perf_counter()
        opened = opened_with(args.model, device, **many, **home, **more)
        cases.note("opening", lambda: {"s": time.perf_counter() - began})
        for batch in map(int, args.batches.split(",")):
            cases.note("decode", lambda b=batch: decode_passes(opened, b, 16, args.prompt, args.vocab))
        cases.note("many, short answers", lambda: many_short(opened, args))
        opened.close()
        del opened
        cases.free()
    if "decode" in wanted:
        sizes = {"max_sequences": args.max_sequences, "context": max(1024, args.prompt + 64)}
        began = time.perf_counter()
        opened = opened_with(args.model, device, **sizes, **more)
        cases.note("opening", lambda: {"s": time.perf_counter() - began})
        for batch in map(int, args.batches.split(",")):
            cases.note("decode", lambda b=batch: decode(opened, b, args))
        opened.close()
        cases.free()
    if {"many", "score"} & set(wanted):
        home = {"kv_home": args.kv_home} if device.type == "cuda" else {}
        opened = opened_with(
            args.model, device, preset="throughput", context=4096 if not args.dry_run else 64, **home, **more
        )
        if "many" in wanted:
            asked = prompts(args.requests, args.prompt, args.vocab)
            name = f"{args.requests} requests, kv {opened.placement.kv_home}"
            cases.note(name, lambda: run_requests(opened, asked, args.answer))
        if "score" in wanted:
            cases.note("score", lambda: score(opened, args))
        opened.close()
        cases.free()
    rival_batches = tuple(map(int, args.rival_batches.split(",")))
    if "accelerate" in wanted and device.type == "cuda":
        for batch in rival_batches:
            cases.note("accelerate", lambda b=batch: accelerate_case(args, device, b))
            cases.free()
    if "zero" in wanted and (device.type == "cuda" or "DS_ACCELERATOR" in os.environ):
        cases.note("zero", lambda: zero_case(args, device, rival_batches))


def decode(opened: Any, batch: int, args: argparse.Namespace) -> dict[str, Any]:
    """Passes that only write, and where weights lie on a drive the share of its rate that they come at."""
    on_drive = opened.placement.bytes_at("nvme")
    rate = drive_gb_per_s(opened.weights.homes.store) if on_drive else None
    found = decode_passes(opened, batch, args.decode_passes, args.prompt, args.vocab)
    if rate is not None:
        read = on_drive / found["s_per_pass"] / 1e9
        found |= {"on_drive_gb": on_drive / 1e9, "drive_gb_per_s": rate, "share_of_drive": read / rate}
    return found


def score(opened: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Documents of 4K tokens through the model, and the larger of what the link and what arithmetic takes for them."""
    texts = prompts(16 if not args.dry_run else 3, 4096 if not args.dry_run else 40, args.vocab)
    runner, placement = opened.engine.runner, opened.placement
    opened.engine.score(texts[:4])  # as many as share a pass
    synchronise()
    began = time.perf_counter()
    opened.engine.score(texts)
    synchronise()
    seconds = time.perf_counter() - began
    tokens = sum(map(len, texts))
    config = opened.found.loaded.config
    embedding = config.vocab_size * config.hidden_size
    params = sum(part.size_bytes for part in placement.parts) / 2 - embedding
    attention = 2 * config.num_hidden_layers * config.hidden_size * sum(len(text) ** 2 for text in texts)  # causal
    flops = 2 * params * tokens + attention
    bare = bare_s(opened, texts)
    link_s = -(-tokens // runner.limits.score_tokens) * placement.travelling_bytes / link_gb_per_s(opened.device) / 1e9
    found = {"s": seconds, "tokens_per_s": tokens / seconds, "tflops": flops / seconds / 1e12, "link_s": link_s, **bare}
    found["bare_tflops"] = flops / sum(bare.values()) / 1e12
    if opened.device.type == "cuda":
        found["matmul_tflops"] = matmul_tflops(opened.device, 4096, config.hidden_size, config.intermediate_size)
        found["share_of_bound"] = max(link_s, sum(bare.values())) / seconds
    return found


@torch.inference_mode()
def bare_s(opened: Any, texts: list[tuple[int, ...]]) -> dict[str, float]:
    """Seconds of the arithmetic alone: the same layers' code on the same rows back to back, one layer's weights on the
    device for all, nothing travelling; and the head's products, nothing done with the logits."""
    runner, flow = opened.engine.runner, opened.engine.runner.flow
    units, arrival, attention = flow.units, flow.arrival, runner.attention
    cache, attention.cache = attention.cache, None
    layers_s = head_s = 0.0
    try:
        arrival.begin([units.embed, units.layer_units[0], units.head])
        embed = arrival.acquire(0)
        most = max(1, runner.limits.score_tokens // len(texts[0]))  # that share a pass
        groups = [lay_out_texts(texts[at : at + most], 1) for at in range(0, len(texts), most)]
        logs = [
            flow.runner.embed(embed, call.batch(runner.copies)) for call in groups[0]
        ]  # of the others they are alike
        arrival.release(0)
        slab, head = arrival.acquire(1), arrival.acquire(2)
        vocab_size = flow.head.vocab_size
        vocabulary = next(w for w in flow.runner.weights.tensors(units.head, head) if w.shape[0] == vocab_size)
        room = vocabulary.new_empty((512, vocab_size))
        for calls in groups:
            hidden = [log.hidden for log in logs[: len(calls)]]
            synchronise()
            began = time.perf_counter()
            attention.begin([call.tables(runner.copies) for call in calls])
            for layer in range(len(units.layers)):
                for at, log in enumerate(logs[: len(calls)]):
                    hidden[at], _ = flow.runner.layer(0, slab, hidden[at], log.call(0))
                    attention.moved(layer, at)
            synchronise()
            layers_s += time.perf_counter() - began
            began = time.perf_counter()
            for rows in hidden:
                for part in rows[0].split(len(room)):
                    torch.mm(part, vocabulary.t(), out=room[: len(part)])
            synchronise()
            head_s += time.perf_counter() - began
        return {"bare_layers_s": layers_s, "bare_head_s": head_s}
    finally:
        attention.cache = cache
        arrival.abort()


def matmul_tflops(device: torch.device, rows: int, width: int, wider: int) -> float:
    """Of products of a layer's own shape in bf16, back to back: what arithmetic gives at most."""
    left, right = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in ((rows, width), (width, wider)))
    out = torch.empty((rows, wider), device=device, dtype=torch.bfloat16)
    for count in (5, 50):
        synchronise()
        began = time.perf_counter()
        for _ in range(count):
            torch.mm(left, right, out=out)
        synchronise()
    return 2 * rows * width * wider * 50 / (time.perf_counter() - began) / 1e12


if __name__ == "__main__":
    main()

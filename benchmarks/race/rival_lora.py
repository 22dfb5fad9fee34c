"""TrainStream's adapters on a base beyond VRAM, beside `stream_lora.py` with the same flags: seconds a step, memory.

The same preset, adapters and random tokens; random weights; its planner decides which layers stay; the loss in chunks.
With its own headroom of 0.1 it runs out of memory under a cap of 6.5 GiB (8 B, nf4, 4,096 tokens at once).
Prints one JSON line with the names of `stream_lora.py`'s. The base is whole in RAM in 16 bits before it is packed.

    python benchmarks/race/rival_lora.py --preset llama-8b --quantize nf4 --rows 8 --seq_length 1024 --vram_gib 6.5
    python benchmarks/race/stream_lora.py --preset llama-8b --quantize nf4 --rows 8 --seq_length 1024 --vram_gib 6.5 \
        --micro_batches 1

Needs a GPU and the package trainstream, which compiles itself when it is imported first, for minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import race_rivals
import torch
from race_common import DeviceWatch, cap_allocator, rss_bytes, synchronize
from race_ours import fill
from race_rivals import Loss

from outcore.common.quantities import GIB
from outcore.model import LoraSettings
from outcore.model.adapters.lora import apply_lora
from outcore.model.presets import preset_config


def adapted_model(preset: str, lora_r: int, device: str) -> Any:
    """The preset with random bf16 weights in RAM and adapters on its linear layers, layers recomputed."""
    from transformers import AutoModelForCausalLM

    config = preset_config(preset)
    config.use_cache = False
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    model = model.to_empty(device="cpu")
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    fill(model, device)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    adapted = apply_lora(model, LoraSettings(r=lora_r, alpha=32.0, dropout=0.0), seed=0)
    return adapted.train()


def main() -> None:
    """Wrap, warm up with one step (its planner measures in the first ones), time the rest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="llama-8b")
    parser.add_argument("--quantize", choices=("none", "nf4", "int8"), default="none")
    parser.add_argument("--rows", type=int, default=8, help="of a micro-batch")
    parser.add_argument("--micro_batches", type=int, default=1)
    parser.add_argument("--seq_length", type=int, default=1024)
    parser.add_argument("--lora_r", type=int, default=16)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--vram_gib", type=float, default=0.0, help="cap of the allocator")
    parser.add_argument("--headroom", type=float, default=0.1, help="share of the cap that its planner leaves free")
    parser.add_argument("--chunk_tokens", type=int, default=race_rivals.CHUNK_TOKENS, help="of the loss")
    args = parser.parse_args()
    import trainstream

    race_rivals.CHUNK_TOKENS = args.chunk_tokens
    watch = DeviceWatch()
    cap_allocator(args.vram_gib)
    begin_s = time.perf_counter()
    adapted = adapted_model(args.preset, args.lora_r, "cuda")
    base = adapted.get_base_model()
    adapted, optimizer = trainstream.wrap(
        adapted,
        torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-4),
        device="cuda",
        offload=True,
        param_offload="auto",
        activation_offload="auto",
        accumulation_steps=args.micro_batches,
        blocks=base.model.layers,
        quantize=args.quantize,
        vram_headroom=args.headroom,
    )
    loss_of = Loss(base, chunked=True)
    load_s, generator, seconds, losses = time.perf_counter() - begin_s, torch.Generator().manual_seed(0), [], []
    for step in range(args.warm + args.steps):
        ids = [
            torch.randint(2, base.config.vocab_size, (args.rows, args.seq_length), generator=generator).cuda()
            for _ in range(args.micro_batches)
        ]
        begin_s = time.perf_counter()
        for row in ids:
            loss = loss_of(row, row)
            (loss / len(ids)).backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        losses.append(float(loss.detach()))
        print(f"step {step}: {time.perf_counter() - begin_s:.2f} s, loss {losses[-1]:.3f}", flush=True)
        if step >= args.warm:
            seconds.append(time.perf_counter() - begin_s)
    step_s = statistics.median(seconds)
    tokens = args.rows * args.seq_length * args.micro_batches
    print(
        json.dumps(
            {
                "system": f"trainstream {trainstream.__version__}",
                **vars(args),
                "params": sum(p.numel() for p in adapted.parameters()),
                "load_s": round(load_s, 1),
                "step_s": round(step_s, 3),
                "seconds": seconds,
                "tokens_per_s": round(tokens / step_s),
                "rss_training_gib": round(rss_bytes()["VmRSS"] / GIB, 2),
                "peak_rss_gib": round(rss_bytes()["VmHWM"] / GIB, 2),
                "peak_vram_gib": round(watch.stop() / GIB, 2),
                "peak_tensors_gib": round(torch.cuda.max_memory_allocated() / GIB, 2),
            }
        ),
        flush=True,
    )
    os._exit(0)  # its threads have nothing left to do


if __name__ == "__main__":
    main()

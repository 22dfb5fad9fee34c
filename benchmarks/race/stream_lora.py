"""LoRA on a base that does not fit in RAM: step time of the streaming engine, and what the drive did meanwhile.

The base is one random block again and again, packed once, so that filling 60 GB takes as long as copying them; step
time does not depend on dense values, and routers choose evenly. Prints one JSON line: seconds per step and per wait,
bytes read from NVMe per step and the rate that makes, the raw read rate of the same store in the same run, peaks of
RAM, of GPU memory as the driver sees it and of tensors there. `--ram_gib` is the parameters' homes; pinned slots and
the process itself come on top ("rss_training_gib").

    python benchmarks/race/stream_lora.py --preset qwen3-32b --ram_gib 46 --nvme /drive/folder --steps 4
    python benchmarks/race/stream_lora.py --preset llama-70b --quantize nf4 --seq_length 1024 --rows 1 --micro_batches 1
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from infer.common import RandomFeed, drive_gb_per_s, link_gb_per_s
from race_common import DeviceWatch, bare_s, cap_allocator, kernels_of, rss_bytes

from outcore.common.quantities import GIB, MIB
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.decision.homes import MOST_PINNED_OF_RAM
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.parts import discover_units, needs_of_parts
from outcore.formats import QUANTIZE_CHOICES
from outcore.machine.host import available_ram_bytes
from outcore.model import LoadedModel, LoraSettings, ModelSettings, load_model
from outcore.model.adapters.lora import apply_lora
from outcore.model.forward import MATMULS
from outcore.sizing.training import Pins, TrainingLimits, place_training

BF16_BYTES = 2


def bytes_beside_weights(loaded: LoadedModel, settings: StreamSettings) -> int:
    """Gradients, states and activation checkpoints, as train_model.py counts them against its budget."""
    assert settings.step_tokens is not None
    hidden = loaded.facts.hidden_size
    needs = needs_of_parts(discover_units(loaded), settings.states, settings.step_tokens, hidden)
    limits = TrainingLimits(ram_bytes=0, pins=Pins(0), checkpoints_in_ram=settings.activations == "ram")
    placed = place_training(needs, limits)
    return placed.homes - placed.weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3-32b")
    room = parser.add_mutually_exclusive_group()
    room.add_argument("--ram_budget_gib", type=float, default=52.0, help="RAM for everything that has its home there")
    room.add_argument("--ram_gib", type=float, help="RAM for the parameters' homes alone")
    parser.add_argument("--nvme", help="folder on the drive for the rest; without one all is in RAM")
    parser.add_argument("--quantize", choices=QUANTIZE_CHOICES, help="pack the base")
    parser.add_argument("--read_ahead_mib", type=int, default=512)
    parser.add_argument("--staging_gib", type=float, help="pinned memory at most; else as a run has it")
    parser.add_argument("--activations", choices=("device", "ram", "nvme"), default="ram")
    parser.add_argument("--rows", type=int, default=2, help="of a micro-batch")
    parser.add_argument("--micro_batches", type=int, default=4)
    parser.add_argument("--seq_length", type=int, default=2048)
    parser.add_argument("--lora_r", type=int, default=16)
    parser.add_argument("--lora_target_modules", default="auto")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--vram_gib", type=float, help="cap of the allocator")
    parser.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--matmul", choices=MATMULS, default=MATMULS[0])
    parser.add_argument("--layers", type=int, help="fewer layers, for a quick try")
    parser.add_argument("--kernels", type=int, help="measure so many kernels of a last step, those of the most time")
    parser.add_argument("--bound", action="store_true", help="measure the link's and the arithmetic's seconds as well")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    watch = DeviceWatch() if device == "cuda" else None  # before anything of this process is on the device
    cap_allocator(arguments.vram_gib or 0)
    overrides = {"num_hidden_layers": arguments.layers} if arguments.layers else {}
    model = ModelSettings(
        preset=arguments.preset,
        precision="bf16",
        seq_length=arguments.seq_length,
        lora=LoraSettings(r=arguments.lora_r, target_modules=arguments.lora_target_modules),
        config_overrides=overrides,
        quantize=arguments.quantize,
    )
    staging_bytes = available_ram_bytes() // MOST_PINNED_OF_RAM
    if arguments.staging_gib is not None:
        staging_bytes = int(arguments.staging_gib * GIB)
    begin_s = time.perf_counter()
    loaded = load_model(model, lazy=True)
    feed = RandomFeed(loaded.model, loaded.quantize)
    loaded = replace(loaded, feed=feed, packed=feed.specs)
    settings = StreamSettings(
        nvme_path=arguments.nvme,
        activations=arguments.activations,
        staging_bytes=staging_bytes,
        weight_read_ahead_bytes=arguments.read_ahead_mib * MIB,
        compile=arguments.compile,
        matmul=arguments.matmul,
        step_tokens=(arguments.rows * arguments.seq_length,) * arguments.micro_batches,
    )
    if arguments.ram_gib is not None:
        weight_ram_bytes = int(arguments.ram_gib * GIB)
    else:
        weight_ram_bytes = int(arguments.ram_budget_gib * GIB) - bytes_beside_weights(loaded, settings)
        if weight_ram_bytes < 0:
            parser.error(f"--ram_budget_gib {arguments.ram_budget_gib:g} does not hold what is not parameters")
    if arguments.nvme is not None:
        settings = replace(settings, weight_ram_bytes=weight_ram_bytes)
    engine = build_stream_engine(loaded, settings, device=device)
    try:
        print(engine.describe(), flush=True)
        load_s = time.perf_counter() - begin_s
        generator = torch.Generator().manual_seed(0)
        shape = (arguments.rows, arguments.seq_length)
        seconds, stalls = [], []

        def batches() -> list[dict[str, torch.Tensor]]:
            count, vocabulary = range(arguments.micro_batches), loaded.facts.vocab_size
            ids = [torch.randint(2, vocabulary, shape, generator=generator) for _ in count]
            return [{"input_ids": row, "labels": row} for row in ids]

        for step in range(arguments.steps + 1):
            given = batches()
            begin_s = time.perf_counter()
            result = engine.train_step(given, 1e-4)
            engine._parts.updates.drain()
            print(f"step {step}: {time.perf_counter() - begin_s:.2f} s, {result.phase_s}", flush=True)
            if step:  # the first one compiles
                seconds.append(time.perf_counter() - begin_s)
                stalls.append(result.phase_s.get("stall_nvme", 0.0))
        if arguments.kernels:
            for row in kernels_of(lambda: engine.train_step(batches(), 1e-4), arguments.kernels):
                print("{:9.2f} ms {:5d} x {}".format(*row), flush=True)
        weights, lanes = engine._parts.homes.weights, engine._parts.drive_lanes
        read_bytes = sum(lane.moved_bytes for lane in lanes) / (arguments.steps + 1)
        step_s = statistics.median(seconds)
        found = {
            **vars(arguments),
            "params": loaded.facts.total_params,
            "load_s": round(load_s, 1),
            "step_s": round(step_s, 3),
            "stall_nvme_s": round(statistics.median(stalls), 3),
            "tokens_per_s": round(sum(settings.step_tokens or ()) / step_s),
            "weights_ram_gib": round(weights.ram_bytes / GIB, 2),
            "weights_nvme_gib": round(weights.nvme_bytes / GIB, 2),
            "nvme_read_gb_per_step": round(read_bytes / 1e9, 2),
            "nvme_gb_per_s": round(read_bytes / step_s / 1e9, 2),
            "raw_gb_per_s": round(drive_gb_per_s(engine._parts.homes.weights.store), 2) if lanes else None,
            "rss_training_gib": round(rss_bytes()["VmRSS"] / GIB, 2),
            "peak_rss_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, 2),
            "peak_vram_gib": round(watch.stop() / GIB, 2) if watch is not None else None,
            "peak_tensors_gib": round(torch.cuda.max_memory_allocated() / GIB, 2) if watch is not None else None,
        }
    finally:
        engine.close()
    if arguments.bound:
        config = loaded.model.config
        once_bytes = (2 - config.tie_word_embeddings) * BF16_BYTES * config.vocab_size * config.hidden_size
        travels_bytes = 2 * weights.ram_bytes - once_bytes
        rate = link_gb_per_s(torch.device(device))
        found |= {"link_gb_per_s": round(rate, 1), "link_s": round(travels_bytes / rate / 1e9, 3)}
        lora = LoraSettings(r=arguments.lora_r, target_modules=arguments.lora_target_modules)
        cut = (arguments.rows, arguments.seq_length, arguments.micro_batches)
        found["bare_s"] = round(bare_s(config, *cut, device, lambda whole: apply_lora(whole, lora, 0)), 3)
        found["share_of_bound"] = round(max(found["link_s"], found["bare_s"]) / step_s, 3)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

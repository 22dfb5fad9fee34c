"""Child of `stream_race.py`: the streaming engine on one variant, given as JSON. See there."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from race_common import (
    FILL_STEP,
    FILL_VALUES,
    DeviceWatch,
    bare_s,
    cap_allocator,
    config_of,
    drive_bytes,
    finish,
    kernels_of,
    rss_bytes,
    synchronize,
    token_batches,
)
from race_variants import FAR, SMALL

from outcore.engine.base import StepResult
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.engine import StreamEngine
from outcore.engine.stream.settings import StreamSettings
from outcore.model import LoadedModel
from outcore.model.facts import model_class_of, model_facts
from outcore.model.trial.abilities import check_abilities


def random_model(options: dict[str, Any], device: str, *, with_values: bool = True) -> LoadedModel:
    """The shape in bf16 on the CPU, matrices normal with deviation 0.02, the rest as its constructor makes it.

    One block of random values is made on the device and copied into every matrix from another place on, by all cores:
    20 GB take seconds, of which most make pages real. Without values it takes no memory."""
    config = config_of(options["shape"], options["seq"])
    with torch.device("meta"):
        model = model_class_of(config)._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    real = model.to_empty(device="cpu")
    real.model.rotary_emb = type(real.model.rotary_emb)(config)
    if with_values:
        fill(real, device)
    real.train()
    return LoadedModel(real, config, model_facts(real), check_abilities(config, "sdpa"), options["shape"])


def fill(model: torch.nn.Module, device: str) -> None:
    """Random values from one block made on the device."""
    torch.manual_seed(0)
    largest = max(p.numel() for p in model.parameters())
    block = torch.randn(min(FILL_VALUES, largest), device=device, dtype=torch.bfloat16).mul_(0.02).cpu()
    turn = 0
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1:
                for piece in p.view(-1).split(len(block)):
                    turn = (turn + FILL_STEP) % len(block)
                    head = min(len(piece), len(block) - turn)
                    piece[:head].copy_(block[turn : turn + head])
                    piece[head:].copy_(block[: len(piece) - head])
            else:
                p.fill_(1.0 if "norm" in name else 0.0)


def main() -> None:
    """Build, warm up, time `steps` steps between two points at which nothing is pending."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    watch = DeviceWatch() if device == "cuda" else None
    cap_allocator(options.get("cap_gib", 0))
    begin_s = time.perf_counter()
    loaded = random_model(options, device)
    fill_s = time.perf_counter() - begin_s
    print(f"weights filled after {fill_s:.1f} s", flush=True)  # a run that is cut short tells where
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    batches = token_batches(options)  # on the CPU, as a loader gives them
    rows = [batch["input_ids"] for batch in batches]
    sizes = {"step_tokens": tuple(row.numel() for row in rows), "row_tokens": max(row.shape[1] for row in rows)}
    settings = StreamSettings(**{**sizes, **options.get("settings", {})})
    engine = build_stream_engine(loaded, settings, device=device)
    init_s = time.perf_counter() - begin_s
    print(f"engine ready after {init_s:.1f} s\n{engine.describe()}", flush=True)
    result = {
        "params": sum(unit.layout.num_params for unit in engine._parts.units.all),
        "fill_s": fill_s,
        "init_s": init_s,
        **measured(engine, batches, options, watch),
    }
    turns = {}
    for name, turn in options.get("turns", {}).items():
        use_idle_memory(engine, turn)
        turns[name] = measured(engine, batches, options | {"warm": options["turn_warm"]}, watch)
        print(name, json.dumps(turns[name]), flush=True)  # what was measured stays where time ends
    result |= {"turns": turns} if turns else {}
    if options.get("kernels"):
        result["kernels"] = kernels_of(lambda: engine.train_step(batches, 1e-4), options["kernels"])
    if watch is not None:
        watch.stop()
    engine.close()
    if options.get("bound"):
        cut = (options["mb"], options["seq"], options["gas"])
        if device == "cuda":  # what follows takes more
            result["torch_peak_bytes"] = torch.cuda.max_memory_allocated()
            result["torch_reserved_bytes"] = torch.cuda.max_memory_reserved()
        result["bare_s"] = bare_s(config_of(options["shape"], options["seq"]), *cut, device)
    finish(result)


def use_idle_memory(engine: StreamEngine, turn: dict[str, Any]) -> None:
    """From the next step on; what stayed on the device goes home, and it is decided anew after two steps."""
    residents = engine._parts.residents
    engine._drain()
    residents.forget()
    residents._limit_bytes = turn.get("resident_bytes", 0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measured(
    engine: StreamEngine, batches: list[dict[str, torch.Tensor]], options: dict[str, Any], watch: DeviceWatch | None
) -> dict[str, Any]:
    """Seconds of a step after `warm` steps, losses, memory and traffic."""
    parts = engine._parts
    if watch is not None:
        watch.restart()
    learning_rate, clips_each, numbers = options.get("learning_rate", 1e-4), options.get("clips_each"), count()

    def train_step() -> StepResult:
        if clips_each:
            clips = next(numbers) % clips_each == 0
            engine.settings = replace(engine.settings, max_grad_norm=SMALL if clips else FAR)
        return engine.train_step(batches, learning_rate)

    warm_losses = [train_step().loss for _ in range(options["warm"])]
    parts.updates.drain()
    synchronize()
    repeats, losses, phases = [], [], []
    before = drive_bytes(options.get("nvme"))
    if watch is not None:
        watch.use_pct.clear()
    for _ in range(options["repeats"]):
        start_s = time.perf_counter()
        for _ in range(options["steps"]):
            step = train_step()
            losses.append(step.loss)
            phases.append(step.phase_s)
        parts.updates.drain()
        synchronize()
        repeats.append((time.perf_counter() - start_s) / options["steps"])
    after = drive_bytes(options.get("nvme"))
    use_pct = watch.use_pct if watch is not None else []
    n_steps = options["steps"] * options["repeats"]
    print(f"residents: {parts.residents.words()}", flush=True)
    return {
        "step_s": sorted(repeats)[len(repeats) // 2],
        "repeats_s": repeats,
        "warm_losses": warm_losses,
        "losses": losses,
        "phases": {k: sum(p.get(k, 0.0) for p in phases) / n_steps for k in phases[0]},
        "gpu_use_pct": sum(use_pct) / len(use_pct) if use_pct else None,
        "peak_vram_bytes": None if watch is None else watch.peak_bytes,
        "torch_peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        "rss_training": rss_bytes(),
        "drive_bytes_per_step": {k: (after[k] - before[k]) / n_steps for k in after} if before and after else None,
        "residents": {"layers": parts.residents.num_held, "bytes": parts.residents.device_bytes},
    }


if __name__ == "__main__":
    main()

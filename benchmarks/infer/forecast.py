"""Ten different runs in one process, each beside what the plan said of it: tokens a second, bytes of VRAM.

    python benchmarks/infer/forecast.py --out forecast.json
    python benchmarks/infer/forecast.py --dry_run            (tiny model, CPU, seconds)

Rates of the machine are measured first (link, device memory, matrix products); the rest is the profile's, or of the
data sheet. Each run opens a shape with random weights anew and answers prompts; `over` is measured seconds over those
forecast before it began, `passes_over` over those of the passes as they were, `vram_over` peak bytes over placed ones.
Asked: within 20 % and 10 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch
from common import Cases, device_of, opened_with, prompts, run_requests, synchronise
from offload import matmul_tflops

from outcore.infer.opening import AgainstPlan
from outcore.plan import Hardware, load_hardware, plan_of

RUNS: tuple[tuple[str, dict[str, Any], int, int, int], ...] = (
    ("llama-1b", {"vram_gib": 1.5, "preset": "latency", "context": 1024}, 1, 512, 24),
    ("llama-1b", {"vram_gib": 1.5, "preset": "balanced", "context": 1024}, 16, 256, 24),
    ("llama-1b", {"vram_gib": 2.0, "preset": "throughput", "context": 1024}, 64, 128, 24),
    ("llama-1b", {"vram_gib": 2.0, "preset": "latency", "context": 8192, "kv_home": "ram"}, 1, 6000, 16),
    ("llama-1b", {"preset": "latency", "context": 1024}, 1, 512, 64),
    ("llama-1b", {"preset": "balanced", "context": 1024}, 32, 256, 32),
    ("qwen3-4b", {"vram_gib": 3.5, "preset": "latency", "context": 1024}, 1, 512, 16),
    ("qwen3-4b", {"vram_gib": 3.5, "preset": "throughput", "context": 1024}, 128, 256, 16),
    ("llama-3b", {"vram_gib": 5.0, "preset": "balanced", "context": 1024}, 8, 512, 24),
    ("llama-3b", {"vram_gib": 3.0, "preset": "balanced", "context": 1024, "kv_format": "int8"}, 8, 512, 16),
)
"""(shape, settings, answers at once, tokens of a prompt, tokens of an answer)."""
PACKED_RUNS: tuple[tuple[str, dict[str, Any], int, int, int], ...] = (
    ("llama-8b", {"vram_gib": 3.0, "quantize": "nf4", "preset": "latency", "context": 1024}, 1, 512, 24),
    ("llama-8b", {"vram_gib": 3.0, "quantize": "nf4", "preset": "balanced", "context": 1024}, 8, 256, 24),
    ("llama-8b", {"vram_gib": 4.0, "quantize": "int8", "preset": "throughput", "context": 1024}, 64, 128, 16),
    ("qwen3-4b", {"vram_gib": 2.0, "quantize": "int8", "preset": "latency", "context": 1024}, 1, 512, 24),
    ("llama-3b", {"quantize": "nf4", "preset": "balanced", "context": 1024}, 8, 256, 32),
)
"""The same for packed weights."""


def hardware_here(cases: Cases) -> Hardware:
    """This machine with what was just measured."""
    found = load_hardware(allow_nominal=True)
    if cases.device.type == "cpu":
        return found
    left = torch.empty(1 << 30, dtype=torch.uint8, device=cases.device)
    right = torch.empty_like(left)
    for _ in range(3):
        synchronise()
        began = time.perf_counter()
        for _ in range(10):
            right.copy_(left)
        synchronise()
    memory = 10 * 2 * left.nbytes / (time.perf_counter() - began) / 1e9
    del left, right
    torch.cuda.empty_cache()
    tflops = matmul_tflops(cases.device, 1024, 4096, 14336)
    rates = {"h2d_gb_per_s": cases.link_gb_per_s, "device_memory_gb_per_s": memory, "compute_tflops": tflops}
    return dataclasses.replace(found, **rates)


def one_run(
    hardware: Hardware, device: torch.device, model: str, settings: dict[str, Any], batch: int, prompt: int, answer: int
) -> dict[str, Any]:
    """Open, answer once so that every size is captured, answer again beside the plan."""
    opened = opened_with(model, device, **settings)
    opened.engine.speculates = False
    loaded, placement = opened.found.loaded, opened.placement
    itemsize = next(loaded.model.parameters()).dtype.itemsize
    plan = plan_of(model, loaded.config, hardware, placement, itemsize)
    asked = prompts(batch, prompt, loaded.facts.vocab_size)
    run_requests(opened, asked, 4)
    opened.engine.scheduler.cache.clear_prefixes()
    told = AgainstPlan(opened, plan)
    before_s = plan.first_token_s(batch * prompt) + (answer - 1) * plan.decode(batch, prompt).seconds
    found = run_requests(opened, asked, answer)
    facts = told.facts()
    row = {
        "model": model,
        "settings": settings,
        "answers": batch,
        "tokens_per_s": found["tokens_per_s"],
        "forecast_tokens_per_s": batch * answer / before_s,
        "over": found["s"] / before_s,
        "passes_over": facts.get("measured_over_forecast"),
        "binds": plan.decode(batch, prompt).binding,
        "kv_home": placement.kv_home,
        "words": told.words(),
    }
    if "vram_peak_bytes" in facts:
        row["vram_over"] = facts["vram_peak_bytes"] / facts["vram_placed_bytes"]
        row["vram_gb"] = [facts["vram_placed_bytes"] / 1e9, facts["vram_peak_bytes"] / 1e9]
    opened.close()
    return row


def main() -> None:
    """Run all ten."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit_s", type=float, default=105.0, help="runs that would begin later are left out")
    parser.add_argument(
        "--packed", action="store_true", help="five runs with packed weights instead of the ten in 16 bits"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry_run", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    device = device_of(1e6, dry_run=args.dry_run)
    cases = Cases(device, args.out)
    hardware = hardware_here(cases)
    runs = PACKED_RUNS if args.packed else RUNS
    if args.dry_run:
        packed = {"quantize": "nf4"} if args.packed else {}
        runs = tuple(("tiny", {"context": 128, **packed}, batch, 24, 6) for batch in (1, 2, 4))
    rows = []
    for number, (model, settings, batch, prompt, answer) in enumerate(runs):
        if time.perf_counter() - began > args.limit_s:
            print(f"left out from run {number} on")
            break
        ran = (hardware, device, model, settings, batch, prompt, answer)
        rows.append(cases.note(f"run {number}", lambda r=ran: one_run(*r)))
        cases.free()
    for name, asked in (("over", 0.2), ("passes_over", 0.2), ("vram_over", 0.1)):
        values = [row[name] for row in rows if row.get(name) is not None]
        within = sum(abs(value - 1) <= asked for value in values)
        print(f"{name}: {within} of {len(values)} within {asked:.0%}: {', '.join(f'{value:.2f}' for value in values)}")


if __name__ == "__main__":
    main()

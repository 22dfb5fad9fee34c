"""Ten different runs in one process, each beside what the plan said of it: tokens a second, bytes of VRAM.

    python benchmarks/infer/forecast.py --out forecast.json
    python benchmarks/infer/forecast.py --dry_run            (tiny model, CPU, seconds)

Rates of the machine are measured first (link, device memory, matrix products; before each run how fast the host
launches, which other programs of a shared host slow by half from minute to minute; the drive's by the run that reads
from it); the rest is the profile's, or of the data sheet. Each run opens a shape with random weights anew, fills the
largest passes that it has room for (`vram_over`: bytes taken, with what graphs keep, over those placed), answers
prompts once so that every size is captured (but from a drive: in part), and again beside the plan. `over` is measured
seconds over those forecast before it began, `passes_over` over those of the passes as they were; `first` and `decode`
are passes that read prompts and that only write, each [milliseconds measured, forecast, what binds]. Asked: within 20 %
and 10 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import Cases, device_of, drive_gb_per_s, opened_with, prompts, run_requests, synchronise
from offload import matmul_tflops

from outcore.common.quantities import GB, GIB, MIB
from outcore.infer import Request, Sampling
from outcore.infer.opening import AgainstPlan, OpenedModel, plan_as_opened, taken_bytes
from outcore.plan import Hardware, load_hardware
from outcore.probe.bench.host import measure_host

Run = tuple[str, dict[str, Any], int, int, int]
RUNS: tuple[Run, ...] = (
    ("llama-1b", {"vram_gib": 1.5, "preset": "latency", "context": 1024}, 1, 512, 24),
    ("llama-1b", {"vram_gib": 1.5, "preset": "balanced", "context": 2048}, 16, 256, 16),
    ("llama-1b", {"vram_gib": 1.75, "preset": "throughput", "context": 1024}, 64, 256, 12),
    ("llama-1b", {"vram_gib": 2.0, "preset": "latency", "context": 8192, "kv_home": "ram"}, 1, 6000, 16),
    ("llama-1b", {"preset": "latency", "context": 1024}, 1, 512, 64),
    ("llama-1b", {"preset": "balanced", "context": 1024}, 32, 256, 32),
    ("llama-1b", {"vram_gib": 1.5, "preset": "latency", "context": 1024, "cpu_tokens": 0}, 1, 512, 16),
    ("llama-1b", {"vram_gib": 1.5, "preset": "balanced", "context": 1024, "ram_gib": 0.3, "nvme_path": ()}, 8, 128, 6),
    ("llama-3b", {"vram_gib": 3.0, "preset": "balanced", "context": 2048, "kv_format": "int8"}, 8, 448, 16),
    ("llama-3b", {"vram_gib": 3.5, "preset": "throughput", "context": 512}, 64, 256, 12),
)
"""(shape, settings, answers at once, tokens of a prompt, tokens of an answer). What binds: the CPU beside the link, the
link, the link with keys and values, these and long prompts, launches, choosing tokens, the link alone, the drive, and
a larger shape with keys and values in 8 bits, and with large passes. `nvme_path` is the command line's."""
PACKED_RUNS: tuple[Run, ...] = (
    ("llama-3b", {"vram_gib": 2.0, "quantize": "nf4", "preset": "latency", "context": 1024}, 1, 512, 24),
    ("llama-3b", {"vram_gib": 2.0, "quantize": "nf4", "preset": "balanced", "context": 2048}, 8, 448, 16),
    ("llama-3b", {"vram_gib": 2.5, "quantize": "int8", "preset": "throughput", "context": 512}, 64, 256, 12),
    ("llama-1b", {"vram_gib": 1.4, "quantize": "int8", "preset": "latency", "context": 1024}, 1, 512, 24),
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


def filled_bytes(opened: OpenedModel, prompt: int, vocab: int) -> dict[str, int]:
    """Bytes of VRAM, by what fills the largest pass: prompts whose answers are drawn with likelihoods, a text that is
    scored, tokens that graphs run."""
    engine, placement, found = opened.engine, opened.placement, dict[str, int]()
    count, most = placement.max_sequences, placement.context_tokens - 4
    length = min(most, max(prompt, -(-placement.pass_tokens // count)))
    drawn = Sampling(temperature=1, seed=1, max_tokens=2, ignore_eos=True, logprobs=2)
    texts = prompts(count, length, vocab)

    def answer() -> None:
        list(engine.generate(Request(f"fill-{number}", ids, drawn) for number, ids in enumerate(texts)))

    def score() -> None:
        with torch.inference_mode():
            engine.runner.score([texts[0][: placement.chunk_tokens]], num_top=2)

    for name, fill in (
        ("answers", answer),
        ("scores", score),
        ("graphs", lambda: engine.pass_s(placement.pass_size().graph_rows)),
    ):
        if opened.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(opened.device)
        fill()
        found[name] = taken_bytes(opened.device) if opened.device.type == "cuda" else 0
    engine.scheduler.cache.clear_prefixes()
    return found


def held_mib(device: torch.device) -> dict[str, int]:
    """Blocks of 4 MiB and more that are in use, by their MiB, and what graphs keep beside."""
    held: Counter[str] = Counter()
    for segment in torch.cuda.memory_snapshot() if device.type == "cuda" else ():
        pool = "graphs " if tuple(segment["segment_pool_id"]) != (0, 0) else ""
        for block in segment["blocks"]:
            if block["size"] >= 4 * MIB and block["state"] == "active_allocated":
                held[f"{pool}{block['size'] / MIB:.1f}"] += 1
        if pool:
            held["graphs, free"] += (segment["total_size"] - segment["allocated_size"]) // MIB
    return dict(held)


class Passes:
    """Hears of each pass beside the plan."""

    def __init__(self, told: AgainstPlan, opened: OpenedModel) -> None:
        self._told, self.rows, opened.engine.on_pass = told, list[tuple[int, bool, float, float, str]](), self.passed

    def passed(self, works: Sequence[Any], seconds: float) -> None:
        """Note (tokens, whether it read prompts, seconds measured, forecast, what binds)."""
        before_s = self._told.measured_s
        self._told.passed(works, seconds)
        tokens, said = sum(work.count for work in works), self._told.last_forecast
        assert said is not None
        reads = tokens > len(works) or not all(work.is_last for work in works)
        self.rows.append((tokens, reads, self._told.measured_s - before_s, said.seconds, said.binding))

    def facts(self) -> dict[str, Any]:
        """What they took, and what was forecast."""

        def told(rows: list[tuple[int, bool, float, float, str]], of: Any) -> list[Any]:
            measured, forecast = (round(1000 * of(row[at] for row in rows), 2) for at in (2, 3))
            return [measured, forecast, Counter(row[4] for row in rows).most_common(1)[0][0]]

        reads, writes = ([row for row in self.rows if row[1] == is_first] for is_first in (True, False))
        return {
            "first": told(reads, sum) if reads else None,
            "decode": told(writes, median) if writes else None,
            "by_pass": [(row[0], round(1000 * row[2], 1), round(1000 * row[3], 1), row[4]) for row in self.rows],
        }


def one_run(
    hardware: Hardware, device: torch.device, model: str, settings: dict[str, Any], batch: int, prompt: int, answer: int
) -> dict[str, Any]:
    """Open, fill, answer once so that every size is captured, answer again beside the plan."""
    began = time.perf_counter()
    opened = opened_with(model, device, **{"max_sequences": batch, "draft_tokens": 0, **settings})
    loaded, placement, opened_s = opened.found.loaded, opened.placement, time.perf_counter() - began
    if placement.bytes_at("nvme"):
        hardware = dataclasses.replace(hardware, drive_read_gb_per_s=drive_gb_per_s(opened.weights.homes.store))
    if device.type == "cuda":
        hardware = dataclasses.replace(hardware, host_layer_s=measure_host(device, 1.0))
    plan = plan_as_opened(opened, hardware)
    vocab = loaded.facts.vocab_size
    filled = filled_bytes(opened, prompt, vocab)
    asked = prompts(batch, prompt, vocab)
    run_requests(opened, asked, 4 if placement.bytes_at("nvme") else answer)
    opened.engine.scheduler.cache.clear_prefixes()
    told = AgainstPlan(opened, plan)
    passes = Passes(told, opened)
    before_s, decode = plan.answers_s(batch, prompt, answer), plan.decode(batch, prompt)
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
        "kv_home": placement.kv_home,
        "words": told.words(),
        "opened_s": opened_s,
        "host_layer_ms": 1000 * hardware.host_layer_s,
        "calls_of": [placement.pass_tokens, placement.chunk_tokens],
        "decode_terms_ms": {name: round(1000 * s, 2) for name, s in {**decode.terms, **decode.between}.items()},
        **passes.facts(),
    }
    if device.type == "cuda":
        placed = facts["vram_placed_bytes"]
        row["vram_over"] = max(*filled.values(), facts["vram_peak_bytes"]) / placed
        row["vram_gib"] = {"placed": placed / GIB, **{name: size / GIB for name, size in filled.items()}}
        row["held_mib"] = held_mib(device)
    if placement.bytes_at("nvme"):
        rate = placement.bytes_at("nvme") / (median(p[2] for p in passes.rows if not p[1]) * GB)
        row |= {"drive_gb_per_s": hardware.drive_read_gb_per_s, "share_of_drive": rate / hardware.drive_read_gb_per_s}
    opened.close()
    return row


def main() -> None:
    """Run all ten."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit_s", type=float, default=140.0, help="runs that would begin later are left out")
    parser.add_argument(
        "--packed", action="store_true", help="five runs with packed weights instead of the ten in 16 bits"
    )
    parser.add_argument("--only", help="numbers of runs, with commas between; all unless given")
    parser.add_argument("--nvme_path", type=Path, default=Path(tempfile.gettempdir()) / "outcore-forecast")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dry_run", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    device = device_of(1e6, dry_run=args.dry_run)
    cases = Cases(device, args.out)
    hardware = hardware_here(cases)
    runs = PACKED_RUNS if args.packed else RUNS
    wanted = set(range(len(runs))) if args.only is None else set(map(int, args.only.split(",")))
    if args.dry_run:
        packed = {"quantize": "nf4"} if args.packed else {}
        runs = tuple(("tiny", {"context": 128, **packed}, batch, 24, 6) for batch in (1, 2, 4))
        runs += (("tiny", {"context": 128, "ram_gib": 0.003, "nvme_path": ()}, 2, 24, 6),) if not args.packed else ()
    rows = []
    for number, (model, settings, batch, prompt, answer) in enumerate(runs):
        if number not in wanted:
            continue
        if time.perf_counter() - began > args.limit_s:
            print(f"left out from run {number} on")
            break
        settings = {**settings, **({"nvme_path": (str(args.nvme_path),)} if "nvme_path" in settings else {})}
        ran = (hardware, device, model, settings, batch, prompt, answer)
        rows.append(cases.note(f"run {number}", lambda r=ran: one_run(*r)))
        cases.free()
    for name, asked in (("over", 0.2), ("passes_over", 0.2), ("vram_over", 0.1)):
        values = [row[name] for row in rows if row.get(name) is not None]
        within = sum(abs(value - 1) <= asked for value in values)
        print(f"{name}: {within} of {len(values)} within {asked:.0%}: {', '.join(f'{value:.2f}' for value in values)}")


if __name__ == "__main__":
    main()

"""Every expectation with its verdict: writes docs/expectations.md from raw results and the planner's forecasts.

    python benchmarks/expectations.py             (prints the page)
    python benchmarks/expectations.py --write

A row is judged by what its file under benchmarks/results/ says; where nothing was run, by a forecast, and then it says
so. A test fails when the page is not what this writes. `stream_race.py --group expectations` and
`race_ranks.py --case 10b-split8` make the runs of November 2026 that are named `expectations-*`.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from outcore.common.quantities import GB, GIB, format_count
from outcore.machine.offload import FREE_RESERVE, SPACE_SAFETY
from outcore.plan import RunRequest, choose_or_change, load_hardware
from outcore.plan.answer.efficiency import ait_optimizer, ait_parameters, efficiency, efficiency_lines
from outcore.plan.answer.guide import family_shape
from outcore.plan.constants import VRAM_RESERVE_BYTES
from outcore.plan.record import Plan
from outcore.sizing.shape import ModelShape, shape_from_fields
from outcore.sizing.states import STATE_FORMATS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "expectations.md"
LAPTOP = "rtx4070-laptop"
HOLDS, FAILS, FORECAST = "holds", "does not hold", "forecast"
WITHIN = 1.2
"""What "within 20 %" allows of the other's seconds."""


@dataclass(frozen=True)
class Verdict:
    """One row of the page."""

    asked: str
    verdict: str
    found: str
    sources: tuple[str, ...] = ()
    """Files under benchmarks/results/; (): the planner alone."""


MADE = {
    "gds_report-h200.json": "H200, 20 November",
    "rivals-h100-1.2b-16k.json": "H100, 24 November",
    "stream_race-h200-ram.json": "H200, 21 November",
    "stream_race-h200-4096tokens.json": "H200, 22 November",
    "stream_race-h200-nvme-fifth.json": "H200, 23 November",
    "tiling-h200.json": "H200, 23 November",
    "expectations-h100-10b.json": "H100, 25 November",
    "expectations-h100-64k.json": "H100, 24 November",
    "ranks-h100x2-10b-split8.json": "two H100s, 25 November",
}
"""Raw result -> card and day (2026) of its run; the commit that brought it: git log --diff-filter=A."""


@cache
def raw(name: str) -> Any:
    """A raw result."""
    return json.loads((RESULTS / name).read_text())


def ran(name: str, variant: str) -> dict[str, Any]:
    """One variant of a race; KeyError where it failed."""
    found = raw(name)["results"][variant]
    if "step_s" not in found:
        raise KeyError(f"{variant} of {name} failed: {found}")
    return found


def judged(holds: bool) -> str:
    return HOLDS if holds else FAILS


def latency() -> Verdict:
    name = "gds_report-h200.json"
    seconds = raw(name)["latency"]["median_s"]
    sizes = [size for size in seconds["plain"] if int(size) >= 1 << 20]

    def lower(path: str) -> float:
        return statistics.median(1 - seconds[path][size] / seconds["plain"][size] for size in sizes)

    largest = sizes[-1]
    found = (
        f"from 1 MiB on the staged path is {lower('staged'):.0%} lower (median of sizes; {int(largest) >> 20} MiB: "
        f"{1 - seconds['staged'][largest] / seconds['plain'][largest]:.0%}), kvikio {lower('kvikio'):.0%}; 4 KiB takes "
        f"{seconds['staged']['4096'] / seconds['plain']['4096']:.1f} and "
        f"{seconds['kvikio']['4096'] / seconds['plain']['4096']:.1f} times as long as plain copies"
    )
    return Verdict(
        "A transfer takes 30 % less time than by plain copies", judged(lower("staged") >= 0.3), found, (name,)
    )


def link() -> Verdict:
    name, laptop = "gds_report-h200.json", load_hardware(LAPTOP)
    report = raw(name)
    share = report["links"]["h2d_gb_per_s"] / report["pcie"]["line_rate_gb_per_s"]
    found = (
        f"{laptop.h2d_gb_per_s:g} GB/s from the data sheet; on PCIe 5.0 x16 pinned copies reached {share:.2f} of the "
        f"line's rate, so up to {share * 15.754:.1f}: the upper end asks for all of it"
    )
    return Verdict("12-16 GB/s over PCIe 4.0 x8", FORECAST, found, (name,))


def drive() -> Verdict:
    name = "gds_report-h200.json"
    links = raw(name)["links"]
    read, write = links["drive_read_gb_per_s"], links["drive_write_gb_per_s"]
    both = links["drive_mixed_gb_per_s"]
    found = f"read {read:.1f}, written {write:.1f}, both at once {both:.1f} GB/s; slower drives are warned of"
    return Verdict("The drive gives more than 2 GB/s", judged(min(read, write) > 2), found, (name,))


def infinity_in_ram() -> Verdict:
    capped, free = "rivals-h100-1.2b-16k.json", "stream_race-h200-ram.json"
    ours, zero2 = ran(capped, "ours-fp32-clip"), ran(capped, "zero2-one-clip")
    whole, resident = ran(free, "ours-fp32-clip"), ran(free, "zero2-clip")
    found = (
        f"1.2 B, 16,384 tokens: {ours['step_s']:.2f} s a step against {zero2['step_s']:.2f} of ZeRO-2 with its "
        f"optimizer in RAM; {whole['step_s']:.2f} against {resident['step_s']:.2f} of ZeRO-2 (eager) that holds all "
        f"{resident['peak_vram_bytes'] / GB:.0f} GB on the GPU"
    )
    holds = ours["step_s"] <= WITHIN * zero2["step_s"] and whole["step_s"] <= WITHIN * resident["step_s"]
    return Verdict("Infinity within 20 % of ZeRO-2, everything in RAM", judged(holds), found, (capped, free))


def infinity_on_nvme() -> Verdict:
    drive, gpu = "stream_race-h200-nvme-fifth.json", "stream_race-h200-ram.json"
    ours, zero2 = ran(drive, "ours-split-nvme"), ran(gpu, "zero2-clip")
    moved = sum(ours["drive_bytes_per_step"].values())
    rate = statistics.mean(ours["drive_rates_bytes_per_s"])
    tokens = 16384 * moved / rate / zero2["step_s"] / WITHIN
    found = (
        f"1.2 B, 16,384 tokens, lossless states on the drive: {ours['step_s']:.1f} s against {zero2['step_s']:.2f} of "
        f"ZeRO-2 on the GPU: the drive moves {moved / GB:.0f} GB whatever the batch, so it takes about "
        f"{round(tokens, -4):,.0f} tokens a step on such a GPU (forecast)"
    )
    return Verdict("The same, states on NVMe", judged(ours["step_s"] <= WITHIN * zero2["step_s"]), found, (drive, gpu))


def shape_of(hidden: int, layers: int, ffn: int, heads: int, vocab: int, name: str) -> ModelShape:
    fields = {
        "vocab_size": vocab, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": ffn, "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return shape_from_fields(name, "llama", fields)


TEN_B = shape_of(4096, 45, 14336, 32, 32000, "10b")


def plan_of(shape: ModelShape, request: RunRequest, **machine: Any) -> Plan:
    """The plan on the laptop with these capacities instead of its own; checkpoints go to another drive."""
    hardware = replace(load_hardware(LAPTOP), **machine)
    return choose_or_change(shape, replace(request, checkpoints_elsewhere=True), hardware).plan


def under_2_gb() -> Verdict:
    name = "expectations-h100-10b.json"
    run = ran(name, "ours-10b-2gb")
    request = RunRequest(engine="stream", state_format="split8", max_grad_norm=0.0, seq_length=512, micro_batch=1)
    plan = plan_of(TEN_B, request, vram_bytes=2 * 10**9 + VRAM_RESERVE_BYTES, ram_bytes=120 * GIB)
    taken = plan.used_bytes("vram") - VRAM_RESERVE_BYTES
    found = (
        f"{format_count(run['params'])}, 8-bit moments, layers in tiles, 512 tokens a step: {run['step_s']:.1f} s, "
        f"torch held {run['torch_reserved_bytes'] / GB:.2f} GB of VRAM, "
        f"{run['rss_training']['VmHWM'] / GIB:.0f} GiB of RAM. With what CUDA takes for "
        f"itself {taken / GB:.2f} GB by forecast (not read in this run)"
    )
    holds = run["losses"][-1] < run["losses"][0] and run["torch_reserved_bytes"] < 0.95 * GIB and taken < 2 * GB
    return Verdict("Less than 2 GB of VRAM for a model of 10 B", judged(holds), found, (name,))


def words(plan: Plan) -> str:
    return "fits" if plan.fits else "does not fit"


def two_cards() -> Verdict:
    name = "ranks-h100x2-10b-split8.json"
    (run,), tokens = raw(name)["runs"], raw(name)["tokens"]
    plan = plan_of(TEN_B, RunRequest(engine="stream"), vram_bytes=11 * GIB, ram_bytes=240 * GIB, num_gpus=2)
    found = (
        f"8-bit moments, {tokens:,} tokens a step, eager: {run['step_s']:.1f} s, {max(run['vram_bytes']) / GIB:.1f} "
        f"GiB of each card in all, {run['ram_bytes'] / GIB:.0f} GiB of RAM; with lossless states it {words(plan)}, "
        f"{plan.tier('ram').used_bytes / GIB:.0f} GiB of RAM (forecast)"
    )
    holds = run["ranks"] == 2 and max(run["vram_bytes"]) < 11e9 and run["losses"][-1] < run["losses"][0]
    return Verdict("10 B, hidden size 4,096, on two cards of 11 GB", judged(holds), found, (name,))


def by_kind(kind: str, request: RunRequest, rank: int) -> Verdict:
    said = []
    for hidden in (7936, 9984):  # 52 B, 101 B
        shape = family_shape(hidden)
        plan = plan_of(shape.with_lora(rank) if rank else shape, request)
        time = f", {plan.time.step_s / 60:.1f} min a step" if plan.fits else f", short of {shortest(plan)}"
        said.append(f"{format_count(shape.total_params)} {words(plan)}{time}")
    return Verdict(f"50-100 B on the laptop: {kind}", FORECAST, "; ".join(said))


def shortest(plan: Plan) -> str:
    missing = {tier.tier: tier.short_bytes for tier in plan.tiers if tier.short_bytes}
    tier = max(missing, key=lambda name: missing[name])
    return f"{missing[tier] / GB:,.0f} GB of {'the drive' if tier == 'nvme' else tier.upper()}"


def wide_layer() -> Verdict:
    name, narrower = "expectations-h100-64k.json", "tiling-h200.json"
    run, tiled = ran(name, "ours-64k-layer"), raw(narrower)["tiled"]["result"]
    learns = run["losses"][-1] < run["warm_losses"][0]
    whole = shape_of(65536, 1, 4 * 65536, 512, 2048, "64k")
    request = RunRequest(engine="stream", state_format="fp24_m8", max_grad_norm=0.0, micro_batch=1, accumulation=1)
    plan = plan_of(whole, request, ram_bytes=10**13)
    found = (
        f"two matrices of 65,536 x 65,536 and a narrow MLP ({format_count(run['params'])}) trained in "
        f"{run['torch_peak_bytes'] / GIB:.1f} GiB of VRAM and {run['rss_training']['VmHWM'] / GIB:.0f} of RAM, "
        f"{run['step_s']:.0f} s a step; 16,384 with its own MLP in {tiled['torch_peak_bytes'] / GIB:.1f}. 65,536 "
        f"with an MLP of four times that ({format_count(plan.params)}) {words(plan)} by forecast, in "
        f"{plan.tier('ram').used_bytes / GIB:,.0f} GiB of RAM"
    )
    holds = learns and run["torch_peak_bytes"] < 6.5 * GIB
    return Verdict("One layer of hidden size 64K by tiles", judged(holds), found, (name, narrower))


def space() -> Verdict:
    lossless, compact = (sum(STATE_FORMATS[name]) + 2 for name in ("split", "split8"))
    said = [f"{SPACE_SAFETY * lossless * n:,.0f} ({SPACE_SAFETY * compact * n:,.0f})" for n in (1, 10, 100)]
    found = (
        f"{', '.join(said)} GB with lossless states (8-bit moments), {lossless:g} ({compact:.0f}) B a parameter x "
        f"{SPACE_SAFETY:g}, when parameters and states are all there; {FREE_RESERVE:.0%} of what is free stays free, "
        "checkpoints come on top"
    )
    return Verdict("NVMe space for 1, 10 and 100 B", FORECAST, found)


def use() -> Verdict:
    name = "stream_race-h200-ram.json"
    compute, clipped, free = (ran(name, v)["step_s"] for v in ("plain-compiled", "ours-fp32-clip", "ours-fp32"))
    drive = "stream_race-h200-nvme-fifth.json"
    nvme = ran(drive, "ours-split-nvme")["step_s"]
    wide = "expectations-h100-64k.json"
    tiled = ran(wide, "ours-64k-layer")
    found = (
        f"share of a step in which its computing alone would be done (1.2 B, 16,384 tokens): "
        f"{min(1, compute / free):.0%} in RAM, {compute / clipped:.0%} with exact clipping, {compute / nvme:.0%} with "
        f"all states on the drive; kernels ran {tiled['gpu_use_pct']:.0f}% of the time in a layer of 64K by tiles"
    )
    return Verdict("The GPU is busy", judged(compute / clipped > 0.5), found, (name, drive, wide))


def curves() -> list[str]:
    """The paper's formula beside runs of ours; its peak is what the same layers reach when nothing is moved."""
    ram, few, nvme = "stream_race-h200-ram.json", "stream_race-h200-4096tokens.json", "stream_race-h200-nvme-fifth.json"
    compute_s, params = ran(ram, "plain-compiled")["step_s"], ran(ram, "ours-fp32")["params"]
    peak = 8 * params * 16384 / compute_s
    links = raw("gds_report-h200.json")["links"]
    link = min(links["h2d_gb_per_s"], links["d2h_gb_per_s"]) * GB
    states = links["ram_gb_per_s"] * GB
    lines = [
        "| run of 1.2 B | parameters, gradients | optimizer states | both | measured |",
        "|---|---:|---:|---:|---:|",
    ]
    for said, file, variant, tokens in (
        ("16,384 tokens, RAM", ram, "ours-fp32", 16384),
        ("16,384 tokens, RAM, clipping", ram, "ours-fp32-clip", 16384),
        ("4,096 tokens, RAM", few, "ours-fp32", 4096),
        ("16,384 tokens, states on NVMe, clipping", nvme, "ours-split-nvme", 16384),
    ):
        run = ran(file, variant)
        home = statistics.mean(run["drive_rates_bytes_per_s"]) if "drive_rates_bytes_per_s" in run else states
        weights, optimizer = (
            efficiency(ait_parameters(tokens, 1), link, peak), efficiency(ait_optimizer(tokens, 1), home, peak)
        )  # fmt: skip
        both = 1 / (1 / weights + 1 / optimizer - 1)
        measured = compute_s * tokens / 16384 / run["step_s"]
        lines.append(
            f"| {said} ([raw]({link_to(file)})) | {weights:.0%} | {optimizer:.0%} | {both:.0%} | {measured:.0%} |"
        )
    return lines


def link_to(name: str) -> str:
    return f"../benchmarks/results/{name}"


FULL = RunRequest(engine="stream")
ROWS: tuple[Callable[[], Verdict], ...] = (
    latency,
    link,
    drive,
    infinity_in_ram,
    infinity_on_nvme,
    under_2_gb,
    two_cards,
    lambda: by_kind("full training, lossless", FULL, 0),
    lambda: by_kind("full training, compact", replace(FULL, state_format="split8", max_grad_norm=0.0), 0),
    lambda: by_kind("LoRA r 16", FULL, 16),
    wide_layer,
    space,
    use,
)
"""The rows in order."""


@cache
def verdicts() -> tuple[Verdict, ...]:
    """All rows, judged."""
    return tuple(row() for row in ROWS)


def page() -> str:
    """The whole document."""
    lines = [
        "# What was expected, and what is so",
        "",
        "`python benchmarks/expectations.py --write` writes this page from the raw results that it names and",
        "from the planner; a test fails when it is not current. **Forecast** means that nobody ran it: the planner's",
        "answer, on the laptop unless the row says otherwise, checkpoints on another drive. Runs of ours had torch's",
        "allocator capped at 6.5 GiB. All in November 2026.",
        "",
        "| expectation | verdict | found | source |",
        "|---|---|---|---|",
    ]
    for it in verdicts():
        raws = "; ".join(f"[{MADE[name]}]({link_to(name)})" for name in it.sources)
        lines.append(f"| {it.asked} | **{it.verdict}** | {it.found} | {raws or 'planner'} |")
    lines += [
        "",
        "## The ZeRO-Infinity paper's efficiency",
        "",
        "Share of the peak by the formulas of [planning](planning.md#the-zero-infinity-papers-model) with the rates of",
        "the H200 (`both`: one transfer after the other) beside what our steps reached of the same layers' rate when",
        "nothing is moved. The paper lets nothing overlap and moves 16 B of states a parameter each way; ours overlap,",
        "and move 9.",
        "",
        *curves(),
        "",
        f"On the laptop, by `outcore plan --efficiency --machine {LAPTOP}` (without `--machine`: on this machine as it",
        "was measured):",
        "",
        "```text",
        *efficiency_lines(load_hardware(LAPTOP)),
        "```",
    ]
    return re.sub(r"(\d)%", r"\1 %", "\n".join(lines)) + "\n"


def main() -> int:
    """Print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    if parser.parse_args().write:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

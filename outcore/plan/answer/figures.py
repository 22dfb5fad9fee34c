"""Pictures of plans: stacked bars per tier against capacity, and the curves of the ZeRO-Infinity paper's model.

matplotlib with the Agg backend, no display needed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from outcore.common.quantities import GB, GIB, format_count, format_s
from outcore.machine.offload import SPACE_SAFETY
from outcore.plan.answer.efficiency import ait_activations, ait_optimizer, ait_parameters, efficiency
from outcore.plan.choose import PlanAnswer
from outcore.plan.hardware import Hardware
from outcore.plan.record import Plan
from outcore.plan.terms.case import CHECKPOINTS

# Okabe and Ito's palette, told apart by people with colour-blindness too.
CATEGORIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "parameters": ("#0072B2", ("parameters", "gathered", "adapters")),
    "gradients": ("#E69F00", ("gradient", "fp32 gradients")),
    "master": ("#009E73", ("master", "states of Muon")),
    "moments": ("#56B4E9", ("moments",)),
    "activations and logits": ("#CC79A7", ("activation", "logits", "masks", "attention")),
    "staging and buffers": (
        "#F0E442",
        ("slots", "bucket", "optimizer swap", "parameter swap", "ring of", "read ahead"),
    ),
    "DeepSpeed's copies": ("#D55E00", ("DeepSpeed", "parameters kept")),
    "framework and reserve": ("#999999", ("framework", "page cache")),
    "checkpoints": ("#BBBBBB", (CHECKPOINTS,)),
    "safety factor": ("#EEEEEE", ("safety",)),
}
FAR_BELOW = 0.4
"""Below this share of the capacity, its line is not drawn: the bars would be too small to read."""
RED = "#B00000"
TALLEST = 2.0
"""Bars are cut at this many capacities, with the whole amount written above."""


def save_bars(answer: PlanAnswer, hardware: Hardware, path: Path) -> None:
    """Every stage's VRAM, RAM and drive by part against the machine, as a PNG. OSError when it cannot be written."""
    rows = [*answer.stages.items(), *([("stream", answer.stream)] if answer.stream else [])]
    figure = Figure(figsize=(14.5, 6.4), dpi=110, layout="constrained")
    axes = figure.subplots(1, 3)
    used: set[str] = set()
    for ax, tier, title, unit, capacity in (
        (axes[0], ("vram",), "VRAM, GiB", GIB, hardware.vram_bytes),
        (axes[1], ("ram", "pinned"), "RAM with pinned, GiB", GIB, hardware.ram_bytes),
        (axes[2], ("nvme",), "NVMe, GB", GB, answer.plan.tier("nvme").capacity_bytes),
    ):
        _bars(ax, rows, tier, title, unit, capacity, used)
    legend = [
        Patch(facecolor=color, edgecolor="#555555", label=name)
        for name, (color, _) in CATEGORIES.items()
        if name in used
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=5, fontsize=10, frameon=False)
    plan = answer.plan
    adapters = f", LoRA r {plan.lora_r}" if plan.lora_r else ""
    best = f"best: {plan.title}, {format_s(plan.time.step_s)} a step" if plan.fits else "nothing fits as asked"
    figure.suptitle(
        f"{plan.model} ({format_count(plan.params)} parameters{adapters}) on {hardware.name} - {best} (forecast)",
        fontsize=13,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def category(part_name: str) -> str:
    """The category that a part is drawn in."""
    special = [name for name, (_, words) in CATEGORIES.items() if any(w in part_name for w in words)]
    if "activation checkpoints" in part_name:
        return "activations and logits"
    # Longest match wins where several fit: 'parameter swap buffers' are buffers, 'DeepSpeed's ... copies' are copies.
    order = ("DeepSpeed's copies", "staging and buffers", "safety factor", "checkpoints", *CATEGORIES)
    return next(name for name in order if name in special) if special else "framework and reserve"


def _bars(
    ax: Axes, rows: list[tuple[str, Plan]], tiers: tuple[str, ...], title: str, unit: int, capacity: int, used: set[str]
) -> None:
    top = TALLEST * capacity / unit
    tallest = 0.0
    for index, (_, plan) in enumerate(rows):
        sizes: dict[str, int] = {}
        for part in plan.parts:
            if part.tier in tiers:
                sizes[category(part.name)] = sizes.get(category(part.name), 0) + part.size_bytes
        if tiers == ("nvme",):
            states = sum(size for name, size in sizes.items() if name != "checkpoints")
            sizes["safety factor"] = int((SPACE_SAFETY - 1) * states)
        bottom = 0.0
        for name, (color, _) in CATEGORIES.items():
            size = sizes.get(name, 0) / unit
            if size <= 0:
                continue
            used.add(name)
            drawn = max(0.0, min(size, top - bottom))
            if drawn > 0:
                ax.bar(index, drawn, bottom=bottom, color=color, edgecolor="#555555", linewidth=0.5, width=0.7)
            bottom += size
        whole = sum(sizes.values()) / unit
        over = whole > capacity / unit
        tallest = max(tallest, min(whole, top))
        text = f"{whole:,.0f}" if whole >= 10 else f"{whole:.1f}"
        ax.annotate(
            f"{text}{' ↑' if whole > top else ''}", (index, min(whole, top)), xytext=(0, 2),
            textcoords="offset points", ha="center", va="bottom", fontsize=9,
            color=RED if over else "#222222", fontweight="bold" if over else "normal",
            bbox={"facecolor": "white", "alpha": 0.75, "edgecolor": "none", "pad": 0.5},
        )  # fmt: skip
    near = tallest * unit > FAR_BELOW * capacity
    if capacity and near:
        ax.axhline(capacity / unit, color=RED, linestyle="--", linewidth=1.4)
    there = f"{capacity / unit:,.0f} {'usable' if tiers == ('nvme',) else 'there'}"
    ax.set_title(f"{title}: {there}" + ("" if near or not capacity else ", far above"))
    highest = max(tallest, capacity / unit if near else 0.0)
    ax.set_ylim(0, highest * 1.12 if highest else 1)
    ax.set_xticks(range(len(rows)), [name for name, _ in rows])
    ax.tick_params(axis="x", labelsize=10)
    ax.grid(axis="y", alpha=0.3)
    ax.set_axisbelow(True)


def save_paper_curves(path: Path) -> None:
    """Efficiency against bandwidth as in figure 3 of arXiv 2104.07857 (sequence 1,024, 70 TFLOPS per GPU), as a PNG."""
    figure = Figure(figsize=(14.5, 4.6), dpi=110, layout="constrained")
    axes = figure.subplots(1, 3)
    batches = (1, 2, 4, 8, 16)
    _curves(axes[0], "parameters and gradients", (1, 1000), [(f"batch {b}", ait_parameters(1024, b)) for b in batches])
    _curves(axes[1], "optimizer states", (1, 4000), [(f"batch {b}", ait_optimizer(1024, b)) for b in batches])
    widths = (2048, 4096, 8192, 16384, 32768, 65536)
    _curves(axes[2], "activation checkpoints", (0.1, 64), [(f"width {h // 1024}K", ait_activations(h)) for h in widths])
    figure.suptitle(
        "Efficiency without overlap = ait x bw / (ait x bw + peak), after the ZeRO-Infinity paper", fontsize=13
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _curves(ax: Axes, title: str, span_gb_per_s: tuple[float, float], curves: list[tuple[str, float]]) -> None:
    low, high = span_gb_per_s
    points = [low * (high / low) ** (i / 200) for i in range(201)]
    shades: Callable[[float], tuple[float, float, float, float]] = matplotlib.colormaps["viridis"]
    for index, (label, ait) in enumerate(curves):
        share = [100 * efficiency(ait, gb * GB) for gb in points]
        ax.plot(points, share, label=label, color=shades(0.9 * index / max(1, len(curves) - 1)), linewidth=1.8)
    ax.set_title(title)
    ax.set_xscale("log")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda gb, _: f"{gb:g}"))
    ax.set_xlabel("bandwidth per GPU, GB/s")
    ax.set_ylabel("% of peak")
    ax.set_ylim(0, 100)
    ax.axhline(50, color="#999999", linewidth=0.8, linestyle=":")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=9, loc="lower right")

"""`gds_report.png`: bandwidth against block size for every link, with the limits drawn in, and latency by size.

Three panels: the drive and the lanes; host <-> GPU (on a machine without GPU: memory bandwidth by threads); latency.
matplotlib with the Agg backend, no display needed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from outcore.common.quantities import GIB, KIB, MIB
from outcore.machine import pcie_gb_per_s
from outcore.probe.bench.measurement import Measurement
from outcore.probe.report.record import Measured

# Okabe and Ito's palette: told apart by people with colour-blindness too.
BLUE, ORANGE, GREEN, RED, PURPLE = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7"
SKY, GREY = "#56B4E9", "#777777"
DRIVE_STYLES = {
    "drive_read": ("drive read", BLUE, "o"),
    "drive_write": ("drive write", ORANGE, "s"),
    "drive_mixed": ("read + write at once", PURPLE, "^"),
}
COPY_STYLES = {
    ("h2d", "default"): ("to GPU, pinned", BLUE, "o"),
    ("h2d", "write-combined"): ("to GPU, write-combined", SKY, "D"),
    ("h2d", "pageable"): ("to GPU, pageable", GREY, "o"),
    ("d2h", "default"): ("from GPU, pinned", ORANGE, "s"),
    ("d2h", "pageable"): ("from GPU, pageable", "#BBBBBB", "s"),
}
PATH_STYLES = {"plain": (GREY, "x"), "staged": (BLUE, "o"), "kvikio": (PURPLE, "^"), "gds": (GREEN, "D")}


def save_plot(findings: Measured, path: Path) -> None:
    """Draws the report's figures into a PNG; OSError when it cannot be written."""
    figure = Figure(figsize=(15.5, 5.6), dpi=110, layout="constrained")
    drive, host, latency = figure.subplots(1, 3, width_ratios=(1.15, 1.0, 1.0))
    _draw_drive(drive, findings)
    if any(m.link == "h2d" for m in findings.measurements):
        _draw_copies(host, findings)
    else:
        _draw_ram(host, findings)
    _draw_latency(latency, findings)
    gpu = findings.machine.gpus[0].name if findings.machine.gpus else "no GPU"
    figure.suptitle(f"{findings.machine.cpu_name}, {gpu}: data takes the path “{findings.verdict.path}”", fontsize=13)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_drive(axes: Axes, findings: Measured) -> None:
    axes.set_title("Drive and lanes")
    main = findings.main_drive()
    for link, style in DRIVE_STYLES.items():
        _curve(axes, (m for m in (main.measurements if main else ()) if m.link == link), *style)
    if main is not None and main.line_rate_gb_per_s:
        rate = main.line_rate_gb_per_s
        axes.axhline(rate, color="black", linestyle=":", linewidth=1.4, label=f"PCIe link of the drive: {rate:.1f}")
    staging = findings.staging
    for rate, label, color in (
        (staging.up_gb_per_s if staging else 0.0, _lane_label("drive to GPU", findings), GREEN),
        (staging.down_gb_per_s if staging else 0.0, _lane_label("GPU to drive", findings), RED),
    ):
        if rate > 0:
            axes.axhline(rate, color=color, linewidth=1.6, linestyle="--", label=f"{label} through lanes: {rate:.2f}")
    _finish(axes, "block size")
    if not axes.lines:
        _say(axes, "not measured")


def _draw_copies(axes: Axes, findings: Measured) -> None:
    axes.set_title("Host and GPU")
    for kind, style in COPY_STYLES.items():
        _curve(axes, (m for m in findings.measurements if (m.link, m.engine) == kind), *style)
    two_way = [m.gb_per_s for m in findings.measurements if m.link == "both_ways"]
    if two_way:
        axes.axhline(max(two_way), color=GREEN, linestyle="--", linewidth=1.6, label=f"both ways: {max(two_way):.1f}")
    link = findings.pcie
    line_rate = pcie_gb_per_s(link.pcie_gen, link.pcie_width) if link else None
    if link is not None and line_rate:
        name = f"PCIe gen {link.pcie_gen} x{link.pcie_width} line rate: {line_rate:.1f}"
        axes.axhline(line_rate, color="black", linestyle=":", linewidth=1.4, label=name)
    _finish(axes, "chunk size")


def _draw_ram(axes: Axes, findings: Measured) -> None:
    axes.set_title("Memory bandwidth of the CPU (triad)")
    points = {m.depth: m.gb_per_s for m in findings.measurements if m.link == "ram"}
    if not points:
        _say(axes, "not measured")
        return
    names = [f"{count} thread{'s' if count > 1 else ''}" for count in points]
    bars = axes.bar(names, list(points.values()), color=BLUE, width=0.4)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set_ylim(0, 1.18 * max(points.values()))
    axes.set_ylabel("GB/s")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _draw_latency(axes: Axes, findings: Measured) -> None:
    axes.set_title("Latency of one transfer from the drive")
    result = findings.latency
    if result is None or not any(result.median_s.values()):
        _say(axes, "not measured")
        return
    for path, row in result.median_s.items():
        color, marker = PATH_STYLES.get(path, (RED, "v"))
        label = "plain read + copy" if path == "plain" else path
        axes.plot(list(row), [s * 1e6 for s in row.values()], color=color, marker=marker, label=label, markersize=6)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _size(size)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us / 1e3:g} ms" if us >= 1e3 else f"{us:g} us"))
    axes.set_xlabel("size")
    axes.grid(which="major", alpha=0.3)
    axes.legend(loc="upper left", fontsize=9, framealpha=0.9)


def _finish(axes: Axes, what: str) -> None:
    """Log sizes below, GB/s from zero at the left, room above the curves for the legend."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _size(size)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(what)
    axes.set_ylabel("GB/s")
    rows = len(axes.get_legend_handles_labels()[0])
    axes.set_ylim(0, max(axes.dataLim.y1, 0.1) * (1.12 + 0.075 * rows))
    axes.grid(alpha=0.3)
    if rows:
        axes.legend(loc="upper left", fontsize=9, framealpha=0.9)


def _curve(axes: Axes, measurements: Iterable[Measurement], label: str, color: str, marker: str) -> None:
    """The best rate at each block size, over engines and depths."""
    best: dict[int, float] = {}
    for m in measurements:
        best[m.block_bytes] = max(best.get(m.block_bytes, 0.0), m.gb_per_s)
    if best:
        sizes = sorted(best)
        axes.plot(sizes, [best[size] for size in sizes], color=color, marker=marker, label=label, markersize=6)


def _lane_label(words: str, findings: Measured) -> str:
    return words if findings.machine.gpus else words.replace("GPU", "memory")


def _say(axes: Axes, words: str) -> None:
    axes.text(0.5, 0.5, words, ha="center", va="center", transform=axes.transAxes, color=GREY, fontsize=12)
    axes.set_xticks([])
    axes.set_yticks([])


def _size(n_bytes: float) -> str:
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if n_bytes >= unit:
            return f"{n_bytes / unit:g} {name}"
    return f"{n_bytes:g} B"

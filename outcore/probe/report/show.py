"""The findings as text for a terminal: ladder, verdict, links, staging, latency, settings with reasons, warnings."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from outcore.common.quantities import KIB, MIB, format_gb, format_gib, format_s
from outcore.probe.bench.drive import drive_rate
from outcore.probe.report.record import Measured

LINK_NAMES = {
    "drive_read": "drive read",
    "drive_write": "drive write",
    "drive_mixed": "drive, reads and writes at once (sum)",
    "h2d": "RAM to GPU, pinned",
    "d2h": "GPU to RAM, pinned",
    "both_ways": "RAM and GPU both ways (sum)",
    "pageable_to_gpu": "RAM to GPU, pageable, by threads",
    "drive_to_gpu": "drive to {device}",
    "gpu_to_drive": "{device} to drive",
    "ram": "CPU memory (triad)",
    "peer": "GPU to GPU",
}
STATES = {"yes": "yes", "no": "NO", "unknown": "?", "info": "-"}


def render(found: Measured, width: int | None = None) -> str:
    """The whole report as text, wrapped to the terminal."""
    width = width or min(140, max(72, shutil.get_terminal_size((110, 24)).columns))
    parts = [
        _heading("GPUDirect Storage"),
        _table([[row.step, STATES[row.state], row.found] for row in found.ladder], width),
        _verdict(found, width),
        _heading("Links"),
        _links(found),
        *_staging(found, width),
        *_latency(found),
        _heading("Recommended settings"),
        _settings(found, width),
    ]
    if found.skipped:
        parts += [_heading("Left out"), _bullets(found.skipped, width)]
    parts += [_heading("Warnings"), _bullets(found.warnings or ["none"], width)]
    parts.append(_written(found))
    return "\n".join(parts)


def _written(found: Measured) -> str:
    """Bytes that the run wrote to the drives: measuring is wear."""
    total = sum(drive.written_bytes for drive in found.drives)
    rates = ", ".join(f"{drive.target} {drive_rate(drive, 'drive_read'):.2f} GB/s read" for drive in found.drives)
    return (
        f"{format_gb(total)} written to the drive(s) by this test; {rates}" if found.drives else "no drive was measured"
    )


def _heading(words: str) -> str:
    return f"\n{words}\n{'-' * len(words)}"


def _bullets(lines: Sequence[str], width: int) -> str:
    return "\n".join(textwrap.fill(line, width, initial_indent="- ", subsequent_indent="  ") for line in lines)


def _table(rows: list[list[str]], width: int) -> str:
    """Columns aligned, the last one wrapped."""
    columns = [max(len(row[index]) for row in rows) for index in range(len(rows[0]) - 1)]
    lead = sum(columns) + 2 * len(columns)
    lines = []
    for row in rows:
        first = "  ".join(cell.ljust(size) for cell, size in zip(row, columns, strict=False)) + "  "
        lines.append(textwrap.fill(row[-1], max(width, lead + 30), initial_indent=first, subsequent_indent=" " * lead))
    return "\n".join(lines)


def _verdict(found: Measured, width: int) -> str:
    verdict = found.verdict
    lines = ["", f"Verdict: {verdict.path}. {verdict.headline}"]
    notes = [f"because {reason}" for reason in verdict.reasons]
    by_reasons: dict[tuple[str, ...], list[str]] = {}
    for path, reasons in verdict.why_not.items():
        by_reasons.setdefault(reasons, []).append(path)
    notes += [f"not {' or '.join(paths)}: {'; '.join(reasons)}" for reasons, paths in by_reasons.items()]
    notes += [f"what would change it: {change}" for change in verdict.would_change]
    return "\n".join([*lines, _bullets(notes, width)])


def _links(found: Measured) -> str:
    device = "GPU" if found.machine.gpus else "memory"
    lines = [
        f"{LINK_NAMES[link].format(device=device):<40} {rate:8.2f} GB/s"
        for link, rate in found.link_rates().items()
        if rate is not None
    ]
    for drive in found.drives:
        name = f"4 KiB reads per second, {drive.iops_depth} at once"
        lines.append(f"{name:<40} {drive.iops_4k:8.0f}  {drive.target}")
    if found.pcie is not None and found.pcie.pcie_gen:
        link = found.pcie
        lines.append(
            f"{'PCIe link under load':<40} generation {link.pcie_gen} x{link.pcie_width} "
            f"(at best {link.pcie_gen_max} x{link.pcie_width_max})"
        )
    if found.compute is not None:
        rates = found.compute
        where = "GPU" if rates.device.startswith("cuda") else "CPU"
        lines.append(f"{f'matrix products, {where}, {rates.dtype}':<40} {rates.matmul_tflops:8.2f} TFLOPS")
        lines.append(f"{f'copies within the memory of the {where}':<40} {rates.memory_gb_per_s:8.2f} GB/s")
    if found.host_layer_s is not None:
        lines.append(f"{'launches of one eager layer':<40} {1e3 * found.host_layer_s:8.2f} ms of one core")
    if found.updates is not None:
        updates = found.updates
        how = f"{updates.threads} thread{'s' if updates.threads > 1 else ''}, {updates.backend}"
        lines += [
            f"{f'CPU optimizer, {name} states':<40} {rate:8.3f} 10^9 parameters/s ({how})"
            for name, rate in updates.gparams_per_s.items()
        ]
    return "\n".join(lines) or "nothing could be measured"


def _staging(found: Measured, width: int) -> list[str]:
    test = found.staging
    if test is None:
        return []
    kind = "pinned" if test.is_pinned else "plain (nothing is pinned without a GPU)"
    lines = [
        f"{format_gib(test.granted_bytes)} of {format_gib(test.asked_bytes)} in {format_s(test.build_s)}, {kind}, "
        f"{format_gib(test.write_combined_bytes)} write-combined",
        f"write-combined upload slots: {'yes' if test.write_combined else 'no'} ({test.write_combined_reason})",
    ]
    if test.slot_bytes:
        device = "GPU" if found.machine.gpus else "memory"
        slots = f"{test.num_slots} slots of {test.slot_bytes // MIB} MiB"
        lines += [
            f"drive to {device} through {slots}: {test.up_gb_per_s:.2f} GB/s, overlap {test.up_overlap:.2f} "
            f"of the slowest link ({test.up_limit})",
            f"{device} to drive: {test.down_gb_per_s:.2f} GB/s, overlap {test.down_overlap:.2f} ({test.down_limit})",
        ]
        if max(test.up_overlap, test.down_overlap) > 1.05:
            lines.append("above 1: a link's own rate changed meanwhile (is the machine busy?), run it again")
    return [_heading("Staging buffer, double-buffered"), _bullets(lines, width)]


def _latency(found: Measured) -> list[str]:
    result = found.latency
    if result is None:
        return []
    lines = [f"{'size':>10}" + "".join(f"{path:>18}" for path in result.median_s)]
    for size, plain_s in result.median_s.get("plain", {}).items():
        row = f"{size // MIB} MiB" if size >= MIB else f"{size // KIB} KiB"
        row = f"{row:>10}"
        for path, times in result.median_s.items():
            if size not in times:
                row += f"{'-':>18}"
                continue
            change = "" if path == "plain" else f" {100 * (times[size] / plain_s - 1):+5.0f} %"
            row += f"{_microseconds(times[size]) + change:>18}"
        lines.append(row)
    return [_heading("Latency of one read from the drive (median)"), "\n".join([*lines, result.verdict()])]


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _settings(found: Measured, width: int) -> str:
    lines = []
    for section, values in (("aio", found.settings.aio), ("outcore", found.settings.outcore)):
        for key, value in values.items():
            name = f"{section}.{key}"
            lines.append(f"{name} = {_value(value)}: {found.settings.why.get(name, '')}")
    return _bullets(lines, width) if lines else "none: no drive could be measured"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items())
    return str(value).lower() if isinstance(value, bool) else str(value)

"""Memory tiers (VRAM, RAM, pinned, drive) in words and as fill fractions, from one metrics line and the run's sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from outcore.common.quantities import GIB, format_gb


@dataclass(frozen=True)
class Tier:
    """One tier as shown: `fill` is None where its size is not known."""

    name: str
    words: str
    fill: float | None


def tiers_of(record: dict[str, Any], limits: dict[str, Any]) -> list[Tier]:
    """The tiers that the line tells of.

    Args:
        record: a metrics.jsonl line (a Sampler snapshot is one).
        limits: gpu_mem_total_bytes, ram_total_bytes, nvme_total_bytes where known (`Sampler.describe()`)."""
    tiers = []
    vram_bytes = _first(record, "gpu_mem_bytes", "gpu_mem_peak_bytes")
    if vram_bytes is not None:
        tiers.append(_memory("VRAM", vram_bytes, limits.get("gpu_mem_total_bytes")))
    ram_total_bytes = limits.get("ram_total_bytes")
    available_bytes = record.get("ram_available_bytes")
    if ram_total_bytes and available_bytes is not None:
        tiers.append(_memory("RAM", ram_total_bytes - available_bytes, ram_total_bytes))
    elif record.get("ram_rss_bytes") is not None:
        tiers.append(_memory("RAM", record["ram_rss_bytes"], ram_total_bytes))
    if record.get("pinned_bytes"):
        tiers.append(_memory("pinned", record["pinned_bytes"], limits.get("pinned_capacity_bytes")))
    free_bytes = record.get("nvme_free_bytes")
    if free_bytes is not None:
        total_bytes = limits.get("nvme_total_bytes")
        fill = None if not total_bytes else min(1.0, max(0.0, 1 - free_bytes / total_bytes))
        tiers.append(Tier("drive", f"drive {format_gb(free_bytes)} free", fill))
    return tiers


def tier_words(record: dict[str, Any], limits: dict[str, Any]) -> list[str]:
    """`tiers_of` in words, e.g. ["VRAM 6.1/8.0 GiB", "RAM 41.0/62.7 GiB", "drive 312.00 GB free"]."""
    return [tier.words for tier in tiers_of(record, limits)]


def _memory(name: str, used_bytes: int, total_bytes: int | None) -> Tier:
    if not total_bytes:
        return Tier(name, f"{name} {used_bytes / GIB:.1f} GiB", None)
    fill = min(1.0, max(0.0, used_bytes / total_bytes))
    return Tier(name, f"{name} {used_bytes / GIB:.1f}/{total_bytes / GIB:.1f} GiB", fill)


def _first(record: dict[str, Any], *names: str) -> Any:
    return next((record[name] for name in names if record.get(name) is not None), None)

"""Bytes, rates and times as people read them; GiB (2**30) and GB (10**9) are never mixed.

Names of quantities carry their unit: `_bytes`, `_gib`, `_gb`, `_s`, `_gb_per_s`.
Memory (RAM, VRAM, pinned) is shown in GiB as the tools of the field do, drives and links in GB as their makers do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
MB = 10**6
GB = 10**9
ELEMENT_BYTES: Mapping[str, int] = MappingProxyType({"bf16": 2, "fp16": 2, "fp32": 4})
"""Bytes of a parameter by the precision that it is computed with."""


def format_gib(n_bytes: float) -> str:
    """Memory: 8589934592 -> '8.00 GiB'; smaller amounts in MiB, KiB or B."""
    for unit_bytes, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(n_bytes) >= unit_bytes:
            return f"{n_bytes / unit_bytes:.2f} {name}"
    return f"{n_bytes:.0f} B"


def format_gb(n_bytes: float) -> str:
    """Drive space: 4_000_000_000 -> '4.00 GB'; smaller amounts in MB, kB or B, larger in TB."""
    for unit_bytes, name in ((10**12, "TB"), (GB, "GB"), (MB, "MB"), (10**3, "kB")):
        if abs(n_bytes) >= unit_bytes:
            return f"{n_bytes / unit_bytes:.2f} {name}"
    return f"{n_bytes:.0f} B"


def format_s(seconds: float) -> str:
    """Durations: '812 ms', '4.2 s', '3 min 20 s', '2 h 05 min', '3 d 04 h'."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 0:
        return "-" + format_s(-seconds)
    if seconds == 0:
        return "0 s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole_s = round(seconds)
    if whole_s < 3600:
        return f"{whole_s // 60} min {whole_s % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(seconds / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def format_count(n: float) -> str:
    """Parameters and tokens: 1_210_000_000 -> '1.21 B'."""
    for size, name in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(n) >= size:
            return f"{n / size:.2f} {name}"
    return f"{n:.0f}"


def format_rate(per_s: float) -> str:
    """Rates of tokens: 1,204 or 37, and below ten two digits that count: 0.41, never 0 for what moves."""
    return f"{per_s:,.0f}" if per_s >= 9.5 else f"{per_s:.2g}"


def counted(count: int, one: str, many: str = "") -> str:
    """So many things: '1 line', '2,000 lines'. `many`: the plural where it is not `one` with an s."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `n`."""
    if multiple <= 0:
        raise ValueError(f"round_up needs a positive multiple, got {multiple}")
    return -(-n // multiple) * multiple

"""A plan on a machine without a GPU: the same schedule with plain memory, so VRAM's parts are in RAM."""

from __future__ import annotations

import dataclasses
from collections import Counter

from outcore.plan.hardware import Hardware
from outcore.plan.record import COMMUNICATOR, OVERHEAD, SPARE, Item, Plan, TierUse
from outcore.sizing.streaming import CPU_PROCESS_BYTES

DROPPED = (OVERHEAD, SPARE, COMMUNICATOR, "desktop reserve")
"""Parts of a GPU only."""


def without_gpu(plan: Plan, hardware: Hardware) -> Plan:
    """The plan with nothing in VRAM and nothing pinned."""
    sizes: Counter[tuple[str, str]] = Counter()  # what is partly pinned is one part here
    for part in plan.parts:
        if part.tier == "vram":
            if part.name not in DROPPED:
                sizes["ram", f"device: {part.name}"] += part.size_bytes
        elif part.tier in ("ram", "pinned"):
            sizes["ram", part.name] += CPU_PROCESS_BYTES if part.name == OVERHEAD else part.size_bytes
        else:
            sizes[part.tier, part.name] += part.size_bytes
    parts = [Item(tier, name, size) for (tier, name), size in sizes.items()]
    used = sum(part.size_bytes for part in parts if part.tier == "ram")
    tiers = (TierUse("vram", 0, 0), TierUse("pinned", 0, 0), TierUse("ram", used, hardware.ram_bytes))
    where = plan.offload.replace("all on the GPU", "all in RAM").replace("GPU", "RAM")
    return dataclasses.replace(plan, offload=where, parts=tuple(parts), tiers=(*tiers, plan.tier("nvme")))

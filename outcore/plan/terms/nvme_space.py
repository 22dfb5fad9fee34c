"""How much drive a plan needs, by part, with the safety factor and the reserve of the product's rule.

Needed: parts that live on the drive x 1.5, and the checkpoints (kept ones and the one being written). Usable: what is
free, less a fifth of it."""

from __future__ import annotations

from collections.abc import Sequence

from outcore.machine.offload import FREE_RESERVE, SPACE_SAFETY
from outcore.plan.hardware import Hardware
from outcore.plan.record import Item, TierUse

CHECKPOINTS = "checkpoints"


def nvme_use(parts: Sequence[Item], hardware: Hardware) -> TierUse:
    """The drive's use with margins, against what is free without its reserve."""
    on_drive = [part for part in parts if part.tier == "nvme"]
    states = sum(part.size_bytes for part in on_drive if part.name != CHECKPOINTS)
    checkpoints = sum(part.size_bytes for part in on_drive if part.name == CHECKPOINTS)
    needed = int(SPACE_SAFETY * states) + checkpoints
    return TierUse("nvme", needed, int((1 - FREE_RESERVE) * hardware.nvme_free_bytes))

"""How much drive a plan needs, by part, with the safety factor and the reserve of the product's rule.

Needed: parts that live on the drive x 1.5, and the checkpoints (kept ones and the one being written). Usable: what is
free, less a fifth of it. `space_parts_gb` is the same count by part as outcore.engine.deepspeed.infinity offers to
scripts; a test holds both together.
"""

from __future__ import annotations

from outcore.common.quantities import GB
from outcore.plan import constants as k
from outcore.plan.hardware import Hardware
from outcore.plan.record import Item, TierUse

SPACE_BYTES_PER_PARAM: dict[str, int] = {"parameters": 6, "optimizer": 8, "gradients": 4}
"""Drive bytes per parameter: 16-bit weight and fp32 master; two fp32 moments; fp32 gradient."""
CHECKPOINTS = "checkpoints"


def space_parts_gb(total_params: int, parameters: bool, optimizer: bool, gradients: bool) -> dict[str, float]:
    """GB (10**9) by part of `total_params` parameters, without margin; parts that stay in RAM are 0."""
    chosen = {"parameters": parameters, "optimizer": optimizer, "gradients": gradients}
    return {part: total_params * SPACE_BYTES_PER_PARAM[part] / GB if on else 0.0 for part, on in chosen.items()}


def nvme_use(parts: list[Item], hardware: Hardware) -> TierUse:
    """The drive's use with margins, against what is free without its reserve."""
    on_drive = [part for part in parts if part.tier == "nvme"]
    states = sum(part.size_bytes for part in on_drive if part.name != CHECKPOINTS)
    checkpoints = sum(part.size_bytes for part in on_drive if part.name == CHECKPOINTS)
    needed = int(k.SPACE_SAFETY * states) + checkpoints
    return TierUse("nvme", needed, int((1 - k.SPACE_RESERVE) * hardware.nvme_free_bytes))

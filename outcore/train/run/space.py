"""Room on the drives to which a run writes: what they must keep free, asked before the start and watched."""

from __future__ import annotations

import os
from pathlib import Path

from outcore.checkpoint import SPACE_MARGIN_BYTES
from outcore.common.files import nearest_existing
from outcore.common.quantities import ELEMENT_BYTES, format_gb
from outcore.config import TrainConfig
from outcore.monitor.watches import SpaceWatch
from outcore.plan import Plan
from outcore.runs import RunFolder
from outcore.train.memory_advice import TierFull

SPACE_RESERVE_BYTES = 1 << 30
"""Free space below which a run saves and stops: a drive that fills up takes the whole system with it."""


def kept_on_drive(config: TrainConfig, nvme_path: str | None) -> int:
    """Checkpoints that the run keeps on the drive to which it offloads, or on the only one; 0: none."""
    if config.save_strategy == "no":
        return 0
    drives = {os.stat(nearest_existing(path)).st_dev for path in (config.checkpoint_dir, nvme_path) if path is not None}
    return config.save_total_limit if len(drives) == 1 else 0


def export_bytes(config: TrainConfig, total: int, trainable: int, precision: str) -> int:
    """Bytes of the exported model with this many parameters; 0: none is written."""
    exported = trainable if config.lora_r and config.lora_export == "adapter" else total
    return exported * ELEMENT_BYTES[precision] if config.export else 0


def space_reserves(
    config: TrainConfig, folder: RunFolder, nvme_path: str | None, checkpoint_bytes: int, exported_bytes: int
) -> dict[Path, int]:
    """Free bytes that each folder to which the run writes must keep: a checkpoint's, the export's, or a little.

    What is offloaded to `nvme_path` has all its space from the start."""
    reserves = {folder.logs: SPACE_RESERVE_BYTES}
    if nvme_path:
        reserves[Path(nvme_path)] = SPACE_RESERVE_BYTES
    saved_bytes = 0 if config.save_strategy == "no" else checkpoint_bytes
    for path, n_bytes in ((folder.checkpoints, saved_bytes), (folder.export.parent, exported_bytes)):
        if n_bytes:
            reserves[path] = max(SPACE_RESERVE_BYTES, n_bytes + SPACE_MARGIN_BYTES, reserves.get(path, 0))
    return reserves


def check_drives(config: TrainConfig, folder: RunFolder, plan: Plan | None, precision: str) -> None:
    """TierFull, before anything is loaded, when a checkpoint or the finished model will have no room. `plan` None: the
    model cannot be counted, so that the drives are looked at before the first step only."""
    if plan is None:
        return
    exported = export_bytes(config, plan.params, plan.trainable_params, precision)
    verdict = SpaceWatch(space_reserves(config, folder, None, plan.checkpoint_bytes, exported)).check()
    if verdict.must_stop:
        saved = 0 if config.save_strategy == "no" else plan.checkpoint_bytes
        raise TierFull(
            f"{verdict.words} Of this run a checkpoint takes {format_gb(saved)} (--checkpoint_dir DIR moves it) and "
            f"the finished model {format_gb(exported)} (--export_dir DIR, or --no_export); --log_dir DIR moves its "
            "logs. Nothing was loaded."
        )

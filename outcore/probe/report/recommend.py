"""Turning measurements into settings: DeepSpeed's `aio` section and outcore's block, each with its reason.

The rule for blocks and depths is `drive_bench.recommended`. Pure functions; `config_file` writes what they give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outcore.common.quantities import KIB, MIB, format_gib
from outcore.probe.bench.drive import DriveResult, recommended
from outcore.probe.bench.lanes import StagingTest
from outcore.probe.bench.measurement import Measurement
from outcore.probe.gds.verdict import PathVerdict

AIO_MAX_THREADS = 8
AIO_MIN_QUEUE_DEPTH = 8
DIRECT_GAIN = 1.05
"""Rate of a path without slots against the staged lanes' from which it is chosen."""


@dataclass
class Recommendation:
    """Settings by section and key, and why, by 'section.key'."""

    aio: dict[str, Any] = field(default_factory=dict)
    outcore: dict[str, Any] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)

    def changes(self) -> dict[str, dict[str, Any]]:
        """For `config_file.apply_changes`."""
        return {name: values for name, values in (("aio", self.aio), ("outcore", self.outcore)) if values}


def recommend(
    verdict: PathVerdict,
    drive: DriveResult | None,
    staging: StagingTest | None,
    direct_gb_per_s: dict[str, float],
    nvme_path: str | None,
) -> Recommendation:
    """The settings for the drive that will be used.

    direct_gb_per_s: measured drive->GPU rates of the paths into device memory ('kvikio', 'gds'); empty where none ran.
    nvme_path: written only when the user named the directory."""
    found = Recommendation()
    if drive is not None and (setting := recommended(drive)) is not None:
        _recommend_io(found, setting)
        found.why["aio.use_gds"] = (
            "never through DeepSpeed, which does not check its transfers; outcore.transfer_path is ours"
        )
    if staging is not None and staging.granted_bytes:
        _recommend_staging(found, staging, verdict, direct_gb_per_s)
    if nvme_path is not None:
        found.outcore["nvme_path"] = nvme_path
        found.why["outcore.nvme_path"] = "the directory you named with --path"
    return found


def _recommend_io(found: Recommendation, setting: Measurement) -> None:
    threads = min(setting.depth, AIO_MAX_THREADS)
    what = "reads and writes at once" if setting.link == "drive_mixed" else "reads"
    rate = f"{what} reach {setting.gb_per_s:.2f} GB/s at {setting.block_bytes // KIB} KiB x {setting.depth} in flight"
    found.aio = {
        "block_size": setting.block_bytes,
        "queue_depth": max(AIO_MIN_QUEUE_DEPTH, -(-setting.depth // threads)),
        "intra_op_parallelism": threads,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,  # train_model.py refuses true
    }
    found.why |= {
        "aio.block_size": f"{rate}; larger gains less than 3 %",
        "aio.queue_depth": f"per thread; {threads} x {found.aio['queue_depth']} covers the {setting.depth} needed",
        "aio.intra_op_parallelism": f"threads of one request; {setting.depth} fill the drive, over 8 only cost CPU",
        "aio.single_submit": "blocks are handed to the kernel together: fewer system calls",
        "aio.overlap_events": "submitting goes on while earlier blocks complete",
    }
    found.outcore["storage"] = {"engine": setting.engine, "threads": setting.depth, "block_bytes": setting.block_bytes}
    found.why["outcore.storage"] = f"fastest engine measured: {setting.engine}; {rate}"


def _recommend_staging(
    found: Recommendation, staging: StagingTest, verdict: PathVerdict, rates: dict[str, float]
) -> None:
    if staging.granted_bytes < staging.asked_bytes:
        found.outcore["staging_bytes"] = staging.granted_bytes
        found.why["outcore.staging_bytes"] = f"the machine gives {format_gib(staging.granted_bytes)}, not more"
    if staging.is_pinned:
        found.outcore["write_combined"] = "on" if staging.write_combined else "off"
        found.why["outcore.write_combined"] = staging.write_combined_reason
    if staging.slot_bytes:
        found.outcore["lanes"] = {"slot_bytes": staging.slot_bytes, "num_slots": staging.num_slots}
        found.why["outcore.lanes"] = (
            f"{staging.num_slots} slots of {staging.slot_bytes // MIB} MiB: {staging.up_gb_per_s:.2f} GB/s, "
            f"{100 * staging.up_overlap:.0f} % of the slowest link ({staging.up_limit})"
        )
    if staging.up_gb_per_s <= 0.0:
        return
    staged = staging.up_gb_per_s
    candidates = {k: v for k, v in rates.items() if k != "gds" or verdict.is_direct}
    fastest = max(candidates, key=lambda name: candidates[name], default="staged")
    is_faster = candidates.get(fastest, 0.0) >= DIRECT_GAIN * staged
    found.outcore["transfer_path"] = fastest if is_faster else "staged"
    rated = sorted({"staged": staged, **candidates}.items(), key=lambda item: -item[1])
    listed = ", ".join(f"{name} {rate:.2f}" for name, rate in rated)
    found.why["outcore.transfer_path"] = (
        f"drive to GPU in GB/s: {listed} (without slots nothing is read ahead, so that must be "
        f"{100 * (DIRECT_GAIN - 1):.0f} % faster)"
    )

"""Turning measurements into settings: DeepSpeed's `aio` section and outcore's block, each with its reason.

The rule for blocks and depths is `drive_bench.recommended`. Pure functions; `config_file` writes what they give.

What the owner should know about this machine, in words: one sentence per warning, what it is and what to do.

Pure functions over what was detected and measured. A virtual disk's "rotational" flag is not believed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from outcore.common.quantities import KIB, MIB, format_gb, format_gib
from outcore.machine import Drive, Machine, pcie_gb_per_s
from outcore.probe.bench.drive import DriveResult, drive_rate, recommended
from outcore.probe.bench.lanes import StagingTest
from outcore.probe.bench.load_sampler import LinkUnderLoad
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


SLOW_DRIVE_GB_PER_S = 2.0
FREE_FRACTION = 0.20


def drive_warnings(drive: Drive, measured: DriveResult | None, is_wsl2: bool) -> list[str]:
    """About one directory's drive."""
    path, found = drive.path, []
    if drive.kind == "hdd" or (drive.rotational and drive.rotational_trusted):
        found.append(f"{path} is on a rotational disk: offloading to it is hopelessly slow; use an NVMe drive")
    if drive.is_usb:
        found.append(f"{path} is on a USB drive: it is slow and may disappear; use an internal NVMe drive")
    elif drive.kind == "ssd":
        found.append(f"{path} is on a SATA SSD, which ends at about 0.55 GB/s; an NVMe drive is 5-12 times faster")
    if drive.kind == "tmpfs":
        found.append(f"{path} is a RAM disk: its rates are those of RAM, and what it holds is missing from RAM")
    if is_wsl2 and _is_windows_mount(drive):
        found.append(
            f"{path} is a Windows drive seen from WSL2 (9p), slow and without direct I/O: "
            "use a directory inside the Linux filesystem, for instance ~/outcore"
        )
    elif drive.kind == "network":
        found.append(f"{path} is a network share ({drive.filesystem}): its rates change with the load")
    if drive.total_bytes and drive.free_bytes is not None and drive.free_bytes < FREE_FRACTION * drive.total_bytes:
        pct = 100 * drive.free_bytes / drive.total_bytes
        found.append(
            f"{path} is {100 - pct:.0f} % full ({format_gb(drive.free_bytes)} free): below 20 % SSDs "
            "slow down and wear faster; make room"
        )
    if measured is not None:
        if not measured.is_direct and drive.kind not in ("tmpfs",):
            found.append(
                f"{path}: the filesystem ({drive.filesystem}) refuses direct I/O; reads and writes go through RAM"
            )
        slow = [
            f"{name} {rate:.2f}"
            for name, rate in (
                ("read", drive_rate(measured, "drive_read")),
                ("write", drive_rate(measured, "drive_write")),
            )
            if 0 < rate < SLOW_DRIVE_GB_PER_S
        ]
        if slow:
            found.append(
                f"{path} is below 2 GB/s ({', '.join(slow)} GB/s): a model that spills to it will wait for it; "
                "keep as much as possible in RAM, or use a faster drive"
            )
    return found


def gpu_warnings(link: LinkUnderLoad | None, machine: Machine) -> list[str]:
    """About the PCIe link and the clocks under load."""
    if link is None or not machine.gpus:
        return []
    found = []
    if link.error:
        found.append(link.error)
    now, could = pcie_gb_per_s(link.pcie_gen, link.pcie_width), pcie_gb_per_s(link.pcie_gen_max, link.pcie_width_max)
    if now is not None and could is not None and now < could:
        found.append(
            f"the GPU's PCIe link ran at generation {link.pcie_gen} x{link.pcie_width} under load, it could do "
            f"generation {link.pcie_gen_max} x{link.pcie_width_max} ({could:.1f} instead of {now:.1f} GB/s): "
            "check the slot, the BIOS and the power plan"
        )
    if link.thermal:
        heat = f" at {link.temperature_c} degrees C" if link.temperature_c is not None else ""
        found.append(f"the GPU throttled for heat during the test{heat}: clean the fans, or lower its power limit")
    elif link.throttle_reasons:
        found.append(f"the GPU ran below its clocks during the test: {', '.join(link.throttle_reasons)}")
    return found


def drive_link_warning(drive: Drive, read_text) -> str | None:
    """When the drive's own PCIe link is narrower or slower than the drive could do. `read_text` reads sysfs."""
    for disk in drive.disks:
        base = f"/sys/block/{disk}/device/device"
        values = {}
        for name in ("current_link_speed", "max_link_speed", "current_link_width", "max_link_width"):
            match = re.match(r"[\d.]+", (read_text(f"{base}/{name}") or "").strip())
            values[name] = float(match.group()) if match else 0.0
        now = values["current_link_speed"] * values["current_link_width"]
        could = values["max_link_speed"] * values["max_link_width"]
        if 0 < now < could:
            return (
                f"drive {disk} is linked at {values['current_link_speed']:g} GT/s x{values['current_link_width']:g}, "
                f"it could do {values['max_link_speed']:g} GT/s x{values['max_link_width']:g}: try another M.2 slot"
            )
    return None


def staging_warnings(test: StagingTest | None, effort_cap_bytes: int | None) -> list[str]:
    """About the pool: what was not given as asked."""
    if test is None:
        return []
    found = list(test.notes)
    if effort_cap_bytes is not None and test.asked_bytes == effort_cap_bytes:
        found.append(f"--quick builds only {format_gib(test.asked_bytes)} of staging memory; leave it out for all")
    return found


def _is_windows_mount(drive: Drive) -> bool:
    return drive.filesystem in ("9p", "drvfs") or re.match(r"/mnt/[a-z](/|$)", drive.mount_point) is not None

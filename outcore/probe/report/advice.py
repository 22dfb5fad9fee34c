"""What the owner should know about this machine, in words: one sentence per warning, what it is and what to do.

Pure functions over what was detected and measured. A virtual disk's "rotational" flag is not believed."""

from __future__ import annotations

import re

from outcore.common.quantities import format_gb, format_gib
from outcore.machine import Drive, Machine, pcie_gb_per_s
from outcore.probe.bench.drive import DriveResult, drive_rate
from outcore.probe.bench.lanes import StagingTest
from outcore.probe.bench.load_sampler import LinkUnderLoad

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

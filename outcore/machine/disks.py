"""Whole disks and what they are, from /sys: through partitions, device mapper, RAID, bcache and btrfs members.

The kernel's rotational flag is believed only where a real disk stands behind it; virtual disks, USB bridges and cloud
volumes are named as what they are."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from outcore.machine.mounts import Mount

# Cloud volumes that speak NVMe to the guest and a network behind it (the vendors' own model strings).
NETWORK_NVME_MODELS = ("Amazon Elastic Block Store", "nvme_card-pd", "MSFT NVMe Accelerator")
VIRTUAL_VENDORS = {"msft", "qemu", "vmware", "vbox", "virtual", "xen", "google", "0x1af4"}
# GT/s per lane of each PCIe generation, as sysfs prints it.
_GEN_BY_GT_PER_S = {"2.5": 1, "5.0": 2, "5": 2, "8.0": 3, "8": 3, "16.0": 4, "16": 4, "32.0": 5, "32": 5, "64.0": 6}


@dataclass(frozen=True)
class Disk:
    name: str
    kind: str
    reason: str
    model: str | None = None
    rotational: bool | None = None
    rotational_trusted: bool = False
    is_removable: bool = False
    is_usb: bool = False
    logical_block_bytes: int | None = None
    pcie_gen: int | None = None
    pcie_width: int | None = None


def whole_disks(mount: Mount, root: Path) -> list[str]:
    """Names of the whole disks under a mount, through partitions, device mapper, RAID, bcache and btrfs members."""
    names: list[str] = []
    if mount.filesystem == "btrfs":
        names = _btrfs_members(mount, root)
    if not names:
        by_number = root / "sys/dev/block" / mount.device_number
        if by_number.exists():
            names = [by_number.resolve().name]
        elif mount.source.startswith("/dev/"):
            names = [_device_name(mount.source, root)]
    disks: list[str] = []
    for name in names:
        for disk in _below(name, root, depth=0):
            if disk not in disks:
                disks.append(disk)
    return disks


def _device_name(source: str, root: Path) -> str:
    """'/dev/mapper/vg-lv' -> 'dm-0' by the names device mapper publishes; '/dev/sda1' -> 'sda1'."""
    name = source.rsplit("/", 1)[-1]
    if (root / "sys/class/block" / name).exists():
        return name
    for dm_name in sorted((root / "sys/class/block").glob("dm-*/dm/name")):
        if dm_name.read_text(encoding="utf-8").strip() == name:
            return dm_name.parent.parent.name
    resolved = os.path.realpath(source) if str(root) == "/" else source
    return resolved.rsplit("/", 1)[-1]


def _btrfs_members(mount: Mount, root: Path) -> list[str]:
    source_name = _device_name(mount.source, root)
    for devices in sorted((root / "sys/fs/btrfs").glob("*/devices")):
        members = sorted(entry.name for entry in devices.iterdir())
        if source_name in members:
            return members
    return []


def _below(name: str, root: Path, depth: int) -> Iterator[str]:
    directory = block_dir(name, root)
    if depth > 8 or not directory.exists():
        return
    if (directory / "partition").exists():
        yield from _below(directory.parent.name, root, depth + 1)
        return
    slaves = sorted(p.name for p in (directory / "slaves").iterdir()) if (directory / "slaves").is_dir() else []
    if slaves:
        for slave in slaves:
            yield from _below(slave, root, depth + 1)
        return
    yield directory.name


def block_dir(name: str, root: Path) -> Path:
    entry = root / "sys/class/block" / name
    return entry.resolve() if entry.exists() else root / "sys/block" / name


def describe_disk(name: str, root: Path) -> Disk:
    directory = block_dir(name, root)
    flag = read_text(directory, "queue/rotational")
    rotational = None if flag is None else flag == "1"
    model = read_text(directory, "device/model")
    vendor = (read_text(directory, "device/vendor") or "").lower()
    block = read_text(directory, "queue/logical_block_size")
    is_usb = "/usb" in str(directory)[len(str(root)) :]
    disk = Disk(
        name=name,
        kind="unknown",
        reason=f"{name}: neither the bus nor the rotational flag says what it is",
        model=model,
        rotational=rotational,
        rotational_trusted=rotational is not None,
        is_removable=read_text(directory, "removable") == "1",
        is_usb=is_usb,
        logical_block_bytes=int(block) if block and block.isdigit() else None,
    )
    if name.startswith("nvme"):
        return _describe_nvme(disk, directory)
    if name.startswith(("zram", "ram")):
        return replace(disk, kind="tmpfs", reason=f"{name} is a RAM disk")
    if name.startswith(("nbd", "rbd", "drbd")) or re.search(r"/session\d+/", str(directory)):
        return replace(disk, kind="network", reason=f"{name} is a block device over the network")
    is_virtual = name.startswith(("vd", "xvd")) or vendor in VIRTUAL_VENDORS or "virtual disk" in (model or "").lower()
    if is_virtual:
        what = "Hyper-V/WSL2 virtual disk" if vendor == "msft" else "virtual disk"
        reason = f"{name} is a {what}: only its host knows what it is made of, its rotational flag is not trusted"
        return replace(disk, kind="virtual", rotational_trusted=False, reason=reason)
    if name.startswith("mmcblk"):
        return replace(disk, kind="ssd", reason=f"{name} is an SD card or eMMC: flash, but slow")
    if rotational is None:
        return disk
    bus = "USB" if is_usb else "SATA/SAS"
    if is_usb and rotational:  # USB bridges often hide what is behind them
        return replace(disk, rotational_trusted=False, reason=f"{name} is a USB disk; its bridge may hide an SSD")
    label = f"{name} ({model})" if model else name
    if rotational:
        return replace(disk, kind="hdd", reason=f"{label} is a rotating {bus} disk")
    return replace(disk, kind="ssd", reason=f"{label} is an SSD on {bus}")


def _describe_nvme(disk: Disk, directory: Path) -> Disk:
    label = f"{disk.name} ({disk.model})" if disk.model else disk.name
    # With multipath the block device hangs under its subsystem, and the transport under each controller of that.
    controllers = [directory / "device", *sorted((directory / "device").glob("nvme[0-9]*"))]
    transport = next((found for c in controllers if (found := read_text(c, "transport"))), "pcie")
    if transport not in ("pcie", "apple-nvme"):
        return replace(disk, kind="network", reason=f"{label} is NVMe over {transport}")
    if any(model.lower() in (disk.model or "").lower() for model in NETWORK_NVME_MODELS):
        return replace(disk, kind="network", reason=f"{label} is a network volume of the cloud behind an NVMe door")
    if "qemu" in (disk.model or "").lower():
        return replace(disk, kind="virtual", rotational_trusted=False, reason=f"{label} is an emulated NVMe drive")
    speed = (read_text(directory, "device/device/current_link_speed") or "").split(" ")[0]
    width = read_text(directory, "device/device/current_link_width")
    return replace(
        disk,
        kind="nvme",
        reason=f"{label} is an NVMe drive",
        pcie_gen=_GEN_BY_GT_PER_S.get(speed),
        pcie_width=int(width) if width and width.isdigit() and width != "0" else None,
    )


def read_text(directory: Path, name: str) -> str | None:
    try:
        return (directory / name).read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None

"""Search for the drive under a path: mountinfo -> block device -> whole disks -> what they are, all from /proc and
/sys.

No tool is started and nothing is written. Where the kernel does not say (virtual disks, network shares, containers)
the answer is 'virtual', 'network' or 'unknown' with the reason, never a guess. Outside Linux only sizes are known.

Whole disks and what they are, from /sys: through partitions, device mapper, RAID, bcache and btrfs members.

The kernel's rotational flag is believed only where a real disk stands behind it; virtual disks, USB bridges and cloud
volumes are named as what they are."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from outcore.common.files import nearest_existing
from outcore.machine.mounts import Mount, mount_of, read_mounts
from outcore.machine.records import Drive

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


RAM_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
NETWORK_FILESYSTEMS = {
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "drvfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs",
    "virtiofs", "vboxsf", "prl_fs", "ocfs2", "gfs2", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.s3fs",
    "fuse.rclone", "fuse.gcsfuse", "fuse.juicefs", "fuse.vmhgfs-fuse",
}  # fmt: skip
# Mounts that hold no files of people's: not listed among a machine's drives.
UNINTERESTING_FILESYSTEMS = {"squashfs", "iso9660", "vfat", "efivarfs", "erofs", "udf"}
_SLOWEST_FIRST = ("hdd", "unknown", "network", "tmpfs", "virtual", "ssd", "nvme")
Usage = Callable[[str], tuple[int, int]]
"""path -> (total bytes, bytes an ordinary user may still write)."""


def drive_of(path: str | os.PathLike[str], *, sys_root: str | Path = "/", usage: Usage | None = None) -> Drive:
    """The drive under `path`, which need not exist yet (its nearest existing parent decides).

    `sys_root` is where `proc` and `sys` are looked for and `usage` how space is asked for: tests replace both.
    Raises ValueError for an empty path."""
    asked = os.fspath(path)
    if not str(asked).strip():
        raise ValueError("no path given: name the folder whose drive is meant")
    existing = nearest_existing(os.path.realpath(asked))
    total_bytes, free_bytes = (usage or _usage)(str(existing))
    root = Path(sys_root)
    mounts = read_mounts(root)
    mount = mount_of(str(existing), mounts)
    drive = _describe(mount, mounts, root, depth=0) if mount else _drive_without_mount(str(asked), existing)
    return replace(drive, path=str(asked), total_bytes=total_bytes, free_bytes=free_bytes)


def local_drives(*, sys_root: str | Path = "/", usage: Usage | None = None) -> tuple[Drive, ...]:
    """Every mounted local filesystem on a block device, once each. Network mounts are left out: a dead server hangs."""
    root = Path(sys_root)
    mounts = read_mounts(root)
    found: dict[str, Drive] = {}
    for mount in mounts:
        if not mount.source.startswith("/dev/") or mount.filesystem in UNINTERESTING_FILESYSTEMS:
            continue
        if mount.source in found or not os.path.isdir(mount.mount_point):
            continue
        drive = _describe(mount, mounts, root, depth=0)
        try:
            total_bytes, free_bytes = (usage or _usage)(mount.mount_point)
        except OSError:
            continue  # a mount this user may not look into is no drive of theirs
        found[mount.source] = replace(drive, path=mount.mount_point, total_bytes=total_bytes, free_bytes=free_bytes)
    return tuple(found.values())


def _describe(mount: Mount, mounts: list[Mount], root: Path, depth: int) -> Drive:
    drive = Drive(
        path=mount.mount_point,
        kind="unknown",
        reason=f"{mount.filesystem} on {mount.source}: no block device that the kernel describes",
        mount_point=mount.mount_point,
        filesystem=mount.filesystem,
        device=mount.source,
        is_read_only="ro" in mount.options or "ro" in mount.super_options,
    )
    if mount.filesystem in RAM_FILESYSTEMS:
        return replace(drive, kind="tmpfs", reason=f"{mount.filesystem} keeps its files in RAM")
    if mount.filesystem in NETWORK_FILESYSTEMS:
        return replace(drive, kind="network", reason=_network_reason(mount))
    if mount.filesystem == "overlay" and depth < 3:
        return _describe_overlay(mount, mounts, root, drive, depth)
    disks = [describe_disk(name, root) for name in whole_disks(mount, root)]
    if not disks:
        return drive
    if (
        depth < 3
        and disks[0].name.startswith("loop")
        and (backing := read_text(block_dir(disks[0].name, root), "loop/backing_file"))
    ):
        mount_below = mount_of(backing, mounts)
        if mount_below is None:
            return _merge(drive, disks)
        below = _describe(mount_below, mounts, root, depth + 1)
        return replace(
            below,
            mount_point=mount.mount_point,
            filesystem=mount.filesystem,
            device=mount.source,
            reason=f"loop device on {backing}: {below.reason}",
        )
    return _merge(drive, disks)


def _merge(drive: Drive, disks: list[Disk]) -> Drive:
    slowest = min(disks, key=lambda disk: _SLOWEST_FIRST.index(disk.kind))
    reason = slowest.reason
    if len(disks) > 1:
        reason = f"{len(disks)} disks ({', '.join(d.name for d in disks)}), the slowest kind counts: {slowest.reason}"
    flags = [disk.rotational for disk in disks if disk.rotational is not None]
    blocks = [disk.logical_block_bytes for disk in disks if disk.logical_block_bytes]
    return replace(
        drive,
        kind=slowest.kind,
        reason=reason,
        disks=tuple(disk.name for disk in disks),
        model=slowest.model,
        rotational=any(flags) if flags else None,
        rotational_trusted=all(disk.rotational_trusted for disk in disks),
        is_removable=any(disk.is_removable for disk in disks),
        is_usb=any(disk.is_usb for disk in disks),
        logical_block_bytes=max(blocks) if blocks else None,
        pcie_gen=slowest.pcie_gen,
        pcie_width=slowest.pcie_width,
    )


def _describe_overlay(mount: Mount, mounts: list[Mount], root: Path, drive: Drive, depth: int) -> Drive:
    """A container's root: its upper layer may be visible; if not, the runtime's bind mounts lie on the same drive."""
    upper = next((o[len("upperdir=") :] for o in mount.super_options if o.startswith("upperdir=")), "")
    below: Mount | None = None
    how = ""
    if upper and os.path.isdir(upper):
        below = mount_of(upper, [m for m in mounts if m is not mount])
        how = f"overlay whose upper layer is {upper}"
    if below is None:
        for other in mounts:
            is_bind = other.mount_point in ("/etc/hosts", "/etc/hostname", "/etc/resolv.conf")
            if is_bind and other.source.startswith("/dev/") and "/containers/" in other.root:
                below, how = other, "container layer; its runtime keeps it on the drive of " + other.mount_point
                break
    if below is None:
        return replace(
            drive, reason="container layer (overlay) whose drive is not visible in here: use a mounted volume"
        )
    found = _describe(below, mounts, root, depth + 1)
    return replace(
        found,
        mount_point=mount.mount_point,
        filesystem="overlay",
        device=found.device,
        is_read_only=drive.is_read_only,
        reason=f"{how}: {found.reason}",
    )


def _network_reason(mount: Mount) -> str:
    if mount.filesystem in ("9p", "drvfs") and re.match(r"(drvfs|[A-Za-z]:)", mount.source):
        return f"Windows drive {mount.source} through 9p: far slower than WSL2's own ext4 disk"
    if mount.filesystem in ("9p", "virtiofs", "vboxsf", "prl_fs", "fuse.vmhgfs-fuse"):
        return f"folder of the host shared through {mount.filesystem}"
    return f"{mount.filesystem} share {mount.source}"


def _drive_without_mount(asked: str, existing: Path) -> Drive:
    is_share = asked.startswith(("\\\\", "//"))
    reason = "a network share (UNC path)" if is_share else f"{sys.platform}: no mount table tells what the path lies on"
    return Drive(
        path=asked,
        kind="network" if is_share else "unknown",
        reason=reason,
        mount_point=existing.anchor or "/",
        filesystem="unknown",
    )


def _usage(path: str) -> tuple[int, int]:
    usage = shutil.disk_usage(path)
    return usage.total, usage.free

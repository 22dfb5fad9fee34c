"""Which drive lies under a path: mountinfo -> block device -> whole disks -> what they are, all from /proc and /sys.

No tool is started and nothing is written. Where the kernel does not say (virtual disks, network shares, containers)
the answer is 'virtual', 'network' or 'unknown' with the reason, never a guess. Outside Linux only sizes are known."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from outcore.common.files import nearest_existing
from outcore.machine.disks import Disk, block_dir, describe_disk, read_text, whole_disks
from outcore.machine.mounts import Mount, mount_of, read_mounts
from outcore.machine.records import Drive

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

from pathlib import Path

import pytest

from outcore.machine import DRIVE_KINDS, drive_of, local_drives
from outcore.machine.mounts import mount_of, read_mounts
from tests.machine.fakes import add_disk, add_mounts, link, write


def usage(path: str) -> tuple[int, int]:
    return 1000, 400


def drive(root: Path, path: str = "/"):
    return drive_of(path, sys_root=root, usage=usage)


def add_nvme(
    root: Path, name: str = "nvme0n1", number: str = "259:2", model: str = "Samsung SSD 990 PRO", **extra: str
):
    files = {"queue/rotational": "0", "queue/logical_block_size": "512", "removable": "0", "device/model": model}
    files |= {"device/device/current_link_speed": "16.0 GT/s PCIe", "device/device/current_link_width": "4"}
    add_disk(root, name, f"pci0/{name}", files, {f"{name}p2": number})


def test_nvme_partition_leads_to_its_disk(tmp_path: Path) -> None:
    add_nvme(tmp_path)
    add_mounts(tmp_path, "259:2 / / rw,relatime ext4 /dev/nvme0n1p2 rw")
    found = drive(tmp_path)
    assert (found.kind, found.disks, found.filesystem, found.mount_point) == ("nvme", ("nvme0n1",), "ext4", "/")
    assert found.is_nvme and found.rotational is False and found.rotational_trusted
    assert (found.pcie_gen, found.pcie_width, found.logical_block_bytes) == (4, 4, 512)
    assert (found.total_bytes, found.free_bytes) == (1000, 400)
    assert "990 PRO" in found.reason and not found.is_read_only


@pytest.mark.parametrize(("name", "device", "files", "kind", "trusted", "word"), [
    ("sda", "pci0/ata1", {"queue/rotational": "0", "device/model": "870 EVO"}, "ssd", True, "SATA"),
    ("sda", "pci0/ata1", {"queue/rotational": "1", "device/model": "WD Red"}, "hdd", True, "rotating"),
    ("sda", "pci0/usb1/1-2", {"queue/rotational": "1"}, "unknown", False, "bridge"),
    ("sda", "pci0/usb1/1-2", {"queue/rotational": "0"}, "ssd", True, "USB"),
    ("sda", "x", {"queue/rotational": "1", "device/vendor": "Msft    ", "device/model": "Virtual Disk"}, "virtual",
     False, "WSL2"),
    ("vda", "virtio1", {"queue/rotational": "1"}, "virtual", False, "virtual disk"),
    ("sda", "x", {"queue/rotational": "1", "device/vendor": "QEMU"}, "virtual", False, "virtual"),
    ("sda", "platform/host3/session2/target", {"queue/rotational": "0"}, "network", True, "network"),
    ("nbd0", "virtual", {"queue/rotational": "0"}, "network", True, "network"),
    ("mmcblk0", "mmc0", {"queue/rotational": "0"}, "ssd", True, "eMMC"),
    ("zram0", "virtual", {"queue/rotational": "0"}, "tmpfs", True, "RAM disk"),
    ("sda", "pci0/ata1", {}, "unknown", False, "neither"),
    ("nvme0n1", "nvme", {"device/model": "Amazon Elastic Block Store"}, "network", False, "cloud"),
    ("nvme0n1", "nvme", {"device/transport": "tcp"}, "network", False, "over tcp"),
    ("nvme0n1", "nvme", {"device/nvme0/transport": "rdma"}, "network", False, "over rdma"),
    ("nvme0n1", "nvme", {"device/model": "QEMU NVMe Ctrl"}, "virtual", False, "emulated"),
])  # fmt: skip
def test_kind_of_disk(tmp_path, name, device, files, kind, trusted, word):
    add_disk(tmp_path, name, device, files, {f"{name}1": "8:1"})
    add_mounts(tmp_path, f"8:1 / / rw ext4 /dev/{name}1 rw")
    found = drive(tmp_path)
    assert found.kind == kind and kind in DRIVE_KINDS
    assert found.rotational_trusted is trusted
    assert word in found.reason
    assert found.is_usb is ("usb" in device)


def test_device_mapper_on_two_disks_takes_the_slowest_kind(tmp_path: Path) -> None:
    add_nvme(tmp_path)
    add_disk(
        tmp_path, "sda", "pci0/ata1", {"queue/rotational": "1", "queue/logical_block_size": "4096"}, {"sda1": "8:1"}
    )
    mapper = add_disk(tmp_path, "dm-0", "virtual", {"dm/name": "vg-data\n"})
    for slave in ("nvme0n1p2", "sda1"):
        link(mapper / "slaves" / slave, tmp_path / "sys/class/block" / slave)
    add_mounts(tmp_path, "252:7 / / rw xfs /dev/mapper/vg-data rw")
    found = drive(tmp_path)
    assert found.kind == "hdd" and set(found.disks) == {"nvme0n1", "sda"}
    assert found.rotational is True and found.logical_block_bytes == 4096
    assert "2 disks" in found.reason


def test_btrfs_finds_all_members(tmp_path: Path) -> None:
    add_nvme(tmp_path)
    add_nvme(tmp_path, "nvme1n1", "259:9")
    for member in ("nvme0n1p2", "nvme1n1p2"):
        link(tmp_path / "sys/fs/btrfs/uuid/devices" / member, tmp_path / "sys/class/block" / member)
    (tmp_path / "sys/fs/btrfs/features").mkdir()
    add_mounts(tmp_path, "0:31 /@ / rw btrfs /dev/nvme0n1p2 rw,subvol=/@")
    found = drive(tmp_path)
    assert found.kind == "nvme" and found.disks == ("nvme0n1", "nvme1n1")


@pytest.mark.parametrize(("filesystem", "source", "kind", "word"), [
    ("tmpfs", "tmpfs", "tmpfs", "RAM"), ("nfs4", "server:/export", "network", "share server:/export"),
    ("cifs", "//server/share", "network", "cifs"), ("9p", "C:\\134", "network", "Windows drive"),
    ("9p", "drvfs", "network", "Windows drive"), ("virtiofs", "shared", "network", "folder of the host"),
    ("fuse.sshfs", "me@host:", "network", "sshfs"), ("zfs", "tank/data", "unknown", "no block device"),
])  # fmt: skip
def test_filesystems_without_a_disk(tmp_path: Path, filesystem: str, source: str, kind: str, word: str) -> None:
    add_mounts(tmp_path, f"0:40 / / ro {filesystem} {source} rw")
    found = drive(tmp_path)
    assert found.kind == kind and word in found.reason and found.is_read_only and found.disks == ()


def test_overlay_looks_through_its_upper_layer(tmp_path: Path) -> None:
    add_nvme(tmp_path)
    add_mounts(
        tmp_path,
        "259:2 / / rw ext4 /dev/nvme0n1p2 rw",
        f"0:50 / / rw overlay overlay rw,lowerdir=/l,upperdir={tmp_path},workdir=/w",
    )
    found = drive(tmp_path)
    assert (found.kind, found.filesystem) == ("nvme", "overlay") and "upper layer" in found.reason


def test_overlay_in_a_container_uses_the_runtimes_bind_mounts(tmp_path: Path) -> None:
    add_nvme(tmp_path)
    overlay = "0:50 / / rw overlay overlay rw,lowerdir=/l,upperdir=/not/visible,workdir=/w"
    add_mounts(tmp_path, overlay)
    assert drive(tmp_path).kind == "unknown" and "mounted volume" in drive(tmp_path).reason
    add_mounts(tmp_path, overlay, "259:2 /docker/containers/ab/hosts /etc/hosts rw ext4 /dev/nvme0n1p2 rw")
    found = drive(tmp_path)
    assert found.kind == "nvme" and "runtime" in found.reason


def test_loop_device_names_what_is_below(tmp_path: Path) -> None:
    add_nvme(tmp_path)
    add_disk(tmp_path, "loop0", "virtual", {"queue/rotational": "0", "loop/backing_file": "/images/disk.img"})
    link(tmp_path / "sys/dev/block/7:0", tmp_path / "sys/class/block/loop0")
    add_mounts(tmp_path, "7:0 / / rw ext4 /dev/loop0 rw", "259:2 / /images rw ext4 /dev/nvme0n1p2 rw")
    found = drive(tmp_path)
    assert found.kind == "nvme" and found.reason.startswith("loop device on /images/disk.img")
    write(tmp_path / "sys/class/block/loop0/loop/backing_file", "")
    assert drive(tmp_path).disks == ("loop0",)


def test_paths_that_do_not_exist_and_longest_mount_wins(tmp_path: Path) -> None:
    add_nvme(tmp_path)
    point = str(tmp_path).replace(" ", "\\040")
    add_mounts(tmp_path, "0:1 / / rw tmpfs none rw", f"259:2 / {point} rw ext4 /dev/nvme0n1p2 rw")
    found = drive_of(tmp_path / "not" / "yet", sys_root=tmp_path, usage=usage)
    assert found.kind == "nvme" and found.path.endswith("not/yet")
    assert drive(tmp_path, "/").kind == "tmpfs"


def test_mount_points_with_spaces_and_damaged_lines(tmp_path: Path) -> None:
    add_mounts(tmp_path, "8:1 / /my\\040disk rw ext4 /dev/sda1 rw")
    with (tmp_path / "proc/self/mountinfo").open("a") as out:
        out.write("nonsense\n")
    mounts = read_mounts(tmp_path)
    assert [m.mount_point for m in mounts] == ["/my disk"]
    assert mount_of("/other", mounts) is None


@pytest.mark.parametrize(("path", "kind"), [("\\\\server\\share", "network"), ("data", "unknown")])
def test_without_a_mount_table(tmp_path: Path, path: str, kind: str) -> None:
    found = drive_of(path, sys_root=tmp_path, usage=usage)
    assert found.kind == kind and found.free_bytes == 400


def test_empty_path_is_refused() -> None:
    with pytest.raises(ValueError, match="no path given"):
        drive_of("  ")


def test_local_drives_leaves_out_what_holds_no_files(tmp_path: Path) -> None:
    add_nvme(tmp_path)
    add_mounts(
        tmp_path, "259:2 / / rw ext4 /dev/nvme0n1p2 rw", "259:2 /sub /tmp rw ext4 /dev/nvme0n1p2 rw",
        "7:1 / /usr ro squashfs /dev/loop1 ro", "0:9 / /proc rw proc proc rw", "0:44 / /home rw nfs server:/x rw",
        "8:9 / /not-there rw ext4 /dev/sdz1 rw", "8:8 / /etc rw ext4 /dev/sdy1 rw",
    )  # fmt: skip

    def refusing(path: str) -> tuple[int, int]:
        if path == "/etc":
            raise PermissionError(13, "no")
        return usage(path)

    assert [d.path for d in local_drives(sys_root=tmp_path, usage=refusing)] == ["/"]

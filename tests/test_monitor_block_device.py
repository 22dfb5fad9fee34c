"""Which disks lie under a path: partitions, LVM, RAID, loop files, btrfs, overlay, and what has none."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from monitor_fakes import fake_system, write_stat

from outcore.monitor.block_device import BlockDevice
from outcore.monitor.drive_sensor import DriveSensor, run_json_command
from outcore.monitor.sensor import SensorBoard


def add_disk(sys_root: Path, name: str) -> Path:
    device = sys_root / "devices" / name
    device.mkdir(parents=True, exist_ok=True)
    write_stat(device, read_sectors=10, write_sectors=20, in_flight=3, queue_ms=7)
    (sys_root / "block").mkdir(parents=True, exist_ok=True)
    (sys_root / "block" / name).symlink_to(device)
    return device


def point_path_at(sys_root: Path, path: Path, node: Path) -> None:
    number = os.stat(path).st_dev
    folder = sys_root / "dev" / "block"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{os.major(number)}:{os.minor(number)}").symlink_to(node)


def test_partition_leads_to_its_disk(tmp_path: Path) -> None:
    sys_root, proc_root, _ = fake_system(tmp_path / "fake", tmp_path)
    assert BlockDevice(tmp_path, sys_root, proc_root).disks == ("nvme0n1",)


def test_raid_under_lvm_sums_its_disks(tmp_path: Path) -> None:
    sys_root = tmp_path / "sys"
    disks = [add_disk(sys_root, "nvme0n1"), add_disk(sys_root, "nvme1n1")]
    raid, volume = add_disk(sys_root, "md0"), add_disk(sys_root, "dm-0")
    for upper, lowers in ((raid, disks), (volume, [raid])):
        (upper / "slaves").mkdir()
        for lower in lowers:
            (upper / "slaves" / lower.name).symlink_to(lower)
    point_path_at(sys_root, tmp_path, volume)
    device = BlockDevice(tmp_path, sys_root, tmp_path / "proc")
    assert device.disks == ("nvme0n1", "nvme1n1")
    counters = device.read()
    assert (counters.read_bytes, counters.write_bytes) == (2 * 10 * 512, 2 * 20 * 512)
    assert (counters.in_flight, counters.queue_ms) == (6, 14)


def test_loop_device_whose_file_is_gone_counts_itself(tmp_path: Path) -> None:
    sys_root = tmp_path / "sys"
    loop = add_disk(sys_root, "loop0")
    (loop / "loop").mkdir()
    (loop / "loop" / "backing_file").write_text("/no/such/image\n")
    point_path_at(sys_root, tmp_path, loop)
    assert BlockDevice(tmp_path, sys_root, tmp_path / "proc").disks == ("loop0",)


def test_devices_stacked_in_a_circle_are_refused(tmp_path: Path) -> None:
    sys_root = tmp_path / "sys"
    volume = add_disk(sys_root, "dm-0")
    (volume / "slaves").mkdir()
    (volume / "slaves" / "dm-0").symlink_to(volume)
    point_path_at(sys_root, tmp_path, volume)
    with pytest.raises(OSError, match="more than"):
        BlockDevice(tmp_path, sys_root, tmp_path / "proc")


def mountinfo(root: Path, line: str) -> Path:
    folder = root / "proc" / "self"
    folder.mkdir(parents=True)
    (folder / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sdz1 rw\n" + line + "\n")
    return root / "proc"


def test_btrfs_is_found_by_its_source(tmp_path: Path) -> None:
    sys_root = tmp_path / "sys"
    (sys_root / "dev" / "block").mkdir(parents=True)
    disk = add_disk(sys_root, "nvme0n1")
    (sys_root / "class" / "block").mkdir(parents=True)
    (sys_root / "class" / "block" / "nvme0n1").symlink_to(disk)
    spaced = str(tmp_path).replace(" ", "\\040")
    proc_root = mountinfo(tmp_path, f"30 22 0:33 / {spaced} rw - btrfs /dev/nvme0n1 rw")
    assert BlockDevice(tmp_path, sys_root, proc_root).disks == ("nvme0n1",)


@pytest.mark.parametrize("kind", ["tmpfs", "9p", "nfs4"])
def test_what_has_no_block_device_says_what_it_is(tmp_path: Path, kind: str) -> None:
    sys_root = tmp_path / "sys"
    (sys_root / "dev" / "block").mkdir(parents=True)
    proc_root = mountinfo(tmp_path, f"30 22 0:33 / {tmp_path} rw - {kind} server:/x rw")
    with pytest.raises(OSError, match=kind):
        BlockDevice(tmp_path, sys_root, proc_root)
    board = SensorBoard()
    sensor = DriveSensor(board, tmp_path, sys_root, proc_root)
    assert sensor.read_counters() is None and sensor.sample().temp_c is None and sensor.disks == ()
    assert len(board.explanations()) == 1 and kind in board.explanations()[0]
    assert (sensor.read_free_bytes() or 0) > 0


def test_no_sysfs_is_said(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no Linux block counters"):
        BlockDevice(tmp_path, tmp_path / "none", tmp_path)


def test_no_hwmon_is_explained_once(tmp_path: Path) -> None:
    sys_root, proc_root, _ = fake_system(tmp_path / "fake", tmp_path, disk="vda")
    board = SensorBoard()
    sensor = DriveSensor(board, tmp_path, sys_root, proc_root)
    sample = sensor.sample()
    assert sample.temp_c is None and sample.lifetime_written_bytes is None and sample.counters is not None
    assert ["hwmon" in text for text in board.explanations()] == [True, False]
    assert "not an NVMe drive" in board.explanations()[1]


def test_sata_temperature_comes_from_drivetemp(tmp_path: Path) -> None:
    sys_root, proc_root, device = fake_system(tmp_path / "fake", tmp_path, disk="sda")
    hwmon = device / "device" / "hwmon" / "hwmon1"
    hwmon.mkdir(parents=True)
    (hwmon / "temp1_input").write_text("31000\n")
    assert DriveSensor(SensorBoard(), tmp_path, sys_root, proc_root).sample().temp_c == 31.0


def test_multipath_asks_the_subsystems_controllers(tmp_path: Path) -> None:
    sys_root, proc_root, device = fake_system(tmp_path / "fake", tmp_path, disk="nvme2n1")
    (device / "device" / "nvme0").mkdir(parents=True)
    assert DriveSensor(SensorBoard(), tmp_path, sys_root, proc_root).sample().temp_c == 47.85


def test_lifetime_falls_back_to_smartctl(tmp_path: Path) -> None:
    sys_root, proc_root, _ = fake_system(tmp_path / "fake", tmp_path)

    def run(command: list[str]) -> str:
        if command[0] == "nvme":
            raise OSError("not installed")
        return json.dumps({"nvme_smart_health_information_log": {"data_units_written": 3}})

    sensor = DriveSensor(SensorBoard(), tmp_path, sys_root, proc_root, run)
    assert sensor.sample().lifetime_written_bytes == 3 * 512_000


def test_run_json_command(tmp_path: Path) -> None:
    assert run_json_command(("echo", "{}")) == "{}\n"
    with pytest.raises(OSError, match="not installed"):
        run_json_command(("no-such-tool-here",))
    with pytest.raises(OSError, match="exit code"):
        run_json_command(("ls", str(tmp_path / "absent")))

"""Drive counters and temperature on fake machines."""

from pathlib import Path

import pytest

from outcore.monitor.sensors.drive import BlockDevice, DriveSensor
from outcore.monitor.sensors.host import SensorBoard
from tests.monitor.fakes import fake_system, write_stat
from tests.refused import refused


def test_a_partition_counts_its_whole_disk_and_a_raid_all_of_its_disks(tmp_path: Path) -> None:
    device = fake_system(tmp_path / "fake", tmp_path)
    second = device.parent / "nvme1n1"
    second.mkdir()
    for disk in (device, second):
        write_stat(disk, read_sectors=10, write_sectors=20, in_flight=3, queue_ms=7)
    block = BlockDevice(tmp_path, tmp_path / "fake")
    counters = block.read()
    assert block.disks == ("nvme0n1",)
    assert (counters.read_bytes, counters.write_bytes) == (10 * 512, 20 * 512)
    assert (counters.in_flight, counters.queue_ms) == (3, 7)
    sys_root = tmp_path / "fake" / "sys"
    for folder in ("block", "class/block"):
        (sys_root / folder / "nvme1n1").symlink_to(second)
    slaves = device / "nvme0n1p1" / "slaves"
    slaves.mkdir()
    for disk in (device, second):
        (slaves / disk.name).symlink_to(disk)
    (device / "nvme0n1p1" / "partition").unlink()
    block = BlockDevice(tmp_path, tmp_path / "fake")
    assert block.disks == ("nvme0n1", "nvme1n1")
    assert (block.read().read_bytes, block.read().in_flight) == (2 * 10 * 512, 6)


@pytest.mark.parametrize("kind", ["tmpfs", "9p", "nfs4"])
def test_what_has_no_block_device_says_what_it_is(tmp_path: Path, kind: str) -> None:
    fake_system(tmp_path / "fake", tmp_path, filesystem=kind)
    refused(OSError, kind, lambda: BlockDevice(tmp_path, tmp_path / "fake"))
    board = SensorBoard()
    sensor = DriveSensor(board, tmp_path, tmp_path / "fake")
    assert sensor.read_counters() is None and sensor.sample().temp_c is None and sensor.disks == ()
    assert len(board.explanations()) == 1 and kind in board.explanations()[0]
    assert (sensor.read_free_bytes() or 0) > 0

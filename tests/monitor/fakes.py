"""A fake NVML, /sys and /proc for the monitor's tests."""

import os
from pathlib import Path
from types import SimpleNamespace

from outcore.monitor import Sampler


class FakeNvmlError(Exception):
    def __init__(self, value: int, text: str) -> None:
        super().__init__(text)
        self.value = value


class FakeNvml:
    """pynvml's functions that the sampler calls, with a machine that tests can change."""

    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    NVML_PCIE_UTIL_TX_BYTES = 0
    NVML_PCIE_UTIL_RX_BYTES = 1

    def __init__(self) -> None:
        self.used_bytes = 2 << 30
        self.temp_c = 60
        self.power_mw = 100_000
        self.util_pct = 50
        self.reasons = 0
        self.rx_kb_per_s = 12_000_000
        self.errors: dict[str, FakeNvmlError] = {}
        self.shutdowns = 0
        self.asked: list[object] = []

    def _check(self, name: str) -> None:
        for key in (name, "*"):
            if key in self.errors:
                raise self.errors[key]

    def nvmlInit(self) -> None:
        self._check("nvmlInit")

    def nvmlShutdown(self) -> None:
        self.shutdowns += 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        self.asked.append(index)
        return f"gpu{index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.asked.append(uuid)
        return uuid

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> str:
        self.asked.append(bus)
        return bus

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "Fake GPU"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        self._check("memory")
        return SimpleNamespace(used=self.used_bytes, total=8 << 30)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        self._check("util")
        return SimpleNamespace(gpu=self.util_pct)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        self._check("temp")
        return self.temp_c

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        self._check("power")
        return self.power_mw

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 140_000

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.reasons

    def nvmlDeviceGetPcieThroughput(self, handle: str, counter: int) -> int:
        self._check("pcie")
        return self.rx_kb_per_s if counter == self.NVML_PCIE_UTIL_RX_BYTES else 1_000_000

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: str) -> int:
        return 4

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: str) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        return 4

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        return 8


def write_stat(disk: Path, *, read_sectors: int, write_sectors: int, in_flight: int = 0, queue_ms: int = 0) -> None:
    disk.joinpath("stat").write_text(f"1 0 {read_sectors} 5 1 0 {write_sectors} 5 {in_flight} 9 {queue_ms} 0 0 0 0\n")


def fake_system(root: Path, path: Path, *, disk: str = "nvme0n1", filesystem: str = "ext4") -> Path:
    """A root whose /sys and /proc say that `path` lies on partition 1 of `disk`; returns the disk's folder."""
    device = root / "sys" / "devices" / "pci" / disk
    partition = device / f"{disk}p1"
    partition.mkdir(parents=True)
    partition.joinpath("partition").write_text("1\n")
    write_stat(device, read_sectors=0, write_sectors=0)
    for folder, name, node in (
        ("dev/block", "259:1", partition),
        ("class/block", disk, device),
        ("class/block", partition.name, partition),
        ("block", disk, device),
    ):
        (root / "sys" / folder).mkdir(parents=True, exist_ok=True)
        (root / "sys" / folder / name).symlink_to(node)
    hwmon = root / "sys" / "class" / "nvme" / "nvme0" / "hwmon3"
    hwmon.mkdir(parents=True)
    (hwmon / "temp1_input").write_text("47850\n")
    own, self_ = root / "proc" / str(os.getpid()), root / "proc" / "self"
    own.mkdir(parents=True)
    self_.mkdir()
    (own / "statm").write_text("9000 1000 10 1 0 5 0\n")
    (own / "status").write_text("Name:\tpython\nVmSwap:\t    2048 kB\n")
    (root / "proc" / "meminfo").write_text(
        "MemTotal:       16777216 kB\nMemAvailable:    4194304 kB\nSwapTotal:       1048576 kB\n"
        "SwapFree:         524288 kB\nHugePages_Total:       0\n"
    )
    mount_point = os.path.realpath(path).replace(" ", "\\040")
    (self_ / "mountinfo").write_text(f"30 1 259:1 / {mount_point} rw - {filesystem} /dev/{partition.name} rw\n")
    return device


NO_CHILDREN = SimpleNamespace(Process=lambda pid: SimpleNamespace(children=lambda recursive: []))


def make_sampler(tmp_path: Path, nvml: FakeNvml, **settings: object) -> tuple[Sampler, Path]:
    """A Sampler of the fake machine, and the folder of its disk."""
    device = fake_system(tmp_path / "fake", tmp_path)
    arguments: dict = {
        "nvml": nvml, "root": tmp_path / "fake", "psutil_module": NO_CHILDREN, **settings,
    }  # fmt: skip
    return Sampler(tmp_path / "not" / "there" / "yet", **arguments), device

"""Sampler and its sensors against a fake NVML, a fake /sys and /proc, and the machine of the test."""

import json
import os
import threading
from pathlib import Path

import pytest

from outcore.monitor import Sampler
from tests.monitor.fakes import FakeNvml, FakeNvmlError, make_sampler, write_stat
from tests.refused import failing
from tests.waiting import until


def test_snapshot_sums_the_window_between_snapshots(tmp_path: Path) -> None:
    nvml = FakeNvml()
    sampler, device = make_sampler(tmp_path, nvml, pinned_bytes=lambda: 123)
    sampler.sample_once()
    nvml.used_bytes, nvml.temp_c, nvml.power_mw, nvml.util_pct, nvml.reasons = 6 << 30, 85, 120_000, 100, 0x1 | 0x40
    sampler.sample_once()
    nvml.used_bytes, nvml.temp_c, nvml.power_mw, nvml.util_pct, nvml.reasons = 3 << 30, 70, 80_000, 0, 0x4
    sampler.sample_once()
    write_stat(device, read_sectors=2000, write_sectors=4000, queue_ms=10**9)
    snapshot = sampler.snapshot()
    assert snapshot["gpu_mem_bytes"] == 3 << 30
    assert snapshot["gpu_mem_peak_bytes"] == 6 << 30
    assert snapshot["gpu_temp_c"] == 85
    assert snapshot["gpu_power_w"] == 100.0
    assert snapshot["gpu_util_pct"] == 50.0
    assert snapshot["throttle"] == ["thermal (hardware)", "power cap"]
    assert snapshot["pcie_rx_gb_per_s"] == 12.0 and snapshot["pcie_tx_gb_per_s"] == 1.0
    assert (snapshot["pcie_gen"], snapshot["pcie_width"]) == (4, 4)
    assert snapshot["ram_rss_bytes"] == 1000 * os.sysconf("SC_PAGE_SIZE")
    assert snapshot["ram_available_bytes"] == 4 << 30
    assert snapshot["swap_used_bytes"] == 512 << 20 and snapshot["own_swap_bytes"] == 2 << 20
    assert snapshot["pinned_bytes"] == 123
    assert snapshot["nvme_read_bytes"] == 2000 * 512 and snapshot["nvme_write_bytes"] == 4000 * 512
    assert snapshot["nvme_queue_depth"] > 0
    assert snapshot["nvme_free_bytes"] > 0
    assert snapshot["nvme_temp_c"] == 47.85
    assert sampler.explanations() == []
    # A new window: no sample yet, so the last values; nothing moved on the drive.
    after = sampler.snapshot(gpu_mem_peak_bytes=77)
    assert after["gpu_mem_peak_bytes"] == 77 and after["gpu_temp_c"] == 70 and after["throttle"] == ["power cap"]
    assert after["nvme_read_bytes"] == 0 and after["nvme_write_bytes"] == 0
    described = sampler.describe()
    assert described["gpu_name"] == "Fake GPU" and described["gpu_mem_total_bytes"] == 8 << 30
    assert (described["pcie_gen_max"], described["pcie_width_max"]) == (4, 8)
    assert described["nvme_disks"] == ["nvme0n1"] and described["ram_total_bytes"] == 16 << 30
    sampler.close()
    assert nvml.shutdowns == 1
    json.dumps(snapshot, allow_nan=False)


GPU_FIELDS = ("gpu_mem_bytes", "gpu_mem_peak_bytes", "gpu_util_pct", "gpu_temp_c", "throttle", "pcie_rx_gb_per_s")


@pytest.mark.parametrize(("errors", "settings", "null", "words"), [
    ({"power": FakeNvmlError(3, "Not Supported")}, {}, ["gpu_power_w"], ["GPU power", "Not Supported", "gpu_power_w"]),
    ({"*": FakeNvmlError(15, "GPU is lost")}, {}, GPU_FIELDS, ["GPU is lost"]),
    ({"nvmlInit": FakeNvmlError(12, "Shared Library Not Found")}, {}, GPU_FIELDS, ["Shared Library Not Found"]),
    ({}, {"gpu": None}, GPU_FIELDS, []),
    ({}, {"pinned_bytes": failing(RuntimeError("pool closed"))}, ["pinned_bytes"], ["pool closed"]),
])  # fmt: skip
def test_what_gives_nothing_is_null_and_said_once(tmp_path: Path, errors, settings, null, words) -> None:
    nvml = FakeNvml()
    starts = "nvmlInit" not in errors
    if not starts:
        nvml.errors = errors
    sampler, _ = make_sampler(tmp_path, nvml, **settings)
    sampler.sample_once()
    has_gpu = starts and settings.get("gpu", 0) is not None
    assert sampler.snapshot()["gpu_temp_c"] == (60 if has_gpu else None)
    nvml.errors = errors
    for _ in range(3):
        sampler.sample_once()
    snapshot = sampler.snapshot()
    assert {name: snapshot[name] for name in null} == dict.fromkeys(null)
    assert snapshot["ram_available_bytes"] == 4 << 30
    assert (snapshot["gpu_temp_c"] == 60) == (null is not GPU_FIELDS)
    assert sampler.describe()["gpu_name"] == ("Fake GPU" if has_gpu else None)
    said = sampler.take_explanations()
    assert len(said) == bool(words) and all(word in said[0] for word in words)
    assert sampler.take_explanations() == [] and sampler.explanations() == said
    sampler.close()
    assert nvml.shutdowns == has_gpu


@pytest.mark.parametrize(("gpu", "asked"), [
    (1, 1), ("GPU-aa-b-c-d-e", "GPU-aa-b-c-d-e"), ("aa-b-c-d-e", "GPU-aa-b-c-d-e"), ("0000:01:00.0", "0000:01:00.0"),
])  # fmt: skip
def test_gpu_is_found_by_index_uuid_or_bus(tmp_path: Path, gpu: int | str, asked: object) -> None:
    nvml = FakeNvml()
    sampler, _ = make_sampler(tmp_path, nvml, gpu=gpu)
    sampler.sample_once()
    assert nvml.asked == [asked]


def test_a_drive_that_vanishes_is_null_from_then_on(tmp_path: Path) -> None:
    sampler, device = make_sampler(tmp_path, FakeNvml())
    sampler.sample_once()
    assert sampler.snapshot()["nvme_read_bytes"] == 0
    (device / "stat").unlink()
    assert sampler.snapshot()["nvme_read_bytes"] is None
    write_stat(device, read_sectors=5, write_sectors=5)
    assert sampler.snapshot()["nvme_write_bytes"] is None
    assert [text for text in sampler.explanations() if "nvme0n1" in text]


def test_thread_samples_and_stops_on_this_machine(tmp_path: Path) -> None:
    """Real /proc and /sys, real NVML or none."""
    with Sampler(tmp_path, interval_s=0.01) as sampler:
        until(lambda: sampler.snapshot()["ram_rss_bytes"] is not None)
        snapshot = sampler.snapshot()
        assert snapshot["ram_rss_bytes"] > 1 << 20
        assert snapshot["nvme_free_bytes"] > 0
        assert sampler.describe()["ram_total_bytes"] > snapshot["ram_available_bytes"] > 0
        assert any(thread.name == "outcore-sampler" for thread in threading.enumerate())
    assert not any(thread.name == "outcore-sampler" for thread in threading.enumerate())
    assert sampler.cpu_s > 0
    with pytest.raises(ValueError, match="above 0 s"):
        Sampler(interval_s=0)


def test_a_driver_that_hangs_nulls_the_fields_and_never_blocks(tmp_path: Path) -> None:
    nvml, release = FakeNvml(), threading.Event()
    sampler, _ = make_sampler(tmp_path, nvml)
    sampler.sample_once()
    nvml.nvmlDeviceGetPowerUsage = lambda handle: release.wait(30) and 0  # type: ignore[method-assign]
    sampler.start()
    sampler._last_at_s -= 1000  # as if it had hung for long
    snapshot = sampler.snapshot()
    assert snapshot["gpu_temp_c"] is None and snapshot["nvme_free_bytes"] > 0
    assert any("hang" in text for text in sampler.explanations())
    release.set()
    sampler.close()


@pytest.mark.gpu
def test_real_gpu_fields(tmp_path: Path) -> None:
    import torch

    uuid = str(torch.cuda.get_device_properties(0).uuid)
    held = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    sampler = Sampler(tmp_path, gpu=uuid)
    sampler.sample_once()
    snapshot = sampler.snapshot()
    assert snapshot["gpu_mem_bytes"] >= held.numel()
    assert 0 < snapshot["gpu_temp_c"] < 120
    assert sampler.describe()["gpu_mem_total_bytes"] > 1 << 30
    sampler.close()


def test_resident_bytes_include_children_that_come_and_go(tmp_path: Path) -> None:
    import subprocess
    import sys

    import psutil

    from outcore.monitor.sensors.host import HostSensor, SensorBoard

    code = "import sys; held = bytearray(b'x' * (64 << 20)); print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdin is not None
    child.stdout.readline()
    board = SensorBoard()
    sensor = HostSensor(board)
    with_child = sensor.sample().ram_rss_bytes
    child.stdin.close()
    child.stdout.close()
    child.wait()
    without_child = sensor.sample().ram_rss_bytes
    assert with_child is not None and without_child is not None and with_child - without_child > 48 << 20
    # A system without /proc asks psutil.
    foreign = HostSensor(board, tmp_path, psutil_module=psutil)
    sample = foreign.sample()
    assert sample.ram_rss_bytes is not None and sample.ram_rss_bytes > 1 << 20
    assert sample.swap_used_bytes is None and sample.own_swap_bytes is None


def test_a_bug_in_sampling_ends_the_thread_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler, _ = make_sampler(tmp_path, FakeNvml())
    monkeypatch.setattr(sampler, "sample_once", failing(KeyError("bug")))
    sampler.start()
    assert sampler._thread is not None
    sampler._thread.join(20)
    assert sampler.snapshot()["gpu_temp_c"] is None
    assert any("sampler stopped (KeyError" in text for text in sampler.explanations())
    sampler.close()


def test_older_drivers_name_throttle_reasons_differently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.delattr(FakeNvml, "nvmlDeviceGetCurrentClocksEventReasons")
    nvml.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: 0x20  # type: ignore[attr-defined]
    sampler, _ = make_sampler(tmp_path, nvml)
    sampler.sample_once()
    assert sampler.snapshot()["throttle"] == ["thermal (software)"]

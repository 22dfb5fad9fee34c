"""Is this machine fit for a long run: what is looked at before the trial, and what its steps showed.

Every check stands alone: one that cannot be made is a note with the reason, never a failure of the test.

Reading a trial's step records."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from outcore.common.files import nearest_existing, newest
from outcore.common.quantities import GIB, MIB, format_gb, format_gib
from outcore.common.words import own_command
from outcore.machine import Machine
from outcore.monitor.sensors import DriveSensor, GpuSensor, SensorBoard, describe
from outcore.monitor.watches import HOT_DRIVE_C, STALL_NVME_FRACTION, hold_off_sleep
from outcore.performance.show import Check, Level
from outcore.plan import MEASURED_PROFILE, differs
from outcore.plan.run import drive_performance


def measured_steps(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The records after the warm-up."""
    return found["steps"][found["warm_steps"] :]


def median_of(records: list[dict[str, Any]], key: str) -> float | None:
    """Median of a figure over the steps that have it."""
    values = [record[key] for record in records if record.get(key) is not None]
    return float(statistics.median(values)) if values else None


BUSY_CPU_PCT = 25.0
BUSY_GPU_PCT = 10.0
OTHERS_VRAM_BYTES = GIB
LITTLE_RAM_SHARE = 0.4
"""Less than this of the RAM available before a run begins: something else holds it."""
LITTLE_RAM_LEFT = 0.05
FULL_VRAM_SHARE = 0.97
CPU_LOOK_S = 0.5


def before_the_trial(
    machine: Machine,
    *,
    drive: Path,
    offloads: bool = True,
    profile: Path = MEASURED_PROFILE,
    psutil_module: Any = psutil,
    sensors: Callable[[], GpuSensor | None] | None = None,
) -> list[Check]:
    """Profile, load by others, power, sleep, drive. `drive`: where states and checkpoints go; with
    `offloads` each step reads and writes there, else checkpoints alone do."""
    gpu = sensors or (lambda: _gpu_sensor(machine))
    looks: list[tuple[str, Callable[[], list[Check]]]] = [
        ("machine profile", lambda: [_profile(machine, profile)]),
        ("GPU", lambda: _gpu(gpu())),
        ("background load", lambda: [_cpu(psutil_module)]),
        ("RAM", lambda: [_ram(psutil_module)]),
        ("power supply", lambda: [_power(psutil_module)]),
        ("sleep", lambda: [_sleep(machine)]),
        ("drive", lambda: _drive(drive)),
        ("drive speed", lambda: [_drive_speed(drive, profile, offloads)]),
    ]
    return [check for name, look in looks for check in _safely(name, look)]


def _safely(name: str, look: Callable[[], list[Check]]) -> list[Check]:
    try:
        return look()
    except Exception as error:  # a sensor's library may raise anything; the other checks still count
        return [Check(name, "note", f"could not be looked at ({describe(error)})")]


def _profile(machine: Machine, path: Path) -> Check:
    name, path = "machine profile", newest(path)
    if not path.is_file():
        return Check(name, "warning", f"never measured ({path} is not there): run {own_command('probe')}")
    try:
        saved = Machine.load(path)
    except (ValueError, OSError) as error:
        return Check(name, "warning", f"damaged, so nominal rates are planned with: {error}")
    found = differs(machine, saved)
    if found:
        return Check(name, "warning", f"measured on another machine: {'; '.join(found)}. Run {own_command('probe')}")
    return Check(name, "ok", f"links as measured by {own_command('probe')} ({path})")


def _gpu_sensor(machine: Machine) -> GpuSensor | None:
    return GpuSensor(SensorBoard(), 0) if machine.gpus else None


def _gpu(sensor: GpuSensor | None) -> list[Check]:
    if sensor is None:
        return [Check("GPU", "note", "none found: the run trains on the CPU")]
    if not sensor.open():
        return [Check("GPU", "warning", "its driver does not answer NVML: temperatures and throttling stay unknown")]
    try:
        sample = sensor.sample()
    finally:
        sensor.close()
    checks = []
    used, busy = sample.mem_used_bytes, sample.util_pct
    if used is not None:
        level: Level = "warning" if used > OTHERS_VRAM_BYTES else "ok"
        checks.append(Check("VRAM of others", level, f"{format_gib(used)} in use before the run"))
    if busy is not None:
        level = "warning" if busy > BUSY_GPU_PCT else "ok"
        checks.append(Check("GPU load of others", level, f"{busy:.0f} % busy before the run"))
    if sample.temp_c is not None:
        checks.append(Check("GPU temperature", "ok", f"{sample.temp_c:.0f} °C before the run"))
    return checks or [Check("GPU", "note", "tells nothing of itself")]


def _cpu(psutil_module: Any) -> Check:
    busy = float(psutil_module.cpu_percent(interval=CPU_LOOK_S))
    words = f"the CPU is {busy:.0f} % busy before the run"
    if busy > BUSY_CPU_PCT:
        return Check("background load", "warning", f"{words}: close what is not needed, the optimizer wants its cores")
    return Check("background load", "ok", words)


def _ram(psutil_module: Any) -> Check:
    memory = psutil_module.virtual_memory()
    words = f"{format_gib(memory.available)} of {format_gib(memory.total)} available"
    if memory.available < LITTLE_RAM_SHARE * memory.total:
        return Check("RAM", "warning", f"{words}: other programs hold the rest")
    return Check("RAM", "ok", words)


def _power(psutil_module: Any) -> Check:
    battery = psutil_module.sensors_battery() if hasattr(psutil_module, "sensors_battery") else None
    if battery is None:
        return Check("power supply", "ok", "no battery: on mains")
    if battery.power_plugged is False:
        return Check(
            "power supply", "stop", f"on battery ({battery.percent:.0f} %): plug in, or the run ends with the charge"
        )
    return Check("power supply", "ok", f"on mains, battery {battery.percent:.0f} %")


def _sleep(machine: Machine) -> Check:
    with hold_off_sleep("outcore performance test") as hold:
        held, words = hold.held, hold.words
    if held:
        return Check("sleep", "ok", words)
    return Check("sleep", "warning" if machine.gpus else "note", words)


def _drive(path: Path) -> list[Check]:
    board = SensorBoard()
    sensor = DriveSensor(board, path)
    sample = sensor.sample()
    usage = shutil.disk_usage(nearest_existing(path))
    checks = [Check("drive space", "ok", f"{format_gb(usage.free)} of {format_gb(usage.total)} free at {path}")]
    if sample.temp_c is not None:
        level: Level = "warning" if sample.temp_c >= HOT_DRIVE_C else "ok"
        checks.append(Check("drive temperature", level, f"{sample.temp_c:.0f} °C"))
    else:
        checks.append(Check("drive temperature", "note", "not told by this system"))
    return checks


def _drive_speed(path: Path, profile: Path, offloads: bool) -> Check:
    found = drive_performance(nearest_existing(path), measured=profile)
    read, write = found["sequential_read_gb_s"], found["sequential_write_gb_s"]
    words = f"reads {read:.1f} GB/s, writes {write:.1f} GB/s"
    if not offloads:
        return Check("drive speed", "ok", f"{words}; checkpoints go there, steps do not need it")
    told = [warning.removeprefix("Warning: ") for warning in found["warnings"]]
    return Check("drive speed", "warning" if told else "ok", " ".join(told) or words)


def during_the_trial(found: dict[str, Any]) -> list[Check]:
    """Checks of the machine during the measured steps: throttling, link, swap, memory, stalls."""
    records, machine = measured_steps(found), found["machine"]
    checks = [_throttling(records), _link(records, machine), _swap(records), _memory_left(records, machine)]
    checks += [_vram(found["steps"], machine, found["staying_bytes"]), _stalls(records)]
    return [check for check in checks if check is not None]


def _throttling(records: list[dict[str, Any]]) -> Check | None:
    seen = [set(record["throttle"]) for record in records if record.get("throttle") is not None]
    if not seen:
        return None
    bad = set().union(*seen) & {"thermal (software)", "thermal (hardware)", "hardware slowdown", "power brake"}
    temps = [record["gpu_temp_c"] for record in records if record.get("gpu_temp_c") is not None]
    at = f" at {max(temps):.0f} °C" if temps else ""
    if bad:
        return Check("throttling", "warning", f"the GPU slowed itself down{at}: {', '.join(sorted(bad))}")
    return Check("throttling", "ok", f"none in the measured steps{at}")


def _link(records: list[dict[str, Any]], machine: dict[str, Any]) -> Check | None:
    seen = [(r["pcie_gen"], r["pcie_width"]) for r in records if r.get("pcie_gen") and r.get("pcie_width")]
    best = machine.get("pcie_gen_max"), machine.get("pcie_width_max")
    if not seen or None in best:
        return None
    gen, width = max(seen)
    words = f"PCIe {gen}.0 x{width} under load, PCIe {best[0]}.0 x{best[1]} at best"
    is_low = gen < best[0] or width < best[1]
    return Check("link to the GPU", "warning" if is_low else "ok", words)


def _swap(records: list[dict[str, Any]]) -> Check | None:
    own = [record["own_swap_bytes"] for record in records if record.get("own_swap_bytes") is not None]
    if not own:
        return None
    if max(own) > 64 * MIB:
        return Check("swap", "warning", f"{format_gib(max(own))} of the run lie in swap: RAM is too small for it")
    return Check("swap", "ok", "nothing of the run lies in swap")


def _memory_left(records: list[dict[str, Any]], machine: dict[str, Any]) -> Check | None:
    left = [record["ram_available_bytes"] for record in records if record.get("ram_available_bytes") is not None]
    total = machine.get("ram_total_bytes")
    if not left or not total:
        return None
    words = f"{format_gib(min(left))} of {format_gib(total)} were still available in the steps"
    return Check("RAM in the steps", "warning" if min(left) < LITTLE_RAM_LEFT * total else "ok", words)


def _vram(records: list[dict[str, Any]], machine: dict[str, Any], staying_bytes: int) -> Check | None:
    used = [record["gpu_mem_bytes"] for record in records if record.get("gpu_mem_bytes") is not None]
    total = machine.get("gpu_mem_total_bytes")
    if not used or not total:
        return None
    words = f"{format_gib(max(used))} of {format_gib(total)} in use at the most"
    if staying_bytes:
        words += f", {format_gib(staying_bytes)} of it by layers that go when it is needed"
    is_full = max(used) - staying_bytes > FULL_VRAM_SHARE * total
    return Check("VRAM in the steps", "warning" if is_full else "ok", words)


def _stalls(records: list[dict[str, Any]]) -> Check | None:
    shares = [record["phase_s"].get("stall_nvme", 0.0) / record["step_s"] for record in records if record["step_s"]]
    if not shares or not max(shares):
        return None
    share = sum(shares) / len(shares)
    words = f"the GPU waits for the drive {100 * share:.0f} % of a step"
    return Check("stalls", "warning" if share > STALL_NVME_FRACTION else "ok", words)

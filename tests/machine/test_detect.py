import json
import os
from pathlib import Path

import pytest

from outcore.common.quantities import GIB, MIB
from outcore.machine import Machine, detect_machine
from outcore.machine.gpus import OLD_QUERY_FIELDS, detect_gpus, parse_listing, run_command
from outcore.machine.host import available_ram_bytes, detect_os, detect_ram, usable_cores
from tests.machine.fakes import linux_root, no_tools, smi, write
from tests.refused import refused


def test_reference_laptop_is_detected(tmp_path: Path) -> None:
    machine = detect_machine(sys_root=linux_root(tmp_path), runner=smi(), system="Linux")
    gpu = machine.gpus[0]
    assert gpu.compute_capability == (8, 9) and gpu.vram_bytes == 8188 * MIB
    assert (gpu.pcie_gen_current, gpu.pcie_gen_max, gpu.pcie_width_max) == (1, 4, 8)
    assert gpu.pcie_max_gb_per_s == pytest.approx(15.75, abs=0.01)
    assert machine.cuda_driver_version == "13.0" and machine.cuda_driver_major == 13
    assert (machine.cpu_cores, machine.cpu_threads, machine.cpu_simd) == (2, 4, ("avx", "avx2", "fma"))
    assert machine.os_name == "Ubuntu 24.04.1 LTS" and not machine.is_wsl2
    assert machine.ram_total_bytes == 64 * GIB and machine.swap_total_bytes == 2 * MIB
    assert machine.has_gpu and machine.notes == ()


@pytest.mark.parametrize(
    ("kernel", "is_wsl2", "has_note"),
    [("microsoft-standard-WSL2", True, False), ("", False, False), ("Microsoft", False, True)],
)
def test_wsl(tmp_path: Path, kernel: str, is_wsl2: bool, has_note: bool) -> None:
    info = detect_os(linux_root(tmp_path, wsl=kernel), "Linux")
    assert info.is_wsl2 is is_wsl2 and bool(info.notes) is has_note


@pytest.mark.parametrize(("system", "family"), [("Windows", "windows"), ("Darwin", "macos"), ("FreeBSD", "freebsd")])
def test_other_systems(tmp_path: Path, system: str, family: str) -> None:
    assert detect_os(tmp_path, system).family == family


def test_container_limits_count(tmp_path: Path) -> None:
    root = linux_root(tmp_path)
    write(root / "proc/self/cgroup", "0::/slice\n")
    write(root / "sys/fs/cgroup/slice/memory.max", f"{8 * GIB}\n")
    write(root / "sys/fs/cgroup/slice/memory.current", f"{3 * GIB}\n")
    write(root / "sys/fs/cgroup/slice/memory.stat", f"anon 5\ninactive_file {GIB}\n")
    ram = detect_ram(root)
    assert ram.total_bytes == 8 * GIB and ram.available_bytes == 6 * GIB and "container" in ram.notes[0]


def test_control_group_v1_and_no_limit(tmp_path: Path) -> None:
    root = linux_root(tmp_path)
    write(root / "proc/self/cgroup", "5:memory:/job\n")
    write(root / "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712")
    assert detect_ram(root).total_bytes == 64 * GIB
    write(root / "sys/fs/cgroup/memory/job/memory.limit_in_bytes", str(4 * GIB))
    write(root / "sys/fs/cgroup/memory/job/memory.usage_in_bytes", str(5 * GIB))
    ram = detect_ram(root)
    assert ram.total_bytes == 4 * GIB and ram.available_bytes == 0


def test_quotas_of_cores(tmp_path: Path) -> None:
    """The smallest around this process, in whole cores; a limit of nobody is none."""
    root = linux_root(tmp_path)
    group = root / "sys/fs/cgroup"
    there = usable_cores(root)
    assert there == len(os.sched_getaffinity(0))
    write(root / "proc/self/cgroup", "0::/job/step\n4:cpuacct,cpu:/job\n")
    write(group / "cpu.max", "max 100000\n")
    write(group / "cpu/cpu.cfs_quota_us", "-1\n")
    write(group / "cpu/cpu.cfs_period_us", "100000\n")
    assert usable_cores(root) == there
    write(group / "job/cpu.max", "190000 100000\n")
    write(group / "job/step/cpu.max", "max 100000\n")
    assert usable_cores(root) == 1
    write(group / "job/cpu.max", f"{1000 * 100000} 100000\n")
    assert usable_cores(root) == there
    write(group / "cpu/job/cpu.cfs_quota_us", "50000\n")
    write(group / "cpu/job/cpu.cfs_period_us", "100000\n")
    assert usable_cores(root) == 1, "half a core is one thread"


def test_page_cache_is_there_for_the_taking(tmp_path: Path) -> None:
    """Here 32 GiB are available to the host, MemAvailable, which counts both lists of the page cache too."""
    root = linux_root(tmp_path)
    group = root / "sys/fs/cgroup"
    write(group / "memory.max", "max\n")
    write(group / "memory.current", "5\n")
    assert available_ram_bytes(root) == 32 * GIB
    write(group / "memory.max", f"{10 * MIB}\n")
    write(group / "memory.current", f"{8 * MIB}\n")
    assert available_ram_bytes(root) == 2 * MIB
    write(group / "memory.stat", f"anon 5\ninactive_file {MIB}\nactive_file {MIB}\n")
    assert available_ram_bytes(root) == 4 * MIB
    write(group / "memory.stat", "inactive_file many\n")
    assert available_ram_bytes(root) == 2 * MIB


def test_page_cache_of_groups_within_counts_in_control_group_v1(tmp_path: Path) -> None:
    root = linux_root(tmp_path)
    write(root / "proc/self/cgroup", "5:memory:/docker/abc\n")  # the host's name for what the container sees at the top
    group = root / "sys/fs/cgroup/memory"
    write(group / "memory.limit_in_bytes", str(8 * GIB))
    write(group / "memory.usage_in_bytes", str(7 * GIB))
    stat = f"inactive_file 1\nactive_file 1\ntotal_inactive_file {2 * GIB}\ntotal_active_file {GIB}\n"
    write(group / "memory.stat", stat)
    assert available_ram_bytes(root) == 4 * GIB


def test_limits_of_the_groups_around_count(tmp_path: Path) -> None:
    """A SLURM step has no limit of its own, its job has; and a slice may be fuller than what is within."""
    root = linux_root(tmp_path)
    write(root / "proc/self/cgroup", "0::/slurm/job_7/step_0/task_0\n")
    job = root / "sys/fs/cgroup/slurm/job_7"
    write(job / "step_0/task_0/memory.max", "max\n")
    write(job / "memory.max", f"{8 * GIB}\n")
    write(job / "memory.current", f"{3 * GIB}\n")
    ram = detect_ram(root)
    assert (ram.total_bytes, ram.available_bytes) == (8 * GIB, 5 * GIB)
    write(job.parent / "memory.max", f"{16 * GIB}\n")
    write(job.parent / "memory.current", f"{14 * GIB}\n")
    ram = detect_ram(root)
    assert (ram.total_bytes, ram.available_bytes) == (8 * GIB, 2 * GIB)


GB10_ROW = "0, NVIDIA GB10, [N/A], 12.1, 580.95.05, [N/A], [Not Supported], [N/A], [N/A], 0000:01:00.0, GPU-9\n"


def test_fields_the_driver_does_not_tell() -> None:
    gpus, notes = parse_listing(GB10_ROW + "rubbish\n")
    assert gpus[0].vram_bytes == 0 and gpus[0].pcie_gen_max is None and gpus[0].pcie_max_gb_per_s is None
    assert len(notes) == 2 and "rubbish" in notes[1] and gpus[0].is_integrated


def test_a_gpu_without_memory_of_its_own_has_the_ram(tmp_path: Path) -> None:
    machine = detect_machine(sys_root=linux_root(tmp_path), runner=smi(GB10_ROW), system="Linux")
    assert machine.gpus[0].is_integrated and machine.gpus[0].vram_bytes == machine.ram_total_bytes


def test_display_adapters_of_other_makers_are_named(tmp_path: Path) -> None:
    for name, kind, vendor in (
        ("0000:00:02.0", "0x030000", "0x8086"),
        ("0000:03:00.0", "0x030200", "0x1002"),
        ("0000:01:00.0", "0x030000", "0x10de"),
        ("0000:00:1f.0", "0x060100", "0x8086"),
    ):
        write(tmp_path / f"sys/bus/pci/devices/{name}/class", f"{kind}\n")
        write(tmp_path / f"sys/bus/pci/devices/{name}/vendor", f"{vendor}\n")
    found = detect_gpus(no_tools, tmp_path).other_gpus
    assert found == ("Intel at 0000:00:02.0, integrated", "AMD at 0000:03:00.0")


def test_old_driver_without_compute_cap() -> None:
    def run(command):
        if "compute_cap" in command[1] if len(command) > 1 else False:
            return 2, 'Field "compute_cap" is not a valid field to query.'
        if len(command) > 1:
            assert command[1] == f"--query-gpu={','.join(OLD_QUERY_FIELDS)}"
            return 0, "0, Tesla K80, 11441, 470.82.01, 3, 3, 16, 16, 0000:01:00.0, GPU-1\n"
        return 1, ""

    report = detect_gpus(run)
    assert report.gpus[0].compute_capability is None and report.cuda_driver_version == "11.4"


def test_failing_tool_ends_in_a_note(tmp_path: Path) -> None:
    report = detect_gpus(smi("NVIDIA-SMI has failed because it couldn't communicate with the driver.\n", code=9))
    assert report.gpus == () and "has failed" in report.notes[0]
    assert detect_gpus(smi("No devices were found\n", code=6)).notes == ("nvidia-smi found no GPU",)
    assert "exit code 9" in detect_gpus(smi("", code=9)).notes[0]


def test_driver_without_its_tool(tmp_path: Path) -> None:
    write(tmp_path / "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module  570.86.15  Release\n")
    report = detect_gpus(no_tools, tmp_path)
    assert report.driver_version == "570.86.15" and report.cuda_driver_version == "12.8"
    assert "nvidia-smi is not there" in report.notes[0]


def test_run_command_that_hangs() -> None:
    code, text = run_command(["sleep", "5"], timeout_s=0.05)
    assert code == 124 and "did not answer" in text
    assert run_command(["sh", "-c", "echo out; echo err >&2; exit 3"]) == (3, "out\nerr\n")


def test_json_round_trip_and_profiles(tmp_path: Path) -> None:
    machine = detect_machine(sys_root=linux_root(tmp_path), runner=smi(), system="Linux")
    assert Machine.from_json(machine.to_json()) == machine
    saved = machine.save(tmp_path / "deep" / "machine.json")
    assert Machine.load(saved) == machine
    laptop = Machine.load("rtx4070-laptop")
    assert laptop.gpus[0].vram_bytes == 8188 * MIB and laptop.drives[0].is_nvme
    assert laptop.links is not None and laptop.links.source == "nominal"
    refused(ValueError, r"no machine profile 'nope'", lambda: Machine.load("nope"))


@pytest.mark.parametrize(("change", "message"), [
    (lambda r: r.pop("cpu_name"), "lacks field.*cpu_name"), (lambda r: r.update(colour="red"), "unknown field.*colour"),
    (lambda r: r.update(cpu_cores="ten"), "machine.cpu_cores must be int"),
    (lambda r: r.update(cpu_cores=True), "machine.cpu_cores must be int"),
    (lambda r: r.update(gpus={}), "machine.gpus must be a list"),
    (lambda r: r["gpus"][0].update(compute_capability=[8]), r"gpus\[0\].compute_capability must have 2"),
    (lambda r: r["gpus"].__setitem__(0, 5), r"gpus\[0\] must be an object"),
    (lambda r: r.update(format_version=99), "format_version 99"),
])  # fmt: skip
def test_damaged_profiles_are_refused(tmp_path: Path, change, message: str) -> None:
    record = json.loads(detect_machine(sys_root=linux_root(tmp_path), runner=smi(), system="Linux").to_json())
    change(record)
    write(tmp_path / "m.json", json.dumps(record))
    refused(ValueError, message, lambda: Machine.load(tmp_path / "m.json"))


def test_profile_that_is_no_json() -> None:
    refused(ValueError, "not JSON", lambda: Machine.from_json("{"))
    refused(ValueError, "JSON object", lambda: Machine.from_json("[]"))


def test_integers_serve_as_rates(tmp_path: Path) -> None:
    record = json.loads(Machine.load("rtx4070-laptop").to_json())
    record["links"]["ram_gb_per_s"] = 65
    links = Machine.from_dict(record).links
    assert links is not None and links.ram_gb_per_s == 65.0


@pytest.mark.gpu
def test_a_real_gpu_is_detected() -> None:
    import torch

    machine = detect_machine()
    assert len(machine.gpus) >= 1
    assert machine.gpus[0].compute_capability == torch.cuda.get_device_capability(0)
    assert (machine.cuda_driver_major or 0) >= 12

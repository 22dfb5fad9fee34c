"""Description of this computer: operating system, CPU, RAM, GPUs, CUDA driver, drives. Standard library only.

`detect_machine()` reads /proc and /sys and asks nvidia-smi (about 0.1 s without a GPU, under 1 s with one);
`cards.load_machine("rtx4070-laptop")` gives a machine that is not here. What cannot be read is None
and named in `Machine.notes`; nothing is guessed."""

from __future__ import annotations

import dataclasses
import platform
import sys
from pathlib import Path

from outcore.machine.drives import Usage, drive_of, local_drives
from outcore.machine.gpus import Runner, detect_gpus, run_command
from outcore.machine.host import (
    available_ram_bytes,
    detect_cpu,
    detect_os,
    detect_ram,
    memlock_limit_bytes,
    usable_cores,
)
from outcore.machine.mounts import remove_stale_locks
from outcore.machine.records import DRIVE_KINDS, Drive, Gpu, LinkRates, Machine, pcie_gb_per_s


def detect_machine(
    *, sys_root: str | Path = "/", runner: Runner = run_command, system: str | None = None, usage: Usage | None = None
) -> Machine:
    """Describe this computer as it is now. The parameters are for tests: another root, command runner, OS and disk
    usage."""
    root = Path(sys_root)
    os_info = detect_os(root, system)
    cpu, ram = detect_cpu(root), detect_ram(root)
    report = detect_gpus(runner, root)
    return Machine(
        os_family=os_info.family,
        os_name=os_info.name,
        kernel=os_info.kernel,
        architecture=platform.machine(),
        is_wsl2=os_info.is_wsl2,
        python_version=".".join(str(part) for part in sys.version_info[:3]),
        cpu_name=cpu.name,
        cpu_cores=cpu.cores,
        cpu_threads=cpu.threads,
        cpu_simd=cpu.simd,
        numa_nodes=cpu.numa_nodes,
        ram_total_bytes=ram.total_bytes,
        ram_available_bytes=ram.available_bytes,
        swap_total_bytes=ram.swap_total_bytes,
        memlock_limit_bytes=memlock_limit_bytes(),
        gpus=tuple(
            dataclasses.replace(gpu, vram_bytes=ram.total_bytes) if gpu.is_integrated else gpu for gpu in report.gpus
        ),  # it computes on the RAM
        nvlink_domains=report.nvlink_domains,
        other_gpus=report.other_gpus,
        driver_version=report.driver_version,
        cuda_driver_version=report.cuda_driver_version,
        drives=local_drives(sys_root=root, usage=usage),
        notes=os_info.notes + ram.notes + report.notes,
    )

"""`outcore machine`: what this computer is and how its GPUs reach each other."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from outcore.common.output import tell_error
from outcore.common.quantities import format_gib
from outcore.machine import Machine, detect_machine
from outcore.machine.topology import detect_topology, lay_out, read_cluster


def main(argv: list[str] | None = None) -> int:
    """The subcommand; returns its exit code: 2 where the groups asked for cannot be."""
    parser = argparse.ArgumentParser(prog="outcore machine", description="This computer, its GPUs and what joins them.")
    parser.add_argument(
        "--cluster", type=Path, help="a file of hosts and islands (YAML or JSON) instead of this machine"
    )
    parser.add_argument("--tensor_parallel", type=int, default=0, help="GPUs that share each layer, inside an island")
    parser.add_argument("--pipeline_parallel", type=int, default=0, help="stages of layers, across islands")
    parser.add_argument("--json", action="store_true", help="as JSON")
    args = parser.parse_args(argv)
    try:
        machine = None if args.cluster else detect_machine()
        topology = read_cluster(args.cluster) if machine is None else detect_topology(machine.gpus)
        layout = None
        if args.tensor_parallel or args.pipeline_parallel:
            layout = lay_out(topology, args.tensor_parallel or 1, args.pipeline_parallel or 1)
    except (ValueError, OSError) as error:
        return tell_error("machine", error)
    if args.json:
        record = {"topology": topology.to_dict(), "machine": None if machine is None else machine.to_dict()}
        stages = [] if layout is None else [[[gpu.host, gpu.index] for gpu in stage] for stage in layout.stages]
        print(json.dumps(record | {"stages": stages}, indent=2))
        return 0
    for line in [*([] if machine is None else machine_lines(machine)), *topology.lines()]:
        print(line)
    for number, stage in enumerate(() if layout is None else layout.stages):
        print(f"stage {number}: {stage[0].host}, GPU {', '.join(str(gpu.index) for gpu in stage)}")
    return 0


def machine_lines(machine: Machine) -> list[str]:
    """Tell a machine to people, in a few lines."""
    cores = f"{machine.cpu_cores} cores, {machine.cpu_threads} threads, {machine.numa_nodes} NUMA node(s)"
    ram = f"{format_gib(machine.ram_total_bytes)}, {format_gib(machine.ram_available_bytes)} of it available"
    found = [f"{machine.os_name}, {machine.kernel}", f"CPU: {machine.cpu_name}, {cores}", f"RAM: {ram}"]
    for gpu in machine.gpus:
        width = f"PCIe {gpu.pcie_gen_max or '?'} x{gpu.pcie_width_max or '?'}"
        found.append(f"GPU {gpu.index}: {gpu.name}, {format_gib(gpu.vram_bytes)}, {width}")
    found += [f"drive {drive.mount_point}: {drive.kind}, {drive.model or 'no model name'}" for drive in machine.drives]
    return found + [f"note: {note}" for note in machine.notes]

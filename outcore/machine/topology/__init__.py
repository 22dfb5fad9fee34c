"""Search for GPUs that reach each other fast (NVLink islands, PCIe switches, NUMA nodes, hosts), and groups laid on
them."""

from outcore.machine.topology.stages import (
    ParallelLayout,
    PlacedGpu,
    Topology,
    balanced_stages,
    detect_topology,
    lay_out,
    read_cluster,
)

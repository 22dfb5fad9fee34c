"""Which GPUs reach each other fast (NVLink islands, PCIe switches, NUMA nodes, hosts), and groups laid on them."""

from outcore.machine.topology.islands import PlacedGpu, Topology, detect_topology, read_cluster
from outcore.machine.topology.stages import ParallelLayout, balanced_stages, lay_out

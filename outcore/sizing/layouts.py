"""Decisions of an engine on which bytes and seconds of a run depend: the engine makes them, the planner counts with
them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from outcore.sizing.states import COMPRESSED_MOMENTS, COMPRESSION_ROOM, STATE_FORMATS
from outcore.sizing.streaming import LANE_BYTES, STAGING_BYTES, STATE_RING_BYTES, STATE_RING_SLOTS
from outcore.sizing.swapping import MAX_IN_CPU_BYTES, Device
from outcore.sizing.tiles import LAYER_BUFFERS


@dataclass(frozen=True)
class Residency:
    """RAM budgets that an engine was told, as in its settings; None: all of it in RAM."""

    state_ram_bytes: int | None = None
    weight_ram_bytes: int | None = None
    gradient_bytes: int | None = None
    """RAM for gradients on their way, with immediate updates. None: all of them."""
    state_ring_bytes: int = STATE_RING_BYTES
    state_ring_slots: int = STATE_RING_SLOTS
    compressed: bool = True
    """fp32 moments on the drive."""


class StoredStates(NamedTuple):
    """Bytes per parameter on the drive: each moved once each way in an update, and room beside the moments."""

    master: float
    moments: float
    room: float = 0.0

    @property
    def moved(self) -> float:
        return self.master + self.moments


@dataclass(frozen=True)
class StreamLayout:
    """Layout of a run by the streaming engine; the planner's own search varies it."""

    micro_batch: int
    accumulation: int
    checkpoints_home: str = "vram"
    """'vram' | 'ram' | 'nvme'."""
    layer_buffers: int = LAYER_BUFFERS
    compiled: bool = True
    """Layers through torch.compile."""
    cuda_graphs: bool = True
    """Layers as CUDA graphs where they are short."""
    tiling: str = "auto"
    """'auto' | 'on' | 'off' | 'tokens', as the engine's setting."""
    tile_bytes: int | None = None
    device_bytes: int | None = None
    """Memory that the engine plans tiles for. None: the card's, less framework and desktop."""
    residency: Residency | None = None
    """Homes asked for; None: the planner decides, RAM first and the drive for what does not fit."""
    packed_attention: str = "auto"
    """'auto' | 'masks', as the engine's setting."""
    staging_bytes: int | None = None
    """Pinned memory. None: as the request says, or what the machine gives (`sizing.streaming.pinned_memory`)."""
    lane_bytes: int = LANE_BYTES
    """Slots of a rank's lanes in `staging_bytes`."""
    resident_bytes: int | None = 0
    """Idle GPU memory for layers that stay there, at most. None: all of it, where that gains."""
    ahead_bytes: int | None = 0
    """RAM for states of updates ahead of the global norm, at most. None: half of what is idle."""

    def stored_states(self, state_format: str) -> StoredStates:
        """Format of these states on the drive."""
        master, moments = STATE_FORMATS[state_format]
        compressed = moments == 8 and (self.residency is None or self.residency.compressed)
        return (
            StoredStates(master, COMPRESSED_MOMENTS, COMPRESSION_ROOM) if compressed else StoredStates(master, moments)
        )


@dataclass(frozen=True)
class Staged:
    """Sizes with which states are moved in DeepSpeed's place."""

    states: str
    """Format of the states."""
    ram_budget_bytes: int | None = None
    """Budget of all ranks of the host. None: what is sent to the drive lives there whole."""
    staging_bytes: int = STAGING_BYTES
    max_in_ram_bytes: int = MAX_IN_CPU_BYTES
    gradients_on_nvme: bool = False


@dataclass(frozen=True)
class DeepSpeedLayout:
    """Layout of a run by DeepSpeed; the planner's own search varies it."""

    stage: str
    optimizer: Device
    """'none' (GPU) | 'cpu' | 'nvme'."""
    params: Device
    micro_batch: int
    accumulation: int
    staged: Staged | None = None
    """Sizes with which outcore moves what is offloaded in DeepSpeed's place; None: stock DeepSpeed, or nothing is
    offloaded."""
    packed_attention: str = "auto"
    """'auto' | 'masks': as the streaming engine's setting."""

    @property
    def homes(self) -> tuple[Device, Device]:
        return self.optimizer, self.params

"""Sizes of the streaming engine: its defaults, which the planner counts with; threads that copy between pageable RAM
and pinned slots; idle memory of the device for layers that stay there (how many, says `sizing.training`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from outcore.common.quantities import GIB, MIB

STAGING_BYTES = 8 * GIB
"""Pinned memory: the lanes' slots first, then homes of parameters and gradients as far as it reaches. The default of
outcore.staging_bytes."""
CPU_STAGING_BYTES = 256 * MIB
"""Overhead without a GPU, where nothing is pinned: the lanes' slots are all that is needed."""
SLOT_BYTES, NUM_SLOTS = 16 * MIB, 4
"""Slots of each of the two lanes: 16 MiB reach 99 % of a link's rate."""
PAGEABLE_SLOTS = 16
"""Slots of each lane where homes are pageable: with the usual four, 64 MiB, the copies of LoRA's base of 8 B came at
10 GB/s beside a run whatever the threads; with 64 slots a lane on an H100 reached 30.5 GB/s, measured by itself."""
LANE_BYTES = 2 * NUM_SLOTS * SLOT_BYTES
WEIGHT_READ_AHEAD_BYTES = 512 * MIB
"""Pinned slots through which parameters on NVMe are read ahead of their use."""
STATE_RING_BYTES, STATE_RING_SLOTS = GIB, 64
"""RAM through which states on NVMe flow, and its slots at most: a drive needs many requests under way, in both
directions, and something to read ahead while a backward pass has no gradients for it yet. The bytes hold about 20 slots
of fp32 states, 63 of `split8`."""
SMALLEST_RING_BYTES = 512 * MIB
"""A rank's share of the ring is not made smaller than this: several chunks of states must fit."""
CHUNK_NUMEL = 1 << 22
"""Parameters per chunk of states: 48 MiB of fp32 states, large enough for a drive, many to a layer."""
RANK_SLOTS_BYTES = 256 * MIB
"""Memory for a rank's gradients on their way into the sum: all of them where they take no more (LoRA)."""
SUM_GROUP_BYTES = 32 * MIB
"""Smaller gradients of several parts are added up together: a wait for the other ranks costs up to a millisecond."""
ROLLOUT_ANSWERS, ROLLOUT_TOKENS, ROLLOUT_PASS_TOKENS = 8, 256, 2048
"""Answers to a prompt (TRL's) and tokens of one, where nobody says, and tokens of a pass over them: a micro-batch's."""
READ_ROWS, READ_HEAD_TOKENS = 64, 1024
"""Rows that go through a teacher at once, and tokens whose logits exist at once."""
SAVED_FACTOR = 2
"""Inputs and outputs of the linear layers, and as much for what lies between them (measured on no machine yet)."""
STAY_LAYERS = 2
"""The last layers' activation checkpoints stay on the device: their backward comes before anything could be fetched."""
EVAL_GROUP, EVAL_TOKENS = 8, 1 << 16
"""Micro-batches of an evaluation that share one pass over the weights; tokens from which on no more join them."""
GRAPH_LONG_S = 5e-3
"""A call that keeps the device busy this long hides its launches many times over: it is not captured as a graph."""
LAUNCH_SHARE = 0.5
"""Share of a call's time on the device from which on launches count: other threads slow the host down, too. Products
in float8, with operations of our own around them, took 9 ms of a host for a backward of 2 (an H100, 1.2 B)."""
GRAPH_FREE_SHARE = 0.4
"""Share of the device's memory (under the allocator's cap) that must be free for a capture: graphs keep theirs for
good, and a step must never fail for want of it."""
PROCESS_BYTES = int(2.3 * GIB)
"""RAM of Python, torch, CUDA's libraries and the compiler. Measured, resident memory less homes and staging: 2.2-2.9 GB
in nine kinds of runs (R, S, T of `plan.constants`), each the same to 0.4 GB from sitting to sitting. Not counted: a run
with states on the drive that held 3.2-3.4 GB, because up to 2 GB of initial values were made ahead; now 1 GB are."""
CPU_PROCESS_BYTES = int(0.5 * GIB)
"""Process without a GPU's libraries. Measured on two cores: 0.83 GB resident, 0.3 of them of a tiny model."""
RAM_RESERVE_BYTES = 2 * GIB
"""Left to the page cache under data files and checkpoints being written back, where the room for a run is what the
machine has free; with it a laptop of 64 GB gives a run 56 GiB."""
AHEAD_OF_IDLE_RAM = 2
"""Divisor: updates ahead of the norm take at most one in so many bytes of RAM that a run would leave idle, unless told:
other programs, and the page cache under checkpoints and data, have the rest."""


def token_bytes(features: float, hidden_size: int, element_bytes: int) -> int:
    """Device memory that one token of a layer takes while it is differentiated, estimated from `features`: the widths
    of its matrices' inputs and outputs. A pass without gradients takes less."""
    return int(SAVED_FACTOR * element_bytes * features + 8 * 4 * hidden_size)


def layers_that_stay(layer_bytes: Sequence[int], free_bytes: int, kv_bytes: int, token_bytes: int) -> int:
    """Layers, from the first on, whose weights stay on the device while a model that is trained answers: what keys and
    values, and the tokens of a pass, leave of `free_bytes`."""
    room_bytes = free_bytes - kv_bytes - ROLLOUT_PASS_TOKENS * token_bytes
    return sum(end_bytes <= room_bytes for end_bytes in accumulate(layer_bytes))


def is_worth_a_graph(device_s: float, launch_s: float) -> bool:
    """Whether a call that takes the device and the host so long is captured."""
    return device_s <= GRAPH_LONG_S or launch_s >= LAUNCH_SHARE * device_s


def rank_slots_bytes(sizes: Sequence[int]) -> int:
    """A rank's slots for gradients of these sizes: all, or room for the two largest, so that one arrives while the
    other is added up."""
    return max(sum(sorted(sizes)[-2:]), min(sum(sizes), RANK_SLOTS_BYTES))


def ring_of_states_bytes(
    slot_bytes: int, num_chunks: int, most_bytes: int = STATE_RING_BYTES, most_slots: int = STATE_RING_SLOTS
) -> int:
    """RAM that the ring of states on NVMe takes for so many chunks: whole slots, at least one."""
    return slot_bytes * max(1, min(most_slots, num_chunks, most_bytes // slot_bytes))


def ring_share_bytes(ring_bytes: int, ranks: int) -> int:
    """A rank's share of the ring that `ranks` of one host have."""
    return max(ring_bytes // ranks, min(ring_bytes, SMALLEST_RING_BYTES))


class PinnedMemory(NamedTuple):
    """Bytes that the ranks of a host may pin together, lanes and homes."""

    pool_bytes: int
    lane_bytes: int
    """Slots of one rank's two lanes."""


def pinned_memory(
    crossing_bytes: int,
    asked_bytes: int,
    *,
    may_pin_bytes: int = 0,
    ranks: int = 1,
    slots: int = NUM_SLOTS,
    slot_bytes: int = SLOT_BYTES,
    most_slots: int = PAGEABLE_SLOTS,
) -> PinnedMemory:
    """Pinned memory for lanes and for homes that cross to the device (`crossing_bytes`): as asked, more where they need
    it and `may_pin_bytes` allows it. Where homes stay pageable, lanes get more slots, up to `most_slots`: a pageable
    home's bytes wait in them for copying threads and for the interpreter, and few slots idle the link."""
    wanted_bytes = crossing_bytes + ranks * 2 * slots * slot_bytes
    pool_bytes = max(asked_bytes, min(wanted_bytes, may_pin_bytes))
    if wanted_bytes > pool_bytes:
        slots = max(slots, min(most_slots, pool_bytes // ranks // (4 * slot_bytes)))
    lane_bytes = 2 * slots * slot_bytes
    return PinnedMemory(max(pool_bytes, ranks * lane_bytes), lane_bytes)


def lent_bytes(ends_bytes: Sequence[int], home_bytes: int) -> int:
    """Bytes of a layer's checkpoints that lie in its gradient's home: of as many micro-batches as fit, which end at
    `ends_bytes`."""
    return max((end for end in ends_bytes if end <= home_bytes), default=0)


def waits_from(
    home_bytes: int, trained_bytes: int, in_ram_bytes: float, lent_bytes: int, *, ranks: int, in_tiles: bool
) -> float:
    """First byte of a layer's parameters that waits, from an update on, where its gradient was, so that the drive is
    not asked for it: behind those in RAM and what checkpoints are lent. `home_bytes` where none waits: not in layers
    that are frozen in part or computed in tiles, nor where ranks add gradients up. Each gradient needs a home of its
    own."""
    if ranks > 1 or in_tiles or trained_bytes < home_bytes:
        return home_bytes
    return min(home_bytes, max(in_ram_bytes, lent_bytes))


COPY_THREAD_GB_PER_S = 2.5
"""Rate of one thread's memcpy into a pinned slot: four threads gave about 10 GB/s beside a running pass on servers
with one H100 and one H200 (half of LoRA's base of 8 B pageable: 16 GB in 1.6 of 1.9 to 2.3 s, November 2026)."""
NOT_SLOWER_SHARE = 0.97
"""Share of default memory's rate from which write-combined memory counts as not slower: two measurements of one kind
differ by as much."""
DRAM_PASSES = 3
"""A copied byte is read, written, and read again by the device."""


MOST_COPY_THREADS = 3 * PAGEABLE_SLOTS // 4
"""A quarter of the slots is on its way while the others are filled: with 16 slots 12 threads reached 35.4 GB/s, 16
threads 27.2 (one H100, 32 cores, a third of DRAM 35.8)."""


def copy_threads(cores: int) -> int:
    """Threads of one lane: half of the usable cores, at least 4 where there are so many; the rest update and launch."""
    return max(1, min(max(4, cores // 2), cores, MOST_COPY_THREADS))


def copies_gb_per_s(cores: int, ram_gb_per_s: float) -> float:
    """Rate at which a lane reads pageable RAM: its threads' rate, or a third of DRAM's."""
    return min(copy_threads(cores) * COPY_THREAD_GB_PER_S, ram_gb_per_s / DRAM_PASSES)


RESIDENT_BYTES: int | None = None
"""Memory for layers that stay, at most, where nobody says; None: all that is idle, where steps wait for updates or
uploads. Measured (H100, cap 6.5 GiB, 1.2 B, 16,384 tokens, clipping, fp32 states, four runs): 0.50-0.54 s a step
without, 0.45-0.49 with all that is idle."""
LEAST_GAIN = 0.03
"""Share of a step that layers which stay, or updates ahead of the norm, must spare by the forecast: less is not worth
the memory."""
MOVING_PERCENT = 110
"""Memory that comes and goes within a step counts so much: the allocator does not fit all of it without gaps."""
SPARE_BYTES = 128 * MIB
"""Left alone beside it. Measured (H100, cap 6.5 GiB, 1.2 B, 16,384 tokens, split states, 4 GiB for updates ahead of the
norm): with 256 MiB one layer fewer stays, and a step takes 9 ms more."""
OTHERS_BYTES = 512 * MIB
"""Memory that the driver has free and other programs are left: a desktop takes more at times."""


@dataclass(frozen=True)
class DeviceUse:
    """Memory of the device as its allocator counts it, in bytes."""

    limit: int
    """Bytes that this process may take at most."""
    reserved: int
    """Held between steps, the allocator's gaps with it."""
    moving: int
    """Comes and goes within a step or an evaluation."""

    @property
    def idle(self) -> int:
        """Bytes that no step needs; below 0 where memory is short."""
        return self.limit - SPARE_BYTES - self.reserved - self.moving * MOVING_PERCENT // 100


def gain_of_staying(share: float, waits_s: float, bound_s: float, step_s: float) -> float:
    """Share of a step of `step_s` seconds that it spares to have `share` of the trained parameters stay: their part of
    the passes that wait for updates and uploads (`bound_s`), but no more than is waited (`waits_s`)."""
    return min(waits_s, share * bound_s) / step_s

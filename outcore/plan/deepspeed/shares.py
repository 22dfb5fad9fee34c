"""A rank's shares of the parameters in the staged DeepSpeed engine: which live on the drive, what the ring keeps.

Each parameter is divided among the ranks, and a share moves and is updated in chunks of its own. All rules are the
engine's (`outcore.sizing.staged`, `outcore.sizing.ring`), but for DeepSpeed's own cut into
sub-groups. Shares are rank 0's, the largest. Cost: milliseconds for 70 B parameters; layouts that ask alike share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, compress
from typing import NamedTuple

from outcore.common.quantities import round_up
from outcore.sizing.ring import BLOCK_BYTES, kept_counts, kept_slots, needed_in_slot, slot_count, worth_keeping
from outcore.sizing.shape import Blocks, ModelShape
from outcore.sizing.staged import MIN_BYTES, RING_SLOTS, frozen_in_ram, leading_in_ram
from outcore.sizing.streaming import CHUNK_NUMEL
from outcore.sizing.swapping import SUB_GROUP_NUMEL, partition_numel


@dataclass(frozen=True)
class ParamHomes:
    """Elements of a rank's shares that live on the drive."""

    num_leading: int = 0
    """Trainable shares, the first ones, that live in RAM whatever their size."""
    trained: int = 0
    frozen: int = 0


@dataclass(frozen=True)
class Ring:
    """Ring of a rank."""

    n_bytes: int = 0
    moved_bytes: int = 0
    """States that an update reads and writes."""
    params_read: int = 0
    """Elements on the drive that it has to read too, where the format is split: all but those that the ring holds."""


@dataclass(frozen=True)
class RingTerms:
    """What a chunk takes, and the memory for all."""

    state_bytes: float
    """Per parameter."""
    element_bytes: int
    gradients_on_drive: bool
    ring_bytes: int
    drive_share: float
    """Share of the states, how many live on the drive: of every stretch of the model alike."""


class _Run(NamedTuple):
    """Equal chunks of one share."""

    numel: int
    num_chunks: int
    flowing: float
    """Number of them that flow."""
    needed_bytes: int
    states_bytes: int
    has_param: bool
    """It is on the drive."""


@lru_cache(maxsize=64)
def trained_shares(shape: ModelShape, gpus: int) -> tuple[int, ...]:
    """Elements of each trainable parameter's share, in order of update."""
    if not shape.lora_r:
        return _shares(shape.tensors, gpus)
    of_rank = tuple((times, tuple(shape.lora_r * dim for dim in dims)) for times, dims in shape.adapters)
    return _shares((*of_rank, *shape.lengths, *shape.whole), gpus)


@lru_cache(maxsize=64)
def _shares(blocks: Blocks, gpus: int) -> tuple[int, ...]:
    return tuple(partition_numel(numel, gpus) for times, block in blocks for numel in block * times)


def on_drive(numels: tuple[int, ...], element_bytes: int) -> int:
    """Elements of those that are worth a place on the drive."""
    return sum(numel for numel in numels if numel * element_bytes >= MIN_BYTES)


@lru_cache(maxsize=512)
def param_homes(shape: ModelShape, gpus: int, element_bytes: int, ram_bytes: int) -> ParamHomes:
    """Homes of parameters that may go to the drive, with `ram_bytes` for all."""
    shares = trained_shares(shape, gpus)
    ends = _sub_group_ends(shares)
    numels = list(accumulate(shares, initial=0))
    sizes_bytes = [element_bytes * (numels[end] - numels[start]) for start, end in zip((0, *ends), ends, strict=False)]
    num_leading = (0, *ends)[leading_in_ram(sizes_bytes, ram_bytes)]
    trained = on_drive(shares[num_leading:], element_bytes)
    if not shape.lora_r:
        return ParamHomes(num_leading, trained)
    base = _shares(shape.tensors, gpus)
    large_bytes = [element_bytes * numel for numel in base if numel * element_bytes >= MIN_BYTES]
    left_bytes = ram_bytes - element_bytes * (sum(shares) - trained + sum(base)) + sum(large_bytes)
    in_ram_bytes = sum(compress(large_bytes, frozen_in_ram(large_bytes, left_bytes)))
    return ParamHomes(num_leading, trained, (sum(large_bytes) - in_ram_bytes) // element_bytes)


@lru_cache(maxsize=64)
def _sub_group_ends(shares: tuple[int, ...]) -> tuple[int, ...]:
    """Behind which share each sub-group ends, as DeepSpeed's `_create_fp16_sub_groups` cuts them."""
    ends, numel = [], 0
    for place, share in enumerate(shares):
        numel += share
        if numel >= SUB_GROUP_NUMEL or place == len(shares) - 1:
            ends.append(place + 1)
            numel = 0
    return tuple(ends)


@lru_cache(maxsize=512)
def ring_of(shape: ModelShape, gpus: int, homes: ParamHomes | None, terms: RingTerms) -> Ring:
    """What flows through the ring of states, and what it keeps: the mean of a pass and the one back.

    `homes`: of parameters that may go to the drive. With some of the states in RAM, as many chunks of each kind are."""
    runs = _runs(shape, gpus, homes, terms)
    if not runs:
        return Ring()
    slot_bytes = max(run.needed_bytes for run in runs)
    num_chunks = round(sum(run.flowing for run in runs))
    flow_bytes = round(sum(run.flowing * run.needed_bytes for run in runs))
    slots = slot_count(num_chunks, flow_bytes, slot_bytes, terms.ring_bytes, RING_SLOTS)
    moved = terms.drive_share * sum(run.num_chunks * run.states_bytes for run in runs)
    read: float = sum(run.num_chunks * run.numel for run in runs if run.has_param)
    if terms.drive_share:
        num_kept = round(kept_slots(slots) / terms.drive_share)  # so many of all, to have those of the drive
        for order in (runs, runs[::-1]):
            counts = kept_counts(
                [(worth_keeping(run.needed_bytes, slot_bytes), run.num_chunks) for run in order], num_kept
            )
            for run, count in zip(order, counts, strict=True):
                moved -= terms.drive_share * count * run.states_bytes / 2
                read -= terms.drive_share * count * run.numel * run.has_param / 2
    return Ring(slots * slot_bytes, round(moved), round(read))


def _runs(shape: ModelShape, gpus: int, homes: ParamHomes | None, terms: RingTerms) -> list[_Run]:
    """What flows, in the order of the shares."""
    e, runs = terms.element_bytes, []
    for place, share in enumerate(trained_shares(shape, gpus)):
        is_large = share * e >= MIN_BYTES
        has_param = is_large and homes is not None and place >= homes.num_leading
        has_grad = is_large and terms.gradients_on_drive
        flowing = 1.0 if has_param or has_grad else terms.drive_share
        whole, rest = divmod(share, CHUNK_NUMEL)
        for numel, count in ((CHUNK_NUMEL, whole), (rest, 1)):
            if numel and count and flowing:
                states_bytes = round_up(int(terms.state_bytes * numel), BLOCK_BYTES)
                needed_bytes = needed_in_slot(
                    states_bytes if terms.drive_share else 0, e * numel * has_param, e * numel * has_grad
                )
                runs.append(_Run(numel, count, flowing * count, needed_bytes, states_bytes, has_param))
    return runs

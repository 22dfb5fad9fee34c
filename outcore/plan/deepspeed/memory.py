"""Bytes of DeepSpeed 0.19.8 by part: of the GPU at every stage, of RAM with its own offload.

At the peak of a pass there are activations, the loss of one chunk, or the norm of a large gradient, and gradients as
autograd returns them; in the step these are gone, and the fp32 copy of the gradients takes their room.

A rank's shares of the parameters in the staged DeepSpeed engine: which live on the drive, what the ring keeps.

Each parameter is divided among the ranks, and a share moves and is updated in chunks of its own. All rules are the
engine's (`outcore.sizing.staged`, `outcore.sizing.ring`), but for DeepSpeed's own cut into
sub-groups. Shares are rank 0's, the largest. Cost: milliseconds for 70 B parameters; layouts that ask alike share it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, compress
from typing import NamedTuple

from outcore.common.quantities import round_up
from outcore.plan import constants as k
from outcore.plan.record import BORDERS, COMMUNICATOR, MASKS, OVERHEAD, SPARE, Item
from outcore.plan.terms import Case
from outcore.sizing.activations import (
    border_bytes,
    checkpoint_bytes,
    layer_activation_bytes,
    layer_backward_bytes,
    logits_bytes,
    mask_bytes,
)
from outcore.sizing.layouts import DeepSpeedLayout
from outcore.sizing.ring import BLOCK_BYTES, kept_counts, kept_slots, needed_in_slot, slot_count, worth_keeping
from outcore.sizing.shape import Blocks, ModelShape
from outcore.sizing.staged import MIN_BYTES, NORM_NUMEL, RING_SLOTS, frozen_in_ram, leading_in_ram
from outcore.sizing.streaming import CHUNK_NUMEL, RAM_RESERVE_BYTES
from outcore.sizing.swapping import (
    BUCKET_NUMEL,
    LIVE_NUMEL,
    RAM_BYTES_PER_PARAM,
    RAM_OVERHEAD_BYTES,
    SUB_GROUP_NUMEL,
    partition_numel,
)

STAGE_NUMBER = {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3, "infinity": 3}


@dataclass(frozen=True)
class _Peak:
    """A moment of a pass, and the bytes of what is alive then but not always."""

    name: str
    work: int
    gradients: int
    """Gradients as autograd returns them."""
    gathered: int
    """Parameters."""
    checkpoints: int = 0
    borders: int = 0
    """Attention over packed rows."""

    @property
    def size_bytes(self) -> int:
        return self.work + self.gradients + self.gathered + self.checkpoints + self.borders


def vram_parts(case: Case[DeepSpeedLayout]) -> list[Item]:
    """Parts in VRAM of one GPU."""
    shape, hardware, layout, gpus = case.shape, case.hardware, case.layout, case.hardware.num_gpus
    e, stage = case.element_bytes, STAGE_NUMBER[layout.stage]
    base, trained = shape.total_params, shape.trainable_params
    bucket = e * BUCKET_NUMEL if stage else 0  # of reductions; what is prefetched counts as gathered
    params = e * base // (gpus if stage == 3 else 1)
    gradients = e * trained // (gpus if stage >= 2 else 1)
    share = gpus if stage >= 1 else 1
    master, moments, fp32_gradients = 4 * trained // share, 8 * trained // share, 4 * trained // share
    if stage == 3:
        fp32_gradients = min(fp32_gradients, 4 * 2 * BUCKET_NUMEL)  # one sub-group of 100 M elements
    if layout.optimizer != "none":
        master = moments = fp32_gradients = gradients = 0
    if layout.params != "none":
        params = 0
    peaks = _peaks(case)
    peak = max(peaks, key=lambda peak: peak.size_bytes)
    masks = mask_bytes(shape, e, case.seq_length, case.micro_tokens) if case.masks else 0
    # None of these is there in the step.
    in_step = max(0, fp32_gradients - peak.work - peak.gradients - peak.checkpoints)
    parts = [
        Item("vram", "parameters", params),
        Item("vram", "gradients", gradients),
        Item("vram", "master", master),
        Item("vram", "moments", moments),
        Item("vram", "gradients before they are summed", peak.gradients),
        Item("vram", "fp32 gradients in the step beyond activations", in_step),
        Item("vram", "gathered parameters", peak.gathered),
        Item("vram", "buckets", bucket),
        Item("vram", "activation checkpoints", peak.checkpoints),
        Item("vram", peak.name, peak.work),
        Item("vram", MASKS, masks),
        Item("vram", BORDERS, peak.borders),
        Item("vram", OVERHEAD, hardware.gpu_context_bytes),
        Item("vram", COMMUNICATOR, k.NCCL_BYTES),
        Item("vram", "desktop reserve", k.VRAM_RESERVE_BYTES),
    ]
    # What gathered parameters leave behind is kept while there is room: the allocator gives it back before it fails.
    room = hardware.vram_bytes - sum(part.size_bytes for part in parts)
    left_behind = int(k.ZERO3_SPARE_SHARE * max(peak.gathered for peak in peaks))
    return [*parts, Item("vram", SPARE, max(k.GPU_SPARE_BYTES, min(left_behind, room)))]


def _peaks(case: Case[DeepSpeedLayout]) -> list[_Peak]:
    """Peaks of a pass, one of which is the worst."""
    shape, layout, gpus = case.shape, case.layout, case.hardware.num_gpus
    e, tokens, stage = case.element_bytes, case.micro_tokens, STAGE_NUMBER[layout.stage]
    gathers = stage == 3 and (gpus > 1 or layout.params != "none")

    def gathered(beyond: int) -> int:
        """Fetching ahead stops at the limit on live parameters, whether they come from RAM or NVMe; what is fetched
        last may lie beyond it."""
        return e * min(shape.total_params, LIVE_NUMEL + beyond) if gathers else 0

    checkpoints = checkpoint_bytes(shape, e, tokens)
    activations = layer_backward_bytes(shape, e, case.seq_length, tokens)
    if not case.request.activation_checkpointing:
        whole = layer_activation_bytes(shape, e, case.seq_length, tokens)
        activations, checkpoints = shape.num_layers * whole, 0
    # A layer's gradients come one weight's at a time, and hooks take each; the head's is one for all chunks of the
    # loss, and where it is tied it waits for the embedding's.
    in_layer = max(shape.layer_params) if shape.is_moe else shape.largest_layer_weight_numel
    largest = max(shape.largest_weight_numel, in_layer)
    numel, of_head = shape.head_weight_numel, e * shape.head_weight_numel
    waiting = of_head if shape.tied else 0
    borders = border_bytes(shape, tokens) if shape.fused_attention and not case.masks else 0
    in_a_layer = ("activations of the largest unit", activations, e * in_layer + waiting)
    # Fetching ahead reaches an untied embedding when the layers that are left lie within the limit.
    few = min(shape.num_layers, 1 + LIVE_NUMEL // max(shape.layer_params)) / (shape.num_layers + 1)
    peaks = [
        # What lies beyond the limit here, and attention, stand for the final norm's tensors, which are not counted.
        _Peak("logits of one chunk", logits_bytes(shape, tokens), of_head, gathered(largest), checkpoints, borders),
        _Peak(*in_a_layer, gathered(in_layer), checkpoints),
        _Peak(*in_a_layer, gathered(0 if shape.tied else largest), int(few * checkpoints)),
        _Peak("activations of the largest unit", 0, 2 * waiting, e * numel if gathers else 0),
    ]
    if shape.lora_r:
        return [dataclasses.replace(peak, gradients=e * shape.whole_in_ends) for peak in peaks]
    if stage == 3 and layout.optimizer != "none":  # the norm is taken of a copy on its way to where the states live
        share = -(-numel // gpus)
        at_a_time = NORM_NUMEL if layout.staged is not None else k.DEEPSPEED_NORM_NUMEL
        norm = e * share + 8 * min(share, at_a_time)
        # Tied, when the embedding's gradient is in: only itself is gathered then. Untied, before the layers' backward.
        left = (e * numel if gathers else 0, 0) if shape.tied else (gathered(in_layer), checkpoints)
        peaks.append(_Peak("norm of the largest gradient", norm, of_head, *left))
    return peaks


def host_parts(case: Case[DeepSpeedLayout]) -> list[Item]:
    """RAM where DeepSpeed itself moves what is offloaded, if anything is."""
    shape, layout, gpus = case.shape, case.layout, case.hardware.num_gpus
    e, trained = case.element_bytes, shape.trainable_params
    reserve = Item("ram", "page cache reserve", RAM_RESERVE_BYTES)
    if layout.optimizer == "none" and layout.params == "none":
        return [reserve, Item("ram", "framework overhead", k.DEEPSPEED_OVERHEAD_BYTES * gpus)]
    # The measured line holds for parameters in RAM as well; with them on the GPU 2 B less.
    extra = int((RAM_BYTES_PER_PARAM - 16) * trained)
    return [
        reserve,
        Item("ram", "parameters", e * shape.total_params if layout.params == "cpu" else 0),
        Item("ram", "gradients", e * trained),
        Item("ram", "master", 4 * trained),
        Item("ram", "moments", 8 * trained),
        Item("ram", "DeepSpeed's further copies", extra),
        Item("ram", "framework overhead", RAM_OVERHEAD_BYTES * gpus),
    ]


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
    """Terms of the ring of states: what a chunk's bytes depend on, and memory for all chunks."""

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
    """Count what flows through the ring of states, and what it keeps: the mean of a pass and the one back.

    `homes`: of parameters that may go to the drive. Where states are partly in RAM, the same share of each
    kind of chunk is."""
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
    """List the chunks that flow, in the order of the shares."""
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

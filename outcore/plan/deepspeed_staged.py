"""Forecast of DeepSpeed's ZeRO-3 with outcore's staged offload, which is what a run with offloaded states really does.

Who keeps how much where is decided by the engine's own rule (`outcore.engine.deepspeed.staged.sizes`), asked for one
rank. Every state is read once and written once an update, but for those that the ring keeps from one update to the
next: they cost nothing, and their parameters are written only. Parameters on the drive are read in forward and backward
of each micro-batch but the first, which finds the trainable ones in the memory of gradients; the update writes them,
and reads them where the format is split. Gradients on the drive are written in the backward of each micro-batch, read
in all but the first, and read by the update; there is no memory of gradients then. Rates are the streaming engine's,
whose ring and optimizer these are. One run on a drive was compared (docs/planning.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from outcore.engine.deepspeed.settings import Device
from outcore.engine.deepspeed.staged.sizes import RING_SLOTS, StagedFacts, staged_sizes
from outcore.engine.stream.ring_sizes import kept_places, slot_count, worth_keeping
from outcore.plan import constants as k
from outcore.plan.hardware import Hardware
from outcore.plan.record import Part
from outcore.plan.request import RunRequest
from outcore.plan.shape import ModelShape
from outcore.units import round_up

NOTE = "staged offload: sizes by the engine's own rule, seconds by the streaming engine's rates; one run compared"


@dataclass(frozen=True)
class Staged:
    """How states are moved in DeepSpeed's place, as the run was or will be told."""

    states: str
    """Format of the states."""
    ram_budget_bytes: int | None = None
    """Of all ranks of the host. None: what is sent to the drive lives there whole."""
    staging_bytes: int = k.DEFAULT_STAGING_BYTES
    max_in_ram_bytes: int = k.MAX_IN_CPU_BYTES
    gradients_on_nvme: bool = False


@dataclass(frozen=True)
class StagedHomes:
    """Bytes of all ranks of the host."""

    params_in_ram: int
    params_on_drive: int
    param_store: int
    """Room on the drive that is set aside for parameters, wherever they live."""
    states_in_ram: int
    states_on_drive: int
    gradients: int
    gradients_on_drive: int
    staging: int
    gradient_staging: int
    ring: int
    kept: int
    """Of the states on the drive: what stays in the ring from an update to the next."""
    overhead: int


@dataclass(frozen=True)
class StagedUpdate:
    """One optimizer phase."""

    read_bytes: float
    written_bytes: float
    drive_s: float
    cpu_s: float


def staged_homes(
    shape: ModelShape, request: RunRequest, hardware: Hardware, optimizer: Device, params: Device, staged: Staged
) -> StagedHomes:
    """What lives where, by the engine's rule."""
    gpus = hardware.num_gpus
    e, state_bytes = request.element_bytes, sum(k.STATE_FORMATS[staged.states])
    trained, whole = -(-shape.trainable_params // gpus), -(-shape.total_params // gpus)
    largest = -(-shape.largest_weight_numel // gpus)
    chunk = min(k.CHUNK_NUMEL, largest)
    slot = int(chunk * state_bytes) + round_up(chunk * e, 4096) * ((params == "nvme") + staged.gradients_on_nvme)
    budget = staged.ram_budget_bytes
    sizes = staged_sizes(
        StagedFacts(
            trainable_bytes=e * trained,
            gradient_bytes=e * trained,
            whole_bytes=e * whole,
            largest_bytes=round_up(e * largest, 4096),
            live_bytes=e * (k.DEEPSPEED_LIVE_NUMEL + k.DEEPSPEED_BUCKET_NUMEL) // gpus,
            state_bytes=int(state_bytes * trained),
            slot_bytes=slot,
            optimizer=optimizer,
            params=params,
            allowed_bytes=staged.staging_bytes // gpus,
            ram_budget_bytes=None if budget is None else budget // gpus,
            max_in_ram_bytes=staged.max_in_ram_bytes,
            tied_bytes=sum(round_up(e * -(-numel // gpus), 4096) for numel in shape.tied_numels),
            gradients_on_nvme=staged.gradients_on_nvme,
            ram_bytes=hardware.ram_bytes // gpus,
        )
    )
    states = int(state_bytes * trained)
    states_in_ram = states if sizes.state_ram_bytes is None else min(states, sizes.state_ram_bytes)
    in_ram = sizes.param_bytes if sizes.param_ram_bytes is None else min(sizes.param_bytes, sizes.param_ram_bytes)
    gradients_on_drive = e * trained if staged.gradients_on_nvme else 0
    if in_ram >= sizes.param_bytes:  # none of them passes through the ring
        slot -= round_up(chunk * e, 4096) * (params == "nvme")
    numels = _chunk_numels(shape, gpus)
    flows_all = in_ram < sizes.param_bytes or gradients_on_drive > 0
    num_chunks = len(numels) if flows_all else -(-len(numels) * (states - states_in_ram) // states)
    flowing = slot * num_chunks * sum(numels) // (len(numels) * max(numels))
    slots = slot_count(num_chunks, flowing, slot, sizes.ring_bytes, RING_SLOTS)
    kept = int(state_bytes * _kept_numel(shape, gpus, slots))
    return StagedHomes(
        params_in_ram=gpus * in_ram,
        params_on_drive=gpus * (sizes.param_bytes - in_ram),
        param_store=gpus * sizes.store_bytes,
        states_in_ram=gpus * states_in_ram,
        states_on_drive=gpus * (states - states_in_ram),
        gradients=gpus * sizes.grad_bytes,
        gradients_on_drive=gpus * gradients_on_drive,
        staging=gpus * sizes.staging_bytes,
        gradient_staging=gpus * sizes.grad_staging_bytes,
        ring=gpus * slot * slots,
        kept=gpus * min(states - states_in_ram, kept),
        overhead=gpus * k.DEEPSPEED_STAGED_OVERHEAD_BYTES,
    )


@lru_cache(maxsize=64)
def _chunk_numels(shape: ModelShape, gpus: int) -> tuple[int, ...]:
    """Parameters of a rank's chunks in the order of the model, vectors left out: a chunk ends with its weight. Adapters
    are too small to be told apart, they count as one weight."""
    weights = [shape.trainable_params] if shape.lora_r else _weights(shape)
    numels: list[int] = []
    for weight in weights:
        whole, rest = divmod(-(-weight // gpus), k.CHUNK_NUMEL)
        numels += [k.CHUNK_NUMEL] * whole + ([rest] if rest else [])
    return tuple(numels)


def _weights(shape: ModelShape) -> list[int]:
    """Elements of each matrix: attention's by its heads, the rest of a layer in equal ones, of experts two tensors."""
    query, key = (shape.hidden_size * heads * shape.head_dim for heads in (shape.num_heads, shape.num_kv_heads))
    attention = [query, key, key, query]
    weights = [shape.embedding_params]
    parts = (2, 1) if shape.is_moe else (1, 1, 1) if shape.gated_ffn else (1, 1)
    for layer in shape.layer_params:
        rows = (layer - sum(attention)) // shape.hidden_size  # with a few of vectors, which no part is left with
        weights += attention + [rows * part // sum(parts) * shape.hidden_size for part in parts]
    return weights + ([] if shape.tied else [shape.head_weight_numel])


@lru_cache(maxsize=512)
def _kept_numel(shape: ModelShape, gpus: int, num_slots: int) -> int:
    """Parameters whose states stay in the ring: the mean of a pass and the one back. Hundreds of layouts ask alike."""
    numels = _chunk_numels(shape, gpus)
    largest = max(numels)
    worths = [worth_keeping(numel, largest) for numel in numels]
    ends = ((numels, worths), (numels[::-1], worths[::-1]))
    return sum(sizes[place] for sizes, worth in ends for place in kept_places(worth, num_slots)) // 2


def staged_host_parts(homes: StagedHomes, staged: Staged, hardware: Hardware) -> tuple[list[Part], list[Part]]:
    """RAM, and what of it is pinned: staging memory, then homes of gradients and parameters as far as it reaches."""
    master, moments = k.STATE_FORMATS[staged.states]
    ram = [
        Part("ram", "page cache reserve", k.PAGE_CACHE_RESERVE_BYTES),
        Part("ram", "master", int(homes.states_in_ram * master / (master + moments))),
        Part("ram", "moments", int(homes.states_in_ram * moments / (master + moments))),
        Part("ram", "ring of states on their way", homes.ring),
        Part("ram", "framework overhead", homes.overhead),
    ]
    pinned, left = [], hardware.pinned_bytes
    for name, size in (
        ("parameters on their way", homes.staging),
        ("gradients on their way", homes.gradient_staging),
        ("gradients", homes.gradients),
        ("parameters", homes.params_in_ram),
    ):
        taken = min(left, size)
        left -= taken
        pinned.append(Part("pinned", name, taken))
        ram.append(Part("ram", name, size - taken))
    return ram, pinned


def staged_drive_parts(homes: StagedHomes, staged: Staged) -> list[Part]:
    """What lives on the drive during the run."""
    master, moments = k.STATE_FORMATS[staged.states]
    return [
        Part("nvme", "master", int(homes.states_on_drive * master / (master + moments))),
        Part("nvme", "moments", int(homes.states_on_drive * moments / (master + moments))),
        Part("nvme", "parameters", homes.params_on_drive),
        Part("nvme", "room set aside for parameters", max(0, homes.param_store - homes.params_on_drive)),
        Part("nvme", "gradients", homes.gradients_on_drive),
    ]


def staged_update(shape: ModelShape, homes: StagedHomes, staged: Staged, hardware: Hardware) -> StagedUpdate:
    """The drive and the CPU work at the same time."""
    trained_on_drive = _trained_on_drive(shape, homes)
    written = homes.states_on_drive - homes.kept + trained_on_drive
    read = homes.states_on_drive - homes.kept + homes.gradients_on_drive
    if staged.states.startswith("split"):
        read += trained_on_drive * (1 - homes.kept / homes.states_on_drive if homes.states_on_drive else 1)
    return StagedUpdate(
        read_bytes=read,
        written_bytes=written,
        drive_s=hardware.drive_s(read, written) / k.STREAM_DRIVE_SHARE,
        cpu_s=hardware.update_s(staged.states, shape.trainable_params, read + written),
    )


def params_read(shape: ModelShape, homes: StagedHomes, passes: int) -> float:
    """Bytes of parameters that forward and backward of all micro-batches of a step read from the drive."""
    trained = _trained_on_drive(shape, homes)
    lent = trained if not homes.gradients_on_drive else 0.0
    return 2 * (passes * homes.params_on_drive - lent)


def _trained_on_drive(shape: ModelShape, homes: StagedHomes) -> float:
    return homes.params_on_drive * shape.trainable_params / shape.total_params


def gradient_traffic(homes: StagedHomes, passes: int) -> tuple[int, int]:
    """(read, written) bytes of gradients on the drive in the backward of all micro-batches of a step."""
    return (passes - 1) * homes.gradients_on_drive, passes * homes.gradients_on_drive

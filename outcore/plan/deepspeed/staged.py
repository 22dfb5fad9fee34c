"""Forecast of DeepSpeed's ZeRO-3 with outcore's staged offload, which is what a run with offloaded states really does.

Who keeps how much where is decided by the engine's own rule (`outcore.sizing.staged`), asked for one
rank. Every state is read once and written once an update, but for those that the ring keeps from one update to the
next: they cost nothing, and their parameters are written only. Parameters on the drive are read in forward and backward
of each micro-batch but the first, which finds the trainable ones in the memory of gradients; the update writes them,
and reads them where the format is split. Gradients on the drive are written in the backward of each micro-batch, read
in all but the first, and read by the update; there is no memory of gradients then. Rates are the streaming engine's,
whose ring and optimizer these are. One run on a drive was compared (docs/planning.md)."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.common.quantities import round_up
from outcore.plan import constants as k
from outcore.plan.deepspeed.memory import RingTerms, on_drive, param_homes, ring_of, trained_shares
from outcore.plan.hardware import Hardware
from outcore.plan.record import Item
from outcore.plan.terms import Case, Pass
from outcore.sizing.layouts import DeepSpeedLayout, Staged
from outcore.sizing.shape import ModelShape
from outcore.sizing.staged import StagedFacts, staged_sizes
from outcore.sizing.states import SPLIT_FORMATS, STATE_FORMATS
from outcore.sizing.streaming import CHUNK_NUMEL, RAM_RESERVE_BYTES
from outcore.sizing.swapping import BUCKET_NUMEL, LIVE_NUMEL

NOTE = "staged offload: sizes by the engine's own rule, seconds by the streaming engine's rates; one run compared"


@dataclass(frozen=True)
class StagedHomes:
    """Bytes of all ranks of the host."""

    params_in_ram: int
    params_on_drive: int
    trained_on_drive: int
    """Trained parameters among these."""
    param_room: int
    """RAM that is set aside for parameters, wherever they live."""
    param_store: int
    """Room on the drive that is set aside for parameters, wherever they live."""
    states_in_ram: int
    states_on_drive: int
    gradients: int
    gradients_on_drive: int
    staging: int
    gradient_staging: int
    ring: int
    states_moved: int
    """Part of the states on the drive, what an update reads and writes: the rest stays in the ring until the next."""
    params_completing: int
    """Part of the parameters on the drive, what it reads where the format is split."""
    overhead: int


def staged_homes(case: Case[DeepSpeedLayout], staged: Staged) -> StagedHomes:
    """Count the bytes that live in RAM and on the drive, by the engine's rule."""
    shape, request, hardware = case.shape, case.request, case.hardware
    optimizer, params = case.layout.homes
    gpus = hardware.num_gpus
    e, state_bytes = request.element_bytes, sum(STATE_FORMATS[staged.states])
    trained, whole = -(-shape.trainable_params // gpus), -(-shape.total_params // gpus)
    largest = -(-shape.largest_weight_numel // gpus)
    chunk = min(CHUNK_NUMEL, largest)
    slot = int(chunk * state_bytes) + round_up(chunk * e, 4096) * ((params == "nvme") + staged.gradients_on_nvme)
    budget = staged.ram_budget_bytes
    sizes = staged_sizes(
        StagedFacts(
            trainable_bytes=e * trained,
            gradient_bytes=e * trained,
            whole_bytes=e * whole,
            largest_bytes=round_up(e * largest, 4096),
            live_bytes=e * (LIVE_NUMEL + BUCKET_NUMEL) // gpus,
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
    room, lives = sizes.param_bytes, None
    if sizes.param_ram_bytes is not None and sizes.param_ram_bytes < sizes.param_bytes:
        room = sizes.param_ram_bytes
        lives = param_homes(shape, gpus, e, sizes.param_ram_bytes)
    trained_on_drive, frozen_on_drive = (e * lives.trained, e * lives.frozen) if lives is not None else (0, 0)
    in_ram = max(0, sizes.param_bytes - trained_on_drive - frozen_on_drive)
    gradients_on_drive = e * on_drive(trained_shares(shape, gpus), e) if staged.gradients_on_nvme else 0
    terms = RingTerms(state_bytes, e, staged.gradients_on_nvme, sizes.ring_bytes, 1 - states_in_ram / states)
    ring = ring_of(shape, gpus, lives, terms)
    return StagedHomes(
        params_in_ram=gpus * in_ram,
        params_on_drive=gpus * (trained_on_drive + frozen_on_drive),
        trained_on_drive=gpus * trained_on_drive,
        param_room=gpus * max(room, in_ram),
        param_store=gpus * sizes.store_bytes,
        states_in_ram=gpus * states_in_ram,
        states_on_drive=gpus * (states - states_in_ram),
        gradients=gpus * (e * trained - gradients_on_drive),
        gradients_on_drive=gpus * gradients_on_drive,
        staging=gpus * sizes.staging_bytes,
        gradient_staging=gpus * sizes.grad_staging_bytes,
        ring=gpus * ring.n_bytes,
        states_moved=gpus * ring.moved_bytes,
        params_completing=gpus * e * ring.params_read,
        overhead=gpus * k.DEEPSPEED_STAGED_OVERHEAD_BYTES,
    )


def staged_host_parts(homes: StagedHomes, staged: Staged, hardware: Hardware) -> tuple[list[Item], list[Item]]:
    """RAM, and what of it is pinned: staging memory, then homes of gradients and parameters as far as it reaches."""
    master, moments = STATE_FORMATS[staged.states]
    ram = [
        Item("ram", "page cache reserve", RAM_RESERVE_BYTES),
        Item("ram", "master", int(homes.states_in_ram * master / (master + moments))),
        Item("ram", "moments", int(homes.states_in_ram * moments / (master + moments))),
        Item("ram", "ring of states on their way", homes.ring),
        Item("ram", "framework overhead", homes.overhead),
    ]
    pinned, left = [], hardware.pinned_bytes
    for name, size in (
        ("parameters on their way", homes.staging),
        ("gradients on their way", homes.gradient_staging),
        ("gradients", homes.gradients),
        ("parameters", homes.param_room),
    ):
        taken = min(left, size)
        left -= taken
        pinned.append(Item("pinned", name, taken))
        ram.append(Item("ram", name, size - taken))
    return ram, pinned


def staged_drive_parts(homes: StagedHomes, staged: Staged) -> list[Item]:
    """List what lives on the drive during the run."""
    master, moments = STATE_FORMATS[staged.states]
    return [
        Item("nvme", "master", int(homes.states_on_drive * master / (master + moments))),
        Item("nvme", "moments", int(homes.states_on_drive * moments / (master + moments))),
        Item("nvme", "parameters", homes.params_on_drive),
        Item("nvme", "room set aside for parameters", max(0, homes.param_store - homes.params_on_drive)),
        Item("nvme", "gradients", homes.gradients_on_drive),
    ]


def staged_update(shape: ModelShape, homes: StagedHomes, staged: Staged) -> Pass:
    """One optimizer phase: the drive and the CPU work at the same time."""
    written = homes.states_moved + homes.trained_on_drive
    read = homes.states_moved + homes.gradients_on_drive
    if staged.states in SPLIT_FORMATS:
        read += homes.params_completing
    return Pass(
        read_bytes=read, written_bytes=written, copied_bytes=read + written, updated_params=shape.trainable_params
    )


def params_read(homes: StagedHomes, passes: int) -> int:
    """Bytes of parameters that forward and backward of all micro-batches of a step read from the drive."""
    lent = homes.trained_on_drive if not homes.gradients_on_drive else 0
    return 2 * (passes * homes.params_on_drive - lent)


def gradient_traffic(homes: StagedHomes, passes: int) -> tuple[int, int]:
    """(read, written) bytes of gradients on the drive in the backward of all micro-batches of a step."""
    return (passes - 1) * homes.gradients_on_drive, passes * homes.gradients_on_drive

"""What lives where.

RAM first, NVMe when RAM fills: the budget for parameters, gradients and optimizer states is `ram_budget_gib`, or what
is available now less a reserve. Gradients come first (they have no other home), then parameters (each of their bytes
moves three times a step), then states (twice); the rest of the last two lives on the drive, where one is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from outcore.common.quantities import GB, GIB, format_gb, format_gib
from outcore.config import ConfigError, RunSettings
from outcore.engine.stream.settings import StreamSettings
from outcore.machine.offload import SPACE_SAFETY, describe_folder, resolve_nvme_paths
from outcore.optim import state_format
from outcore.sizing.states import MOMENT_BYTES
from outcore.sizing.streaming import (
    AHEAD_OF_IDLE_RAM,
    CPU_PROCESS_BYTES,
    CPU_STAGING_BYTES,
    PAGEABLE_SLOTS,
    PROCESS_BYTES,
    STAGING_BYTES,
    PinnedMemory,
    pinned_memory,
    rank_slots_bytes,
    ring_of_states_bytes,
)

RAM_RESERVE_BYTES = 3 * GIB
"""Left alone when the budget is measured: Python, the libraries and a CUDA context take 1.5 to 2.5 GiB, and a
checkpoint being written wants page cache."""
MOST_PINNED_OF_RAM = 2
"""Divisor: of available RAM at most one in so many bytes is pinned without being asked for: the system cannot take
them back."""
NOT_USED = "NVMe OFFLOAD IS NOT USED: "
NvmeCheck = Callable[[str, float], tuple[bool, str]]


@dataclass(frozen=True)
class RunSizes:
    """What the settings depend on, in numbers."""

    total_params: int
    trainable_params: int
    num_layers: int
    hidden_size: int
    step_tokens: tuple[int, ...]
    """Tokens (rows x length) of each micro-batch of a step."""
    ram_available_bytes: int
    has_cuda: bool
    row_tokens: int | None = None
    """Tokens of a row."""
    is_wsl2: bool = False
    """Little can be pinned there."""
    write_combined: bool | None = None
    """Whether write-combined memory measured no slower here. None: not measured."""
    saved_bytes: int = 0
    """Bytes less that the parameters take at home because frozen ones are packed."""
    muon_params: int = 0
    """Parameters of matrices that Muon updates, which have a momentum alone."""
    num_ranks: int = 1
    """That share this host's RAM; `step_tokens` are of one of them."""


@dataclass(frozen=True)
class Wanted:
    """Which of the engine's data may leave RAM, before the drive was tried."""

    states: bool
    params: bool
    is_explicit: bool
    """NVMe was asked for by name, so a drive that cannot be used is worth a loud line."""
    folders: tuple[str, ...]
    """A folder on each drive, none when no drive is named. The engine makes one of its own in it, and removes what a
    killed run left there. One process spreads its data over all; of several ranks each takes one, in turn."""


def wanted_homes(settings: RunSettings) -> Wanted:
    """`cpu` (a flag) keeps it in RAM, `nvme` lets it go to the drive when RAM is full, and so does a named drive."""
    offload = settings.offload
    return Wanted(
        states=offload.optimizer == "nvme" or offload.optimizer_may_spill,
        params=offload.params == "nvme" or offload.params_may_spill,
        is_explicit="nvme" in (offload.optimizer, offload.params),
        folders=() if offload.nvme_path is None else tuple(str(f) for f in resolve_nvme_paths(offload.nvme_path)),
    )


def activation_bytes(sizes: RunSizes, element_bytes: int) -> int:
    """Activation checkpoints of a step on this host: every layer's input for every micro-batch."""
    return sizes.num_ranks * sizes.num_layers * sum(sizes.step_tokens) * sizes.hidden_size * element_bytes


def waiting_bytes(settings: RunSettings, sizes: RunSizes) -> int:
    """RAM for activation checkpoints beyond the gradients' homes, which they borrow."""
    in_ram = settings.activations == "ram" or (settings.activations == "auto" and sizes.has_cuda)
    gradients = settings.element_bytes * sizes.trainable_params
    return max(0, activation_bytes(sizes, settings.element_bytes) - gradients) if in_ram else 0


def rank_slot_bytes(settings: RunSettings, sizes: RunSizes) -> int:
    """Slots of each of several ranks, where its gradients wait until they are added up."""
    of_layer = settings.element_bytes * sizes.trainable_params // max(1, sizes.num_layers)
    return sizes.num_ranks * rank_slots_bytes([of_layer] * sizes.num_layers) if sizes.num_ranks > 1 else 0


def crossing_bytes(settings: RunSettings, sizes: RunSizes, weight_ram_bytes: int | None) -> int:
    """Homes in RAM that cross to the device; `weight_ram_bytes`: parameters in RAM, None: all."""
    element = settings.element_bytes
    weights = element * sizes.total_params - sizes.saved_bytes if weight_ram_bytes is None else weight_ram_bytes
    crossing = weights + element * sizes.trainable_params + waiting_bytes(settings, sizes)
    return crossing + int((state_format(settings.state_format).bytes_per_param - MOMENT_BYTES) * sizes.muon_params)


def pinned_of(settings: RunSettings, sizes: RunSizes, weight_ram_bytes: int | None) -> PinnedMemory:
    """What is pinned for these homes; only the default is raised, by what the machine has."""
    is_told = settings.reasons.get("lane_slots") != "default"
    pinned_memory_with = partial(
        pinned_memory,
        ranks=sizes.num_ranks,
        slots=settings.lane_slots,
        slot_bytes=settings.lane_slot_bytes,
        most_slots=settings.lane_slots if is_told else PAGEABLE_SLOTS,
    )
    if not sizes.has_cuda:
        return pinned_memory_with(0, CPU_STAGING_BYTES)
    if not settings.offload.pin_memory:
        return pinned_memory_with(0, 0)
    is_default = settings.reasons.get("staging_gib") != "--staging_gib" and settings.staging_bytes == STAGING_BYTES
    may_pin = sizes.ram_available_bytes // MOST_PINNED_OF_RAM if is_default and not sizes.is_wsl2 else 0
    crossing = crossing_bytes(settings, sizes, weight_ram_bytes) + rank_slot_bytes(settings, sizes)
    return pinned_memory_with(crossing, settings.staging_bytes, may_pin_bytes=may_pin)


@dataclass(frozen=True)
class _Needs:
    """Bytes of RAM with everything in it."""

    weights: int
    states: int
    fixed: int
    """Gradients, activation checkpoints beyond their homes, slots of ranks: what cannot leave RAM."""

    @classmethod
    def of(cls, settings: RunSettings, sizes: RunSizes) -> _Needs:
        """Count what a run needs."""
        gradients = settings.element_bytes * sizes.trainable_params
        states = int(state_format(settings.state_format).bytes_per_param * sizes.trainable_params)
        return cls(
            settings.element_bytes * sizes.total_params - sizes.saved_bytes,
            states - MOMENT_BYTES * sizes.muon_params,
            gradients + waiting_bytes(settings, sizes) + rank_slot_bytes(settings, sizes),
        )

    @property
    def total(self) -> int:
        return self.weights + self.states + self.fixed


def _given_gib(settings: RunSettings) -> float | None:
    """The budget that was asked for."""
    given = settings.offload.ram_budget_gib
    return 0.0 if given is None and settings.offload.everything else given


def _budget_and_beside(settings: RunSettings, sizes: RunSizes) -> tuple[int, int]:
    """(bytes of RAM for the run, of them for the processes beside its data)."""
    given = _given_gib(settings)
    if given is None:
        return sizes.ram_available_bytes, sizes.num_ranks * RAM_RESERVE_BYTES
    return int(given * GIB), sizes.num_ranks * (PROCESS_BYTES if sizes.has_cuda else CPU_PROCESS_BYTES)


def ahead_bytes_of(settings: RunSettings, sizes: RunSizes, warnings: list[str]) -> int:
    """RAM for updates ahead of the global norm in a run with everything in RAM: as told, else a share of what it leaves
    idle beside a GPU."""
    needs, (budget, beside) = _Needs.of(settings, sizes), _budget_and_beside(settings, sizes)
    idle, told = max(0, budget - beside - needs.total), settings.ahead_bytes
    if told is None:
        return idle // AHEAD_OF_IDLE_RAM if sizes.has_cuda else 0
    if (taken := min(told, needs.states + settings.element_bytes * sizes.trainable_params)) > idle:
        warnings.append(
            f"ahead_gib: {format_gib(taken)} may be taken, and the run leaves {format_gib(idle)} of RAM idle"
        )
    return told


def homes_of(
    settings: RunSettings,
    sizes: RunSizes,
    wanted: Wanted,
    nvme_check: NvmeCheck,
    warnings: list[str],
    notes: list[str],
) -> tuple[dict[str, Any], str]:
    """(nvme_path, state_ram_bytes and weight_ram_bytes of the settings, {} when everything lives in RAM; shortage)."""
    states, activations, given = settings.state_format, settings.activations, _given_gib(settings)
    needs = _Needs.of(settings, sizes)
    weights, state_bytes, needed = needs.weights, needs.states, needs.total
    budget, beside = _budget_and_beside(settings, sizes)

    def lane_bytes(weight_ram: int) -> int:
        if given is None:  # they are of the reserve
            return 0
        return sizes.num_ranks * pinned_of(settings, sizes, weight_ram).lane_bytes

    words = (
        f"a budget of {format_gib(budget)}"
        if given is not None
        else f"{format_gib(sizes.ram_available_bytes)} available, {format_gib(beside)} of it left alone"
    )
    room, flowing = budget - beside - needs.fixed, lane_bytes(0)
    weight_ram, state_ram = weights, state_bytes
    for _ in range(3):  # lanes and what flows from the drive take room, so more may have to
        left = max(0, room - flowing)
        weight_ram = min(weights, left) if wanted.params else weights
        state_ram = min(state_bytes, max(0, left - weight_ram)) if wanted.states else state_bytes
        ring = _flowing_bytes(settings, state_bytes - state_ram, weights - weight_ram)
        flowing = max(flowing, ring + lane_bytes(weight_ram))
    form, chunk_numel = state_format(states), StreamSettings.chunk_numel
    spilled = (state_bytes - state_ram) / form.bytes_per_param  # parameters
    on_drive = weights - weight_ram + int(spilled * form.on_drive.stored_bytes(chunk_numel) / chunk_numel)
    drive_needed = on_drive + (activation_bytes(sizes, settings.element_bytes) if activations == "nvme" else 0)
    folders = ()
    if wanted.is_explicit or drive_needed:
        used = len(wanted.folders) or 1
        share = 1 / used if sizes.num_ranks == 1 else -(-sizes.num_ranks // used) / sizes.num_ranks
        folders = _drives(wanted, settings.offload.strict, int(share * drive_needed), nvme_check, warnings, notes)
    if not folders:
        if activations == "nvme":
            raise ConfigError("activations nvme: the drive cannot be used (see above). Use --activations ram.")
        shortage = _check_ram(needed, settings, sizes, given, words, wanted, warnings, beside + lane_bytes(weights))
        notes.append(f"RAM: {format_gib(needed)} of parameters, gradients and states, all of it in RAM ({words})")
        return {}, shortage
    notes.append(
        f"RAM: {format_gib(needed - on_drive)} of parameters, gradients and states in RAM ({words}), "
        f"{format_gb(on_drive)} on NVMe"
        + ("; --ram_budget_gib 0 puts all that can be there on the drive" if not on_drive else "")
    )
    taken = needed - (weights - weight_ram) - (state_bytes - state_ram) + beside + flowing
    if given and taken > budget:
        warnings.append(
            f"RAM: the process takes {format_gib(taken)}, more than {words}: {format_gib(needs.fixed)} of "
            f"gradients and what waits there, {format_gib(beside + flowing)} of Python, libraries and what flows from "
            "the drive cannot leave RAM. Raise --ram_budget_gib, or train adapters (--lora_r 16)."
        )
    homes: dict[str, Any] = {"nvme_path": folders[0] if len(folders) == 1 else folders}
    if state_ram < state_bytes:
        homes["state_ram_bytes"] = state_ram
    if weight_ram < weights:
        homes["weight_ram_bytes"] = weight_ram
    return (homes if len(homes) > 1 or activations == "nvme" else {}), ""


def _flowing_bytes(settings: RunSettings, states_bytes: int, weights_bytes: int) -> int:
    """RAM through which so many bytes of states and weights on the drive flow: the ring, and weights read ahead."""
    form, told = state_format(settings.state_format), StreamSettings
    ring = 0
    if states_bytes > 0:
        chunks = -(-int(states_bytes / form.bytes_per_param) // told.chunk_numel)
        slot_bytes = form.on_drive.chunk_bytes(told.chunk_numel)
        slot_bytes += told.chunk_numel * settings.element_bytes if weights_bytes > 0 else 0
        ring = ring_of_states_bytes(slot_bytes, chunks)
    return ring + (told.weight_read_ahead_bytes if weights_bytes > 0 else 0)


def _drives(
    wanted: Wanted,
    strict: bool,
    drive_needed: int,
    nvme_check: NvmeCheck,
    warnings: list[str],
    notes: list[str],
) -> tuple[str, ...]:
    """The folders to use, after they were tried; none when RAM has to do, said loudly (an error under strict_offload).
    `drive_needed`: bytes on each."""
    if not wanted.folders and not wanted.is_explicit:
        return ()
    usable = bool(wanted.folders)
    message = "No NVMe path is given (--nvme_offload_path, or outcore.nvme_path in deepspeed_config.json)."
    said: list[str] = []
    required_gb = SPACE_SAFETY * drive_needed / GB
    for folder in wanted.folders:
        usable, message = nvme_check(folder, required_gb)
        if not usable:
            break
        needs = f"This run needs {format_gb(required_gb * GB)} there, a margin of half included."
        said.append(" ".join(part for part in (describe_folder(folder), needs, message) if part))
    if usable:
        for line in said:
            (warnings if "Warning:" in line else notes).append(f"NVMe: {line}")
        return wanted.folders
    if strict:
        raise ConfigError(f"strict_offload: offloading to NVMe is not possible. {message}")
    warnings.append(f"{NOT_USED}{message} Falling back to RAM for everything; --strict_offload makes this an error.")
    return ()


def _check_ram(
    needed: int,
    settings: RunSettings,
    sizes: RunSizes,
    given: float | None,
    words: str,
    wanted: Wanted,
    warnings: list[str],
    beside: int,
) -> str:
    """What does not fit the machine at all, in words; a warning for what leaves too little."""
    compact = "split8" if settings.precision == "bf16" else "fp32_m8"
    smaller = f"8-bit moments (--state_format {compact}; other numerics), " * (
        not state_format(settings.state_format).moments8
    )
    way = f"Give a drive (--nvme_offload_path DIR), {smaller}or train adapters (--lora_r 16)."
    if wanted.folders and not (wanted.states and wanted.params):
        way = "Let states and parameters go to the drive: --zero_stage infinity, or leave offload_* and residency out."
    refused = next((warning for warning in warnings if warning.startswith(NOT_USED)), None)
    if wanted.folders and refused is not None:
        why = refused.removeprefix(NOT_USED).partition(" Falling back")[0]
        way = f"The drive was not taken: {why} Without it: {smaller}adapters (--lora_r 16)."
    if needed > sizes.ram_available_bytes:
        return (
            f"this run needs {format_gib(needed)} of RAM for parameters, gradients, optimizer states and what waits "
            f"there; {format_gib(sizes.ram_available_bytes)} are available. {way}"
        )
    if given is not None and needed + beside > given * GIB:
        warnings.append(
            f"RAM: {format_gib(needed + beside)} are needed, more than {words}, and no drive takes the rest. {way}"
        )
    elif needed > sizes.ram_available_bytes - RAM_RESERVE_BYTES and needed > RAM_RESERVE_BYTES:
        warnings.append(f"RAM: {format_gib(needed)} are needed, {words}: it may get tight. {way}")
    return ""

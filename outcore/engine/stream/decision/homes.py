"""What lives where: the room for a run, the drive that takes what RAM does not hold, and what is said of it.

`sizing.training` decides. The budget for parameters, gradients and optimizer states is `ram_budget_gib`, or what is
available now less a reserve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from outcore.common.quantities import GB, GIB, format_gb, format_gib
from outcore.config import ConfigError, RunSettings
from outcore.machine.offload import SPACE_SAFETY, describe_folder, resolve_nvme_paths
from outcore.optim import state_format
from outcore.sizing.streaming import (
    AHEAD_OF_IDLE_RAM,
    CPU_PROCESS_BYTES,
    CPU_STAGING_BYTES,
    PAGEABLE_SLOTS,
    PROCESS_BYTES,
    STAGING_BYTES,
)
from outcore.sizing.training import Pins, TrainingLimits, TrainingNeeds, TrainingPlacement, place_training

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

    needs: TrainingNeeds
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

    @property
    def num_ranks(self) -> int:
        """Processes that share this host's RAM; `step_tokens` are of one of them."""
        return self.needs.ranks


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


def placement_of(settings: RunSettings, sizes: RunSizes, wanted: Wanted) -> TrainingPlacement:
    """The placement, if the drive can be used."""
    is_default = settings.reasons.get("staging_gib") != "--staging_gib" and settings.staging_bytes == STAGING_BYTES
    pins_more = sizes.has_cuda and settings.offload.pin_memory
    is_told = settings.reasons.get("lane_slots") != "default"
    asked_bytes = settings.staging_bytes if pins_more else 0 if sizes.has_cuda else CPU_STAGING_BYTES
    may_pin = pins_more and is_default and not sizes.is_wsl2  # only the default is raised, by what the machine has
    budget, beside = _budget_and_beside(settings, sizes)
    limits = TrainingLimits(
        ram_bytes=budget - beside,
        pins=Pins(
            asked_bytes,
            sizes.ram_available_bytes // MOST_PINNED_OF_RAM if may_pin else 0,
            settings.lane_slots,
            settings.lane_slot_bytes,
            settings.lane_slots if is_told else PAGEABLE_SLOTS,
            pins_homes=pins_more,
        ),
        counts_lanes=_given_gib(settings) is not None,  # otherwise they are of the reserve
        checkpoints_in_ram=settings.activations == "ram" or (settings.activations == "auto" and sizes.has_cuda),
        states_may_spill=wanted.states,
        weights_may_spill=wanted.params,
        waits_for_norm=bool(settings.max_grad_norm) or settings.precision == "fp16",
    )
    return place_training(sizes.needs, limits)


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


def ahead_bytes_of(settings: RunSettings, sizes: RunSizes, placed: TrainingPlacement, warnings: list[str]) -> int:
    """RAM for updates ahead of the global norm in a run with everything in RAM: as told, else a share of what it leaves
    idle beside a GPU."""
    budget, beside = _budget_and_beside(settings, sizes)
    idle, told = max(0, budget - beside - placed.homes), settings.ahead_bytes
    if told is None:
        return idle // AHEAD_OF_IDLE_RAM if sizes.has_cuda else 0
    if (taken := min(told, sizes.needs.states + sizes.needs.gradients)) > idle:
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
) -> tuple[TrainingPlacement, tuple[str, ...], str]:
    """(the placement, folders on drives that it uses, what RAM lacks)."""
    activations, given, needs = settings.activations, _given_gib(settings), sizes.needs
    budget, beside = _budget_and_beside(settings, sizes)
    words = (
        f"a budget of {format_gib(budget)}"
        if given is not None
        else f"{format_gib(sizes.ram_available_bytes)} available, {format_gib(beside)} of it left alone"
    )
    placed = placement_of(settings, sizes, wanted)
    drive_needed = placed.on_drive + (needs.checkpoints if activations == "nvme" else 0)
    folders = ()
    if wanted.is_explicit or drive_needed:
        used = len(wanted.folders) or 1
        share = 1 / used if sizes.num_ranks == 1 else -(-sizes.num_ranks // used) / sizes.num_ranks
        folders = _drives(wanted, settings.offload.strict, int(share * drive_needed), nvme_check, warnings, notes)
    if not folders:
        if activations == "nvme":
            raise ConfigError("activations nvme: the drive cannot be used (see above). Use --activations ram.")
        placed = placement_of(settings, sizes, replace(wanted, states=False, params=False))
        lanes = placed.lanes if given is not None else 0
        shortage = _check_ram(placed.homes, settings, sizes, given, words, wanted, warnings, beside + lanes)
        notes.append(f"RAM: {format_gib(placed.homes)} of parameters, gradients and states, all of it in RAM ({words})")
        notes += placed.lines()
        return placed, (), shortage
    notes.append(
        f"RAM: {format_gib(placed.homes)} of parameters, gradients and states in RAM ({words}), "
        f"{format_gb(placed.on_drive)} on NVMe"
        + ("; --ram_budget_gib 0 puts all that can be there on the drive" if not placed.on_drive else "")
    )
    notes += placed.lines()
    flowing = placed.flowing + (placed.lanes if given is not None else 0)
    taken = placed.homes + beside + flowing
    if given and taken > budget:
        warnings.append(
            f"RAM: the process takes {format_gib(taken)}, more than {words}: {format_gib(placed.fixed)} of "
            f"gradients and what waits there, {format_gib(beside + flowing)} of Python, libraries and what flows from "
            "the drive cannot leave RAM. Raise --ram_budget_gib, or train adapters (--lora_r 16)."
        )
    return placed, folders if placed.on_drive or activations == "nvme" else (), ""


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

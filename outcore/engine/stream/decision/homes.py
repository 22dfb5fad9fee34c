"""Locations of a run: the room for it, the drive that takes what RAM does not hold, and what is said of it.

`sizing.training` decides. The budget for parameters, gradients and optimizer states is `ram_budget_gib`, or what is
available now less a reserve."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from outcore.common.quantities import GB, GIB, format_gb, format_gib
from outcore.config import ConfigError, RunSettings
from outcore.engine.base import Host
from outcore.machine.offload import SPACE_SAFETY, describe_folder, resolve_nvme_paths
from outcore.optim import state_format
from outcore.sizing.streaming import (
    AHEAD_OF_IDLE_RAM,
    CPU_PROCESS_BYTES,
    CPU_STAGING_BYTES,
    PAGEABLE_SLOTS,
    PROCESS_BYTES,
    RAM_RESERVE_BYTES,
    STAGING_BYTES,
)
from outcore.sizing.tiles import HELD_WHOLE, Holding
from outcore.sizing.training import Pins, TrainingLimits, TrainingNeeds, TrainingPlacement, place_training

MOST_PINNED_OF_RAM = 2
"""Divisor: of available RAM at most one in so many bytes is pinned without being asked for: the system cannot take
them back."""
NOT_USED = "NVMe OFFLOAD IS NOT USED: "
NvmeCheck = Callable[[str, float], tuple[bool, str]]


@dataclass(frozen=True)
class Wanted:
    """Data of the engine that may leave RAM, before the drive was tried."""

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


@dataclass(frozen=True)
class Room:
    """A run, its machine, and the RAM that it may take there."""

    settings: RunSettings
    needs: TrainingNeeds
    host: Host
    holding: Holding = HELD_WHOLE
    """Way in which the device will hold parts."""
    long_rows: int | None = None
    """RAM of a rank's long rows. None: rows are whole."""

    @property
    def given_gib(self) -> float | None:
        """The budget that was asked for."""
        offload = self.settings.offload
        return 0.0 if offload.ram_budget_gib is None and offload.everything else offload.ram_budget_gib

    @property
    def budget_bytes(self) -> int:
        """RAM for the whole run."""
        return self.host.ram_available_bytes if self.given_gib is None else int(self.given_gib * GIB)

    @property
    def beside_bytes(self) -> int:
        """RAM of it that is not for the run's data."""
        processes = self.needs.ranks * (PROCESS_BYTES if self.host.has_cuda else CPU_PROCESS_BYTES)
        return processes + (RAM_RESERVE_BYTES if self.given_gib is None else 0)

    @property
    def words(self) -> str:
        """Text for people."""
        if self.given_gib is not None:
            return f"a budget of {format_gib(self.budget_bytes)}"
        return f"{format_gib(self.budget_bytes)} available, {format_gib(self.beside_bytes)} of it left alone"

    def place(self, wanted: Wanted) -> TrainingPlacement:
        """The placement, if the drive can be used."""
        settings, host = self.settings, self.host
        is_default = settings.reasons.get("staging_gib") != "--staging_gib" and settings.staging_bytes == STAGING_BYTES
        pins_more = host.has_cuda and settings.offload.pin_memory
        is_told = settings.reasons.get("lane_slots") != "default"
        asked_bytes = settings.staging_bytes if pins_more else 0 if host.has_cuda else CPU_STAGING_BYTES
        may_pin = pins_more and is_default and not host.is_wsl2  # only the default is raised, by what the machine has
        limits = TrainingLimits(
            ram_bytes=self.budget_bytes - self.beside_bytes,
            pins=Pins(
                asked_bytes,
                host.ram_available_bytes // MOST_PINNED_OF_RAM if may_pin else 0,
                settings.lane_slots,
                settings.lane_slot_bytes,
                settings.lane_slots if is_told else PAGEABLE_SLOTS,
                pins_homes=pins_more,
            ),
            checkpoints_in_ram=settings.activations == "ram" or (settings.activations == "auto" and host.has_cuda),
            states_may_spill=wanted.states,
            weights_may_spill=wanted.params,
            waits_for_norm=bool(settings.max_grad_norm) or settings.precision == "fp16",
            holding=self.holding,
            long_rows=self.long_rows,
        )
        return place_training(self.needs, limits)

    def ahead_bytes(self, placed: TrainingPlacement, notes: list[str], warnings: list[str]) -> int:
        """RAM for updates ahead of the global norm: as told, else a share of what the run leaves idle beside a GPU."""
        told = self.settings.ahead_bytes
        if why := placed.why_all_wait:
            notes += [f"ahead_gib is not used: {why}"] if told else []
            return 0
        idle = max(0, self.budget_bytes - self.beside_bytes - placed.homes - placed.lanes)
        if told is None:
            return idle // AHEAD_OF_IDLE_RAM if self.host.has_cuda else 0
        if (taken := min(told, self.needs.states + self.needs.gradients)) > idle:
            warnings.append(
                f"ahead_gib: {format_gib(taken)} may be taken, and the run leaves {format_gib(idle)} of RAM idle"
            )
        return told


def homes_of(
    room: Room, wanted: Wanted, nvme_check: NvmeCheck, warnings: list[str], notes: list[str]
) -> tuple[TrainingPlacement, tuple[str, ...], str]:
    """(the placement, folders on drives that it uses, what RAM lacks)."""
    activations, needs, words = room.settings.activations, room.needs, room.words
    placed = room.place(wanted)
    drive_needed = placed.on_drive + (needs.checkpoints if activations == "nvme" else 0)
    folders = ()
    if wanted.is_explicit or drive_needed:
        used = len(wanted.folders) or 1
        share = 1 / used if needs.ranks == 1 else -(-needs.ranks // used) / needs.ranks
        folders = _drives(wanted, room.settings.offload.strict, int(share * drive_needed), nvme_check, warnings, notes)
    if not folders:
        if activations == "nvme":
            raise ConfigError("activations nvme: the drive cannot be used (see above). Use --activations ram.")
        placed = room.place(replace(wanted, states=False, params=False))
        notes.append(f"RAM: {format_gib(placed.homes)} of parameters, gradients and states, all of it in RAM ({words})")
        notes += [*placed.lines(), *placed.because()]
        return placed, (), _check_ram(placed, room, wanted, warnings)
    notes.append(
        f"RAM: {format_gib(placed.homes)} of parameters, gradients and states in RAM ({words}), "
        f"{format_gb(placed.on_drive)} on NVMe"
        + ("; --ram_budget_gib 0 puts all that can be there on the drive" if not placed.on_drive else "")
    )
    notes += [*placed.lines(), *placed.because()]
    beside = room.beside_bytes + placed.flowing + placed.lanes
    if room.given_gib and placed.homes + beside > room.budget_bytes:
        warnings.append(
            f"RAM: the process takes {format_gib(placed.homes + beside)}, more than {words}: "
            f"{format_gib(placed.fixed)} of gradients and what waits there, {format_gib(beside)} of Python, libraries "
            "and what flows from the drive cannot leave RAM. Raise --ram_budget_gib, or train adapters (--lora_r 16)."
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


def _check_ram(placed: TrainingPlacement, room: Room, wanted: Wanted, warnings: list[str]) -> str:
    """Tell in words what does not fit the machine at all; a warning for what leaves too little."""
    settings, available = room.settings, room.host.ram_available_bytes
    needed, taken = placed.homes, placed.homes + placed.lanes + room.beside_bytes
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
    if needed > available:
        return (
            f"this run needs {format_gib(needed)} of RAM for parameters, gradients, optimizer states and what waits "
            f"there; {format_gib(available)} are available. {way}"
        )
    if room.given_gib is not None and taken > room.budget_bytes:
        words = f"{format_gib(taken)} are needed, more than {room.words}, and no drive takes the rest"
        warnings.append(f"RAM: {words}. {way}")
    elif taken > available and needed > RAM_RESERVE_BYTES:
        warnings.append(f"RAM: {format_gib(needed)} are needed, {room.words}: it may get tight. {way}")
    return ""

"""Which machine to plan for: a named profile or file, else this computer as the probe measured it.

A profile that is missing, of another machine, damaged or incomplete is an error with words; data-sheet rates are used
only when the user says so (`--nominal`), and then every fallback is noted.

What the user settles of a run; None is left to the planner, which says what it chose and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outcore.common.files import newest, user_folder
from outcore.common.words import own_command
from outcore.config import check_said
from outcore.machine import Machine, detect_machine
from outcore.machine.cards import load_machine
from outcore.plan.hardware import Hardware, Overrides, ProfileError, hardware_of

MEASURED_PROFILE = user_folder() / "machine_profile.json"
"""Path where the probe leaves what it measured, whatever folder one works in."""
RAM_TOLERANCE = 0.05
"""Firmware and kernels take different amounts of the same memory."""


def load_hardware(
    machine: str | None = None,
    overrides: Overrides | None = None,
    *,
    allow_nominal: bool = False,
    measured: Path = MEASURED_PROFILE,
    detect: Callable[[], Machine] = detect_machine,
) -> Hardware:
    """The machine called `machine` (shipped profile or file), or this one when None.

    Raises:
        ProfileError: see the module docstring."""
    if machine is not None:
        try:
            profile = load_machine(machine)
        except ValueError as error:
            raise ProfileError(f"--machine: {error}") from error
        except OSError as error:
            raise ProfileError(f"--machine {machine}: the profile cannot be read ({error}).") from error
        return hardware_of(profile, _name(machine), overrides, allow_nominal=allow_nominal)
    here = detect()
    profile, note = _measured_here(here, measured, allow_nominal)
    if profile is None:
        found = hardware_of(here, "this machine", overrides, allow_nominal=True)
        return dataclasses.replace(found, notes=(note, *found.notes))
    # Capacities are those of now, rates those that were measured then.
    now = dataclasses.replace(here, links=profile.links)
    return hardware_of(now, "this machine", overrides, allow_nominal=allow_nominal)


def _measured_here(here: Machine, measured: Path, allow_nominal: bool) -> tuple[Machine | None, str]:
    """The measured profile of this machine, or (None, why nominal rates are used); ProfileError unless allowed."""
    measured = newest(measured)
    if not measured.is_file():
        problem = f"This machine was never measured ({measured} is not there)."
    else:
        try:
            profile = Machine.load(measured)
        except (ValueError, OSError) as error:
            problem = f"The machine profile is damaged: {error}"
        else:
            differences = differs(here, profile)
            if not differences:
                return profile, ""
            problem = f"{measured} was measured on another machine: {'; '.join(differences)}."
    if not allow_nominal:
        raise ProfileError(
            f"{problem} Run {own_command('probe')} to measure this one. (outcore plan also takes --nominal, for "
            "data-sheet rates, and --machine, as in --machine rtx4070-laptop, for another one.)"
        )
    return None, f"{problem} Planned with nominal rates; {own_command('probe')} measures them."


def differs(here: Machine, saved: Machine) -> list[str]:
    """List how a saved profile's machine differs from this one, in words; empty when it is the same."""
    found = []
    gpus_here, gpus_saved = ([g.name for g in m.gpus] for m in (here, saved))
    if gpus_here != gpus_saved:
        found.append(f"its GPU is {', '.join(gpus_saved) or 'none'}, here it is {', '.join(gpus_here) or 'none'}")
    if here.cpu_name != saved.cpu_name:
        found.append(f"its CPU is {saved.cpu_name}, here it is {here.cpu_name}")
    larger = max(here.ram_total_bytes, saved.ram_total_bytes, 1)
    if abs(here.ram_total_bytes - saved.ram_total_bytes) > RAM_TOLERANCE * larger:
        found.append(
            f"it has {saved.ram_total_bytes / 2**30:.0f} GiB of RAM, here are {here.ram_total_bytes / 2**30:.0f}"
        )
    if here.is_wsl2 != saved.is_wsl2:
        found.append("it ran under WSL2" if saved.is_wsl2 else "it did not run under WSL2")
    return found


def _name(machine: str) -> str:
    return Path(machine).stem


FIELD_OF = {
    "seq_length": "seq_length",
    "micro_batch": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "save_total_limit": "save_total_limit",
    **{name: name for name in ("max_grad_norm", "engine", "zero_stage", "residency", "state_format", "precision")},
}
"""Field of a request -> setting of a run whose range it has."""
STAGES = ("none", "zero1", "zero2", "zero3", "infinity")


@dataclass(frozen=True)
class RunRequest:
    """Settings of a run that memory and time depend on."""

    seq_length: int | None = None
    """Tokens per row. None: 1,024, or all that the model can take when that is less."""
    micro_batch: int | None = None
    """Sequences per GPU and pass."""
    accumulation: int | None = None
    """Micro-batches per optimizer step."""
    engine: str = "auto"
    zero_stage: str | None = None
    residency: str | None = None
    """Home of parameters and optimizer states: ram, or nvme; auto or None: RAM as far as they fit."""
    state_format: str | None = None
    """Format of optimizer states that outcore moves, streaming or with staged offload
    (`sizing.states.STATE_FORMATS`). None: lossless, as small as possible."""
    optimizer: str = "adamw"
    precision: str = "bf16"
    activation_checkpointing: bool = True
    max_grad_norm: float = 1.0
    """0: no clipping; then updates start during the backward pass and gradients need not be kept."""
    staging_bytes: int | None = None
    """Pinned staging pool of the streaming engine. None: 8 GiB, or what the machine lets a process pin."""
    save_total_limit: int = 2
    """Checkpoints kept; one more exists while it is being written."""
    checkpoints_elsewhere: bool = False
    """Checkpoints go to another drive than the states."""

    def __post_init__(self) -> None:
        check_said({name: getattr(self, own) for own, name in FIELD_OF.items()})

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or activation as it is computed with."""
        return 4 if self.precision == "fp32" else 2

    @property
    def clips(self) -> bool:
        return self.max_grad_norm > 0

    @property
    def format(self) -> str:
        """The state format, chosen where it was left open: lossless split for bf16, fp32 otherwise."""
        return self.state_format or ("split" if self.precision == "bf16" else "fp32")

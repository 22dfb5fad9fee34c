"""From flags and deepspeed_config.json to the streaming engine's settings: what is taken, from where, and why.

RAM first, NVMe when RAM fills: the budget for parameters, gradients and optimizer states is `ram_budget_gib`, or what
is available now less a reserve. Gradients come first (they have no other home), then parameters (each of their bytes
moves three times a step), then states (twice); the rest of the last two lives on the drive, where one is named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outcore.common.quantities import GB, GIB, format_gb, format_gib
from outcore.config import ConfigError, TrainConfig
from outcore.engine.deepspeed.drive.path import validate_nvme_path
from outcore.engine.stream.settings import StreamSettings
from outcore.optim import state_format
from outcore.plan.constants import SPACE_SAFETY
from outcore.sizing.deepspeed import ELEMENT_BYTES
from outcore.train.configure.stream_homes import Wanted, wanted_homes

CPU_STAGING_BYTES = 256 << 20
"""Without a GPU nothing is pinned: the lanes' slots are all that is needed."""
RAM_RESERVE_BYTES = 3 * GIB
"""Left alone when the budget is measured: Python, the libraries and a CUDA context take 1.5 to 2.5 GiB, and a
checkpoint being written wants page cache."""
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
    precision: str
    ram_available_bytes: int
    has_cuda: bool
    row_tokens: int | None = None
    """Tokens of a row."""
    saved_bytes: int = 0
    """Bytes less that the parameters take at home because frozen ones are packed."""


@dataclass
class StreamPlan:
    """The settings, and one line for each thing that was decided."""

    settings: StreamSettings
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    """Keys of deepspeed_config.json that the engine has no use for."""


def stream_settings_of(
    config: TrainConfig,
    user_config: Mapping[str, Any],
    built: Mapping[str, Any],
    sizes: RunSizes,
    *,
    nvme_check: NvmeCheck = validate_nvme_path,
) -> StreamPlan:
    """Decide every setting. `built`: batch, precision, clipping and optimizer as resolved for DeepSpeed.

    ConfigError for contradictions, for an unusable drive under `strict_offload`, and for a run that fits nowhere.
    """
    outcore, optimizer = built["outcore"], built["optimizer"]["params"]
    notes: list[str] = []
    warnings: list[str] = []
    states = _state_format(outcore, sizes, notes)
    wanted = wanted_homes(config, user_config, outcore, notes)
    activations = _activations(config, user_config, wanted)
    lanes = _lanes(outcore)
    slots_bytes = (
        2 * lanes.get("num_slots", StreamSettings.num_slots) * lanes.get("slot_bytes", StreamSettings.slot_bytes)
    )
    pinned = outcore["staging_bytes"] if sizes.has_cuda else CPU_STAGING_BYTES
    if not config.pin_memory or _file_pins_nothing(user_config):
        pinned = slots_bytes
        notes.append("pin_memory false: only the lanes' slots are pinned, homes are pageable and flow through them")
    homes = _homes(config, outcore, sizes, states, activations, wanted, nvme_check, warnings, notes)
    fp16 = built.get("fp16") or {}
    settings = StreamSettings(
        betas=(optimizer["betas"][0], optimizer["betas"][1]),
        eps=optimizer["eps"],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=built["gradient_clipping"],
        states=states,
        accumulate=_accumulate(user_config, sizes.precision),
        activations=activations,
        compile=config.compile,
        packed_attention="auto" if config.attn_implementation == "auto" else "masks",
        tiling=config.tiling,
        tile_bytes=config.tile_bytes,
        staging_bytes=max(pinned, slots_bytes),
        write_combined=outcore["write_combined"] in ("on", True) and not homes,
        step_tokens=sizes.step_tokens,
        row_tokens=sizes.row_tokens,
        initial_loss_scale=2.0 ** fp16.get("initial_scale_power", 16),
        loss_scale_window=fp16.get("loss_scale_window", StreamSettings.loss_scale_window),
        loss_scale_hysteresis=fp16.get("hysteresis", StreamSettings.loss_scale_hysteresis),
        min_loss_scale=float(fp16.get("min_loss_scale", StreamSettings.min_loss_scale)),
        seed=config.seed,
        **lanes,
        **homes,
    )
    return StreamPlan(settings, notes, warnings, unused_keys(user_config))


def _state_format(outcore: Mapping[str, Any], sizes: RunSizes, notes: list[str]) -> str:
    name = outcore["state_format"]
    if name == "auto":
        return "split" if sizes.precision == "bf16" else "fp32"
    if state_format(name).moments8:
        master = ", masters in 24" if state_format(name).short_residual else ""
        notes.append(
            f"state_format {name}: the optimizer's moments are kept in 8 bits{master}, so results differ from fp32's"
        )
    return name


def _accumulate(user_config: Mapping[str, Any], precision: str) -> Any:
    wanted = _block(user_config, "data_types").get("grad_accum_dtype")
    return "weights" if wanted == precision and precision != "fp32" else "fp32"


def _file_pins_nothing(user_config: Mapping[str, Any]) -> bool:
    zero = _block(user_config, "zero_optimization")
    return all(_block(zero, name).get("pin_memory") is False for name in ("offload_optimizer", "offload_param"))


def _lanes(outcore: Mapping[str, Any]) -> dict[str, int]:
    block = outcore.get("lanes") or {}
    return {key: block[key] for key in ("slot_bytes", "num_slots") if key in block}


def _activations(config: TrainConfig, user_config: Mapping[str, Any], wanted: Wanted) -> Any:
    """Where activation checkpoints wait: the flag, else the file's cpu_checkpointing, else the engine's own choice."""
    if config.activations == "nvme" and wanted.folder is None:
        raise ConfigError("activations nvme needs a drive: give --nvme_offload_path DIR.")
    if (
        config.activations == "auto"
        and _block(user_config, "activation_checkpointing").get("cpu_checkpointing") is True
    ):
        return "ram"
    return config.activations


def activation_bytes(sizes: RunSizes) -> int:
    """Activation checkpoints of a step: every layer's input for every micro-batch."""
    return sizes.num_layers * sum(sizes.step_tokens) * sizes.hidden_size * ELEMENT_BYTES[sizes.precision]


def _homes(
    config: TrainConfig,
    outcore: Mapping[str, Any],
    sizes: RunSizes,
    states: str,
    activations: str,
    wanted: Wanted,
    nvme_check: NvmeCheck,
    warnings: list[str],
    notes: list[str],
) -> dict[str, Any]:
    """nvme_path, state_ram_bytes and weight_ram_bytes of the settings; {} when everything lives in RAM."""
    element = ELEMENT_BYTES[sizes.precision]
    weights = element * sizes.total_params - sizes.saved_bytes
    gradients = element * sizes.trainable_params
    state_bytes = int(state_format(states).bytes_per_param * sizes.trainable_params)
    in_ram = activations == "ram" or (activations == "auto" and sizes.has_cuda)
    waiting = max(0, activation_bytes(sizes) - gradients) if in_ram else 0  # they borrow the gradients' homes
    needed = weights + gradients + state_bytes + waiting
    given = outcore["ram_budget_gib"]
    if given is None and wanted.everything:
        given = 0.0
    budget = int(given * GIB) if given is not None else max(0, sizes.ram_available_bytes - RAM_RESERVE_BYTES)
    words = (
        f"a budget of {format_gib(budget)}"
        if given is not None
        else f"{format_gib(sizes.ram_available_bytes)} available, {format_gib(RAM_RESERVE_BYTES)} of it left alone"
    )
    if given is None and needed > budget:
        budget = max(0, budget - StreamSettings.state_ring_bytes)  # through which states on the drive flow
    room = max(0, budget - gradients - waiting)
    weight_ram = min(weights, room) if wanted.params else weights
    state_ram = min(state_bytes, max(0, room - weight_ram)) if wanted.states else state_bytes
    form, chunk_numel = state_format(states), StreamSettings.chunk_numel
    spilled = (state_bytes - state_ram) / form.bytes_per_param  # parameters
    on_drive = weights - weight_ram + int(spilled * form.on_drive.stored_bytes(chunk_numel) / chunk_numel)
    drive_needed = on_drive + (activation_bytes(sizes) if activations == "nvme" else 0)
    folder = None
    if wanted.is_explicit or drive_needed:
        folder = _drive(config, wanted, drive_needed, nvme_check, warnings, notes)
    if folder is None:
        if activations == "nvme":
            raise ConfigError("activations nvme: the drive cannot be used (see above). Use --activations ram.")
        _check_ram(needed, sizes, states, given, words, wanted, warnings)
        notes.append(f"RAM: {format_gib(needed)} of parameters, gradients and states, all of it in RAM ({words})")
        return {}
    notes.append(
        f"RAM: {format_gib(needed - on_drive)} of parameters, gradients and states in RAM ({words}), "
        f"{format_gb(on_drive)} on NVMe"
        + ("; --ram_budget_gib 0 puts all that can be there on the drive" if not on_drive else "")
    )
    homes: dict[str, Any] = {"nvme_path": folder}
    if state_ram < state_bytes:
        homes["state_ram_bytes"] = state_ram
    if weight_ram < weights:
        homes["weight_ram_bytes"] = weight_ram
    return homes if len(homes) > 1 or activations == "nvme" else {}


def _drive(
    config: TrainConfig,
    wanted: Wanted,
    drive_needed: int,
    nvme_check: NvmeCheck,
    warnings: list[str],
    notes: list[str],
) -> str | None:
    """The folder to use, after it was tried; None when RAM has to do, said loudly (an error under strict_offload)."""
    if wanted.folder is None:
        if not wanted.is_explicit:
            return None
        usable, message = (
            False,
            ("No NVMe path is given (--nvme_offload_path, or outcore.nvme_path in deepspeed_config.json)."),
        )
    else:
        required_gb = SPACE_SAFETY * drive_needed / GB
        usable, message = nvme_check(wanted.folder, required_gb)
        message += f" This run needs {format_gb(required_gb * GB)} there, a margin of half included." if usable else ""
    if usable:
        (warnings if "Warning:" in message else notes).append(f"NVMe: {message}")
        return wanted.folder
    if config.strict_offload:
        raise ConfigError(f"strict_offload: offloading to NVMe is not possible. {message}")
    warnings.append(
        f"NVMe OFFLOAD IS NOT USED: {message} Falling back to RAM for everything; --strict_offload makes this an error."
    )
    return None


def _check_ram(
    needed: int, sizes: RunSizes, states: str, given: float | None, words: str, wanted: Wanted, warnings: list[str]
) -> None:
    """ConfigError for what does not fit the machine at all, a warning for what leaves too little."""
    compact = "split8" if sizes.precision == "bf16" else "fp32_m8"
    smaller = f"8-bit moments (--state_format {compact}; other numerics), " * (not state_format(states).moments8)
    way = f"Give a drive (--nvme_offload_path DIR), {smaller}or train adapters (--lora_r 16)."
    if wanted.folder is not None and not (wanted.states and wanted.params):
        way = "Let states and parameters go to the drive: --zero_stage infinity, or leave offload_* and residency out."
    if needed > sizes.ram_available_bytes:
        raise ConfigError(
            f"this run needs {format_gib(needed)} of RAM for parameters, gradients, optimizer states and what waits "
            f"there; {format_gib(sizes.ram_available_bytes)} are available. {way}"
        )
    if given is not None and needed > given * GIB:
        warnings.append(f"RAM: {format_gib(needed)} are needed, more than {words}, and no drive takes the rest. {way}")
    elif needed > sizes.ram_available_bytes - RAM_RESERVE_BYTES and needed > RAM_RESERVE_BYTES:
        warnings.append(f"RAM: {format_gib(needed)} are needed, {words}: it may get tight. {way}")


USED_KEYS = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping optimizer "
    "scheduler bf16 bfloat16",
    "fp16": "enabled initial_scale_power loss_scale_window hysteresis min_loss_scale loss_scale",
    "zero_optimization": "stage",
    "zero_optimization.offload_optimizer": "device nvme_path pin_memory",
    "zero_optimization.offload_param": "device nvme_path pin_memory",
    "activation_checkpointing": "cpu_checkpointing",
    "data_types": "grad_accum_dtype",
    "outcore": "staging_bytes write_combined engine nvme_path residency state_format ram_budget_gib lanes",
}
"""What of deepspeed_config.json the streaming engine goes by."""


def unused_keys(user_config: Mapping[str, Any]) -> list[str]:
    """The file's keys that have no effect with the streaming engine, dotted, in the file's order."""
    found: list[str] = []

    def look(block: Mapping[str, Any], path: str) -> None:
        used = USED_KEYS[path].split()
        for key, value in block.items():
            name = f"{path}.{key}".removeprefix(".")
            if name in USED_KEYS and isinstance(value, Mapping):
                look(value, name)
            elif key not in used and not key.startswith(("_", "//", "#")) and key != "comment":
                found.append(name)

    look(user_config, "")
    return found


def _block(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    block = config.get(name)
    return block if isinstance(block, Mapping) else {}

"""From `RunSettings` to the streaming engine's settings, and why.

What the streaming engine chose for a run, printable, and how it is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from outcore.common.quantities import format_gib
from outcore.config import ConfigError, RunSettings
from outcore.engine.base import Engine, Host, grouped
from outcore.engine.stream.build import build_stream_engine
from outcore.engine.stream.decision.homes import (
    NvmeCheck,
    Room,
    Wanted,
    homes_of,
    wanted_homes,
)
from outcore.engine.stream.ranks import ALONE, RankPlace
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.parts import discover_units, needs_of_parts, run_shape
from outcore.flow.tiles import free_device_bytes
from outcore.flow.weights import choose_verification
from outcore.formats import open_packed
from outcore.machine.offload import validate_nvme_path
from outcore.model import LoadedModel, ModelSettings, load_model
from outcore.optim import state_format
from outcore.sizing.activations import long_ram_bytes
from outcore.sizing.layouts import StreamLayout
from outcore.sizing.shape import ModelShape
from outcore.sizing.streaming import RESIDENT_BYTES
from outcore.sizing.training import TrainingNeeds, TrainingPlacement, needs_of_shape
from outcore.sizing.work import tiling_of_shape
from outcore.storage import DriveAccess


@dataclass(frozen=True)
class StreamDecision:
    """The engine's settings, and one line for each thing that was decided; see `Decision`."""

    settings: RunSettings
    told: StreamSettings
    device: str
    placed: TrainingPlacement
    """Homes of all that the run keeps."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    """Keys of deepspeed_config.json that the engine has no use for."""
    shortage: str = ""
    """Why the run does not fit this machine's RAM, and what to do; '' when it does. A run is refused with it."""
    reason: str = ""
    is_auto: bool = False
    loaded: LoadedModel | None = None
    name: str = "stream"
    draws_timeline: bool = True

    @property
    def nvme_path(self) -> str | None:
        """The first folder that takes what RAM does not hold."""
        return next(iter(self.told.nvme_paths), None)

    @property
    def state_format(self) -> str:
        """Format of the optimizer states."""
        return self.told.states

    @property
    def layout(self) -> StreamLayout:
        """Layout of the run, as the planner counts it."""
        micro, accumulation = self.settings.per_device_train_batch_size, self.settings.gradient_accumulation_steps
        return self.told.layout(micro, accumulation, torch.device(self.device))

    def words(self) -> list[str]:
        """Lines to show before anything is read or built."""
        lines = [f"WARNING: {warning}" for warning in dict.fromkeys(self.warnings)]
        lines += [f"engine: {note}" for note in self.notes]
        if self.nvme_path is not None:
            lines.append(f"engine: {choose_verification(self.told.nvme_checksums).words}")
        unused = f"engine: of --deepspeed_config only DeepSpeed's engine uses {grouped(self.unused, most=2)}"
        return [*lines, *([unused] if self.unused else [])]

    def record(self) -> dict[str, Any]:
        """Plain values for plan.json."""
        return {"stream": asdict(self.told), "unused": self.unused}

    def forget(self) -> None:
        """Undo what deciding left behind: nothing."""

    def open(self, model: Any, tokenizer: Any, say: Callable[[str], None]) -> Engine:
        """Load the model, once, and make the engine. StreamUnsupported (a ValueError) when it turns out that it cannot
        be streamed; no weight has been read then unless `loaded` was there."""
        loaded = self.loaded or load_model(model, tokenizer=tokenizer, lazy=True, packed_feed=open_packed)
        place, told = self._place(), self.told
        if not place.is_alone:
            told = place.exchange(told)[0]  # free RAM and the drive's speed, as each rank found them, differ a little
        engine = build_stream_engine(loaded, told, device=self.device, place=place)
        for note in loaded.notes:
            say(f"model: {note}")
        say(f"engine: {engine.describe()}")
        return engine

    def _place(self) -> RankPlace:
        world_size = self.settings.world_size
        if world_size == 1:
            return ALONE

        def exchange(mine: Any) -> list[Any]:
            found: list[Any] = [None] * world_size
            torch.distributed.all_gather_object(found, mine)
            return found

        return RankPlace(torch.distributed.get_rank(), world_size, exchange)


PROBED = (
    "storage_engine", "storage_threads", "storage_block_bytes", "write_combined", "lane_slots", "lane_slot_bytes",
    "transfer_path",
)  # fmt: skip
"""Settings that `gds_optimizer.py --apply` writes as it measured them; a run says which it took."""


def decide_stream(
    settings: RunSettings, model: ModelSettings, host: Host, tokenizer: Any, loaded: LoadedModel | None
) -> StreamDecision:
    """Decide from the model's configuration, or from a model_module's own model, which is `loaded` already."""
    step_tokens = (settings.per_device_train_batch_size * model.seq_length,) * settings.gradient_accumulation_steps
    uses_muon, ranks = settings.optimizer == "muon", settings.ranks_per_host
    available, shape = host.ram_available_bytes, None
    if loaded is None:
        needs = needs_of_shape(
            shape := run_shape(model, tokenizer),
            settings.element_bytes,
            settings.state_format,
            step_tokens,
            uses_muon=uses_muon,
            ranks=ranks,
        )
    else:
        units, hidden = discover_units(loaded), loaded.facts.hidden_size
        needs = needs_of_parts(units, settings.state_format, step_tokens, hidden, uses_muon=uses_muon, ranks=ranks)
        available += ranks * loaded.facts.total_params * model.dtype.itemsize  # the homes take its place
    host = replace(host, ram_available_bytes=available)
    return replace(stream_decision(settings, needs, host, step_tokens, model.seq_length, shape), loaded=loaded)


def stream_decision(
    settings: RunSettings,
    needs: TrainingNeeds,
    host: Host,
    step_tokens: tuple[int, ...],
    row_tokens: int | None = None,
    shape: ModelShape | None = None,
    *,
    nvme_check: NvmeCheck = validate_nvme_path,
) -> StreamDecision:
    """Decide every setting of the streaming engine. `step_tokens`: tokens (rows x length) of each micro-batch of a
    step; `row_tokens`: of a row; `shape`: the model's, None where only its builder knows it: parts count as whole then.
    ConfigError for an unusable drive under `strict_offload`."""
    notes: list[str] = []
    warnings: list[str] = []
    if state_format(settings.state_format).moments8:
        master = ", masters in 24" if state_format(settings.state_format).short_residual else ""
        notes.append(
            f"state_format {settings.state_format}: the optimizer's moments are kept in 8 bits{master}, so results "
            "differ from fp32's"
        )
    wanted = wanted_homes(settings)
    if needs.ranks > 1:
        notes.append(
            f"ranks: {needs.ranks} on this host share one copy of the parameters in RAM; each updates its share of "
            "the states"
        )
        if wanted.params:
            notes.append("parameters stay in RAM, where the ranks share them; states go to the drive where RAM is full")
            wanted = replace(wanted, params=False)
    for what, device in (("optimizer states", settings.offload.optimizer), ("parameters", settings.offload.params)):
        if device == "none":
            notes.append(f"{what}: in RAM (offload none keeps them on the GPU with DeepSpeed only)")
    if settings.activations == "nvme" and not wanted.folders:
        raise ConfigError("activations nvme needs a drive: give --nvme_offload_path DIR.")
    device = "cuda" if host.has_cuda else "cpu"
    told = _told(settings, wanted, step_tokens, row_tokens, device)
    room = Room(settings, needs, host)
    if shape is not None:
        tokens, e = max(step_tokens), needs.element_bytes
        layout = told.layout(1, len(step_tokens), torch.device(device))
        holding = tiling_of_shape(shape, e, row_tokens or tokens, tokens, layout, told.device_bytes).holding
        long_rows = long_ram_bytes(shape, e, tokens, layout.accumulation, holding)
        room = replace(room, holding=holding, long_rows=long_rows)
    placed, folders, shortage = homes_of(room, wanted, nvme_check, warnings, notes)
    pinned = placed.pinned
    if not settings.offload.pin_memory and host.has_cuda:
        notes.append("pin_memory false: only the lanes' slots are pinned, homes are pageable and flow through them")
    elif host.has_cuda and pinned.pool_bytes > max(settings.staging_bytes, needs.ranks * pinned.lane_bytes):
        notes.append(
            f"pinned memory: {format_gib(pinned.pool_bytes)} instead of {format_gib(settings.staging_bytes)}, because "
            f"{format_gib(placed.crossing)} of homes cross to the GPU and pinned ones take no copy (--staging_gib sets "
            "it)"
        )
    probed = [f"{name} {getattr(settings, name)}" for name in PROBED if _is_of_file(settings, name)]
    if probed:
        notes.append(f"as {settings.file.path} has it, where the probe's --apply writes: {', '.join(probed)}")
    if settings.matmul != "same":
        notes.append(
            f"matmul {settings.matmul}: other numerics (docs/exactness.md); the forecast does not count its speed"
        )
    told = replace(
        told,
        ahead_bytes=room.ahead_bytes(placed, notes, warnings),
        staging_bytes=pinned.pool_bytes,
        slot_bytes=settings.lane_slot_bytes,
        num_slots=pinned.lane_bytes // (2 * settings.lane_slot_bytes),
        write_combined=_write_combined(settings, host, notes) and not folders,
        nvme_path=(folders[0] if len(folders) == 1 else folders) or None,
        state_ram_bytes=placed.states if placed.spilled_states else None,
        weight_ram_bytes=placed.weight_budget,
        gradient_bytes=None if placed.has_homes else placed.gradients,
    )
    return StreamDecision(
        settings,
        told,
        device,
        placed,
        notes=tuple(notes),
        warnings=(*settings.warnings, *warnings),
        shortage=shortage,
        unused=tuple(unused_keys(settings.file.blocks)),
    )


def _told(
    settings: RunSettings, wanted: Wanted, step_tokens: tuple[int, ...], row_tokens: int | None, device: str
) -> StreamSettings:
    """The engine's settings as far as they do not depend on where the run's data live."""
    scaling, accumulates_as = settings.loss_scaling, settings.grad_accum_dtype
    return StreamSettings(
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_epsilon,
        optimizer=settings.optimizer,
        weight_decay=settings.weight_decay,
        decay_all=settings.decay_all,
        max_grad_norm=settings.max_grad_norm,
        states=settings.state_format,
        accumulate="weights" if accumulates_as == settings.precision != "fp32" else "fp32",
        activations=settings.activations,
        matmul=settings.matmul,
        compile=settings.compile,
        packed_attention=settings.packed_attention,
        tiling=settings.tiling,
        tile_bytes=settings.tile_bytes,
        device_bytes=_device_bytes(device),
        resident_bytes=RESIDENT_BYTES if settings.resident_bytes is None else settings.resident_bytes,
        step_tokens=step_tokens,
        row_tokens=row_tokens,
        initial_loss_scale=2.0**scaling.initial_power,
        loss_scale_window=scaling.window,
        loss_scale_hysteresis=scaling.hysteresis,
        min_loss_scale=float(scaling.minimum),
        seed=settings.seed,
        nvme_checksums=settings.nvme_checksums,
        storage=DriveAccess(
            settings.storage_engine, settings.storage_threads, settings.storage_block_bytes, settings.transfer_path
        ),
        nvme_path=wanted.folders or None,
    )


def _write_combined(settings: RunSettings, host: Host, notes: list[str]) -> bool:
    """Whether upload slots lie in write-combined memory: as set, else as this machine measured it."""
    if settings.write_combined != "auto" or not host.has_cuda or host.write_combined is None:
        return settings.write_combined == "on"
    said = "not slower, upload slots lie there where no drive is used" if host.write_combined else "slower, it is off"
    notes.append(f"write_combined auto: the machine profile measured it {said}")
    return host.write_combined


def _is_of_file(settings: RunSettings, name: str) -> bool:
    return settings.reasons.get(name, "").startswith(f"{settings.file.path}: ")


def _device_bytes(device: str) -> int | None:
    """Bytes that the engine will find on the device, asked once and before it takes any of it: other processes and a
    cap of the allocator take from it. None: it is not here to be asked."""
    return free_device_bytes(torch.device(device)) if torch.cuda.is_available() else None


USED_KEYS = {
    "": "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping optimizer "
    "scheduler bf16 bfloat16",
    "fp16": "enabled initial_scale_power loss_scale_window hysteresis min_loss_scale loss_scale",
    "zero_optimization": "stage",
    "zero_optimization.offload_optimizer": "device nvme_path pin_memory",
    "zero_optimization.offload_param": "device nvme_path pin_memory",
    "activation_checkpointing": "cpu_checkpointing",
    "data_types": "grad_accum_dtype",
    "outcore": "staging_bytes write_combined engine nvme_path residency state_format ram_budget_gib storage lanes "
    "transfer_path",
}
"""Keys of deepspeed_config.json that the streaming engine goes by."""


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

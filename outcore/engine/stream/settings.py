"""Settings of the streaming engine: one frozen dataclass, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

import torch

from outcore.common.classes import same_named
from outcore.optim import BackendName, check_eps, state_format
from outcore.sizing.activations import LOGITS_CHUNK_BYTES
from outcore.sizing.engine_rule import why_not_muon
from outcore.sizing.layouts import Residency, StreamLayout
from outcore.sizing.streaming import (
    CHUNK_NUMEL,
    EVAL_GROUP,
    NUM_SLOTS,
    RESIDENT_BYTES,
    SLOT_BYTES,
    STAGING_BYTES,
    STATE_RING_BYTES,
    STATE_RING_SLOTS,
    WEIGHT_READ_AHEAD_BYTES,
)
from outcore.sizing.tiles import LAYER_BUFFERS
from outcore.staging.pool import ALIGNMENT_BYTES
from outcore.storage import DRIVE_ACCESS, DriveAccess


@dataclass(frozen=True)
class StreamSizes:
    """Sizes that the engine is built with and no run changes; tests and benchmarks give other values."""

    update: Literal["auto", "deferred", "immediate"] = "auto"
    """deferred: updates run under the next forward, once the global norm is known; a non-finite gradient skips the
    step whole. immediate: as soon as a layer's gradient is there. auto: immediate without clipping unless fp16."""
    weight_read_ahead_bytes: int = WEIGHT_READ_AHEAD_BYTES
    """Pinned slots through which parameters on NVMe are read ahead of their use, out of `staging_bytes`."""
    compress_on_nvme: bool = True
    """fp32 moments on NVMe in 28 bits each, without loss: fewer bytes to move, some more work for the CPU and 10 % more
    memory for a slot of the ring; see `outcore.optim.formats.compressed`."""
    state_ring_bytes: int = STATE_RING_BYTES
    """RAM through which states on NVMe flow, in slots of one chunk each."""
    state_ring_slots: int = STATE_RING_SLOTS
    """Slots at most."""
    cuda_graphs: Literal["auto", "off"] = "auto"
    """Layers as CUDA graphs where their launches would keep a fast GPU waiting; see `graphs`."""
    num_layer_buffers: int = LAYER_BUFFERS
    """Layers on the device at a time, at most: where memory is short, fewer (`sizing.tiles`)."""
    device_bytes: int | None = None
    """Device memory to plan for. None: what is free on a GPU (under the allocator's cap), no limit on the CPU."""
    optimizer_threads: int | None = None
    """Threads of the optimizer. None: all cores, because these threads stand behind those that launch kernels and
    move bytes; with a drive under the run all but two."""
    optimizer_backend: BackendName = "auto"
    chunk_numel: int = CHUNK_NUMEL
    logits_chunk_bytes: int = LOGITS_CHUNK_BYTES
    eval_group: int = EVAL_GROUP
    """Micro-batches of an evaluation that share one pass over the weights."""


@dataclass(frozen=True)
class StreamSettings(StreamSizes):
    """Settings that a run's decision makes. Raises ValueError for what cannot work."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon: for matrices of layers, which then have a momentum alone; AdamW for all else."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decay_all: bool = True
    """Whether norms and biases decay, too."""
    max_grad_norm: float = 1.0
    """Exact clipping of the global L2 norm; 0: no clipping."""
    states: str = "fp32"
    """Optimizer states: fp32, split (bf16 only: exact in 10 B instead of 12), or with 8-bit moments fp32_m8, split8, or
    with a master of 24 bits beside them fp24_m8 (bf16 only)."""
    accumulate: Literal["fp32", "weights"] = "fp32"
    """Type in which gradients of several micro-batches are added up on the device."""
    activations: Literal["auto", "device", "ram", "nvme"] = "auto"
    """Home in which activation checkpoints wait for their backward. auto: RAM beside a GPU, where they borrow the
    gradients' homes (no RAM of their own as far as they fit, and a layer's compute hides the way down and up)."""
    step_tokens: tuple[int, ...] | None = None
    """Tokens (rows x length) of each micro-batch of a step, where known: space for activation checkpoints on NVMe is
    then reserved when the engine is built instead of in the first step, and what a step needs on the device is known
    when it is decided how units are held there."""
    row_tokens: int | None = None
    """Tokens of a row, where known. None: as if a micro-batch were one."""
    nvme_path: str | tuple[str, ...] | None = None
    """Folder for what does not live in RAM, or several on different drives, which are then used side by side. Scratch:
    made when the engine is built, removed when it is closed. None: everything lives in RAM."""
    nvme_checksums: Literal["auto", "on", "off", "sampled"] = "auto"
    """Verify what the drives give back (`flow.weights.choose_verification`)."""
    state_ram_bytes: int | None = None
    """RAM for optimizer states; what does not fit lives in `nvme_path`. None: all in RAM; 0: all on NVMe."""
    weight_ram_bytes: int | None = None
    """RAM for the homes of parameters, likewise, the same share of every layer. A model that is mostly frozen (LoRA)
    keeps what it trains in RAM."""
    gradient_bytes: int | None = None
    """RAM for gradients on their way to the optimizer, with immediate updates. None: all of them where RAM allows, else
    three of the largest. With deferred updates every gradient waits for the norm, so all have a home."""
    matmul: Literal["same", "float8_tensorwise", "float8_rowwise", "fp16_accumulation"] = "same"
    """Way in which layers multiply (`model.forward.LayerProducts`)."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Layers through torch.compile. auto: on a GPU, where the model allows it; the reason is said where not."""
    packed_attention: Literal["auto", "masks"] = "auto"
    """Documents in packed rows. auto: torch's variable-length kernel where it computes what masks do; see
    `packed_rows`."""
    tiling: Literal["auto", "on", "off", "tokens"] = "auto"
    """Units that do not fit on the device whole, however little else is held, are computed in tiles. on: every unit."""
    tile_bytes: int | None = None
    """Bytes of one tile of a weight. None: up to 64 MiB, by the device's memory."""
    resident_bytes: int | None = RESIDENT_BYTES
    """Idle device memory for layers that stay there with their states, at most. None: all of it on a GPU, nothing on
    the CPU; 0: none stays."""
    ahead_bytes: int = 0
    """RAM for second homes of the last parts' states (`outcore.states.homes`): their updates begin before the global
    norm is known, once a step waited for updates, and are taken back where something must be clipped after all."""
    staging_bytes: int = STAGING_BYTES
    """Pinned memory: the lanes' slots first, then homes of parameters and gradients as far as it reaches."""
    slot_bytes: int = SLOT_BYTES
    num_slots: int = NUM_SLOTS
    """Per lane."""
    storage: DriveAccess = DRIVE_ACCESS
    """Name, threads and block of what moves bytes to and from drives (`outcore.storage`)."""
    write_combined: bool = False
    """The upload lane's slots in write-combined memory, which the CPU only writes: for machines where it is faster."""
    initial_loss_scale: float = 2.0**16
    loss_scale_window: int = 1000
    loss_scale_hysteresis: int = 2
    min_loss_scale: float = 1.0
    """fp16 only."""
    seed: int = 0
    """Seed of dropout and stochastic rounding."""

    def __post_init__(self) -> None:
        if self.max_grad_norm < 0:
            raise ValueError(f"max_grad_norm must be positive, or 0 for no clipping; got {self.max_grad_norm}")
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal and getattr(self, name) not in (choices := get_args(kind)):
                raise ValueError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
        for name in ("num_layer_buffers", "num_slots", "eval_group", "logits_chunk_bytes", "state_ring_slots"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("device_bytes", "tile_bytes", "row_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, or None to let the engine choose; got {value}")
        check_eps(self.eps, state_format(self.states).moments8)
        if self.slot_bytes <= 0 or self.slot_bytes % ALIGNMENT_BYTES:
            raise ValueError(f"slot_bytes must be a positive multiple of {ALIGNMENT_BYTES}, got {self.slot_bytes}")
        if self.staging_bytes < self.lane_bytes:
            raise ValueError(
                f"staging_bytes {self.staging_bytes} cannot hold the slots of the two lanes ({self.lane_bytes} bytes): "
                "raise it, or lower slot_bytes or num_slots"
            )
        self._check_residency()
        if self.optimizer == "muon" and (why := why_not_muon(state_format=self.states)):
            raise ValueError(why)
        if self.update == "immediate" and self.max_grad_norm:
            raise ValueError(
                "update: immediate cannot clip the global norm, which is known only when every gradient is there. Set "
                "max_grad_norm 0, or update: deferred"
            )

    def _check_residency(self) -> None:
        names = (
            "state_ram_bytes", "weight_ram_bytes", "weight_read_ahead_bytes", "gradient_bytes", "state_ring_bytes",
            "resident_bytes", "ahead_bytes",
        )  # fmt: skip
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, got {value}")
        spills = [name for name in ("state_ram_bytes", "weight_ram_bytes") if getattr(self, name) is not None]
        spills += ["activations: nvme"] if self.activations == "nvme" else []
        if spills and not self.nvme_paths:
            raise ValueError(f"{spills[0]} needs nvme_path, a folder on the drive that takes what RAM does not hold")
        if self.gradient_bytes is not None and (self.max_grad_norm or self.update == "deferred"):
            raise ValueError(
                "gradient_bytes needs immediate updates: deferred ones wait for the global norm, so the gradients of "
                "all layers must be kept until then. Set max_grad_norm 0 and update: immediate, or leave it out"
            )

    @property
    def nvme_paths(self) -> tuple[str, ...]:
        """The folders of `nvme_path`; none when everything lives in RAM."""
        if self.nvme_path is None:
            return ()
        return (self.nvme_path,) if isinstance(self.nvme_path, str) else tuple(self.nvme_path)

    @property
    def residency(self) -> Residency:
        """Budgets of RAM, as the placement is made within."""
        return Residency(**same_named(Residency, self, "compressed"), compressed=self.compress_on_nvme)

    @property
    def lane_bytes(self) -> int:
        """Pinned memory of the two lanes' slots."""
        return 2 * self.num_slots * self.slot_bytes

    def layout(self, micro_batch: int, accumulation: int, device: torch.device) -> StreamLayout:
        """Make the layout of these settings: all that bytes and seconds depend on."""
        own = ("micro_batch", "accumulation", "checkpoints_home", "layer_buffers", "compiled", "cuda_graphs")
        home = self.activations_on(device)
        return StreamLayout(
            micro_batch,
            accumulation,
            checkpoints_home="vram" if home == "device" else home,
            layer_buffers=self.num_layer_buffers,
            compiled=device.type != "cpu" and self.compile != "off",
            cuda_graphs=self.cuda_graphs == "auto",
            **same_named(StreamLayout, self, *own),
        )

    def activations_on(self, device: torch.device) -> str:
        """device, ram or nvme."""
        return self.activations if self.activations != "auto" else "ram" if device.type == "cuda" else "device"

    def is_deferred(self, dtype: torch.dtype) -> bool:
        """Whether updates wait for the global norm. ValueError for immediate updates in fp16."""
        if dtype == torch.float16 and self.update == "immediate":
            raise ValueError(
                "update: immediate cannot train in fp16: an overflow is a normal event there and must skip the step "
                "before any layer is updated. Set update: deferred, or train in bf16"
            )
        return self.update == "deferred" or bool(self.max_grad_norm) or dtype == torch.float16

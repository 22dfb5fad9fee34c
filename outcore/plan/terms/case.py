"""One question to the planner: this model, run and machine, and one layout of an engine; what its plan becomes without
a GPU, and how much drive it needs.

Needed of the drive: parts that live there x 1.5, and the checkpoints (kept ones and the one being written). Usable:
what is free, less a fifth of it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from outcore.machine.offload import FREE_RESERVE, SPACE_SAFETY
from outcore.plan import constants as k
from outcore.plan.hardware import Hardware
from outcore.plan.record import COMMUNICATOR, OVERHEAD, SPARE, Item, Plan, TierUse
from outcore.plan.request import RunRequest
from outcore.plan.terms.rates import Traffic
from outcore.plan.terms.work import Flops, device_bytes, step_flops
from outcore.sizing.activations import has_masks
from outcore.sizing.layouts import DeepSpeedLayout, StreamLayout
from outcore.sizing.shape import ModelShape
from outcore.sizing.states import MOMENT_BYTES, STATE_FORMATS
from outcore.sizing.streaming import CPU_PROCESS_BYTES

Layout = TypeVar("Layout", StreamLayout, DeepSpeedLayout)


@dataclass(frozen=True)
class Case(Generic[Layout]):
    """What is planned; every count of bytes and seconds starts from this."""

    shape: ModelShape
    request: RunRequest
    hardware: Hardware
    seq_length: int
    layout: Layout

    @property
    def element_bytes(self) -> int:
        """Bytes of a weight or activation as it is computed with."""
        return self.request.element_bytes

    @property
    def micro_tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.seq_length * self.layout.micro_batch

    @cached_property
    def muon(self) -> list[tuple[int, int]]:
        """Sides of each matrix that Muon updates; none with AdamW."""
        return self.shape.layer_matrices if self.request.optimizer == "muon" else []

    @property
    def muon_numel(self) -> int:
        """Parameters that Muon updates."""
        return sum(inner * outer for inner, outer in self.muon)

    @property
    def muon_bytes(self) -> int:
        """States of these: a master and a momentum, wherever they live."""
        return (STATE_FORMATS[self.request.format][0] + MOMENT_BYTES) * self.muon_numel

    @property
    def masks(self) -> bool:
        """Whether packed rows are attended to through masks."""
        return has_masks(self.layout.packed_attention, self.element_bytes)

    @property
    def attention_share(self) -> float:
        """Share of the rate of matrix products that attention reaches."""
        if self.masks:
            return k.MASKED_ATTENTION_SHARE
        return k.LONG_ATTENTION_SHARE * self.seq_length / (self.seq_length + k.ATTENTION_SLOW_TOKENS)

    def plan(self, parts: Iterable[Item], pinned_bytes: int, traffic: Traffic, **own: Any) -> Plan:
        """The forecast with these parts, of which `pinned_bytes` may be locked. `own`: what the engine decides."""
        shape, request, hardware, layout = self.shape, self.request, self.hardware, self.layout
        parts = tuple(part for part in parts if part.size_bytes > 0)

        def used(*tiers: str) -> int:
            return sum(part.size_bytes for part in parts if part.tier in tiers)

        plan = Plan(
            model=shape.name,
            params=shape.total_params,
            trainable_params=shape.trainable_params,
            machine=hardware.name,
            precision=request.precision,
            seq_length=self.seq_length,
            micro_batch=layout.micro_batch,
            accumulation=layout.accumulation,
            num_gpus=hardware.num_gpus,
            lora_r=shape.lora_r,
            lora_targets=shape.lora_targets,
            use_dora=shape.use_dora,
            modules_to_save=shape.modules_to_save,
            quantize=shape.quantize,
            is_published_packed=shape.is_published_packed,
            parts=parts,
            tiers=(
                TierUse("vram", used("vram"), hardware.vram_bytes),
                TierUse("pinned", used("pinned"), pinned_bytes),
                TierUse("ram", used("ram", "pinned"), hardware.ram_bytes),
                nvme_use(parts, hardware),
            ),
            drive_read_bytes_per_step=int(traffic.read_bytes),
            drive_written_bytes_per_step=int(traffic.written_bytes),
            drive_rated_write_bytes=hardware.rated_write_bytes,
            checkpoint_bytes=self.saved_bytes,
            compute_known=hardware.compute_tflops is not None,
            **own,
        )
        return without_gpu(plan, hardware) if hardware.is_cpu else plan

    @property
    def saved_bytes(self) -> int:
        """Bytes of a training checkpoint."""
        return (self.element_bytes + k.CHECKPOINT_STATE_BYTES) * self.shape.trainable_params

    @property
    def kept_checkpoints(self) -> list[Item]:
        """Checkpoints on the drive of the states: kept ones, and the one that is being written."""
        count = 0 if self.request.checkpoints_elsewhere else self.request.save_total_limit + 1
        return [Item("nvme", CHECKPOINTS, self.saved_bytes * count)]

    @cached_property
    def flops(self) -> Flops:
        """Arithmetic of a step on one GPU."""
        return step_flops(self.shape, self.request, self.seq_length, self.micro_tokens * self.layout.accumulation)

    @cached_property
    def device_bytes(self) -> tuple[float, float, float]:
        """Bytes that pass through the GPU's own memory in a step, (forward, head, backward)."""
        return device_bytes(self.shape, self.request, self.seq_length, self.micro_tokens, self.layout.accumulation)


DROPPED = (OVERHEAD, SPARE, COMMUNICATOR, "desktop reserve")
"""Parts of a GPU only."""


def without_gpu(plan: Plan, hardware: Hardware) -> Plan:
    """The plan with nothing in VRAM and nothing pinned."""
    sizes: Counter[tuple[str, str]] = Counter()  # what is partly pinned is one part here
    for part in plan.parts:
        if part.tier == "vram":
            if part.name not in DROPPED:
                sizes["ram", f"device: {part.name}"] += part.size_bytes
        elif part.tier in ("ram", "pinned"):
            sizes["ram", part.name] += CPU_PROCESS_BYTES if part.name == OVERHEAD else part.size_bytes
        else:
            sizes[part.tier, part.name] += part.size_bytes
    parts = [Item(tier, name, size) for (tier, name), size in sizes.items()]
    used = sum(part.size_bytes for part in parts if part.tier == "ram")
    tiers = (TierUse("vram", 0, 0), TierUse("pinned", 0, 0), TierUse("ram", used, hardware.ram_bytes))
    where = plan.offload.replace("all on the GPU", "all in RAM").replace("GPU", "RAM")
    return dataclasses.replace(plan, offload=where, parts=tuple(parts), tiers=(*tiers, plan.tier("nvme")))


CHECKPOINTS = "checkpoints"


def nvme_use(parts: Sequence[Item], hardware: Hardware) -> TierUse:
    """The drive's use with margins, against what is free without its reserve."""
    on_drive = [part for part in parts if part.tier == "nvme"]
    states = sum(part.size_bytes for part in on_drive if part.name != CHECKPOINTS)
    checkpoints = sum(part.size_bytes for part in on_drive if part.name == CHECKPOINTS)
    needed = int(SPACE_SAFETY * states) + checkpoints
    return TierUse("nvme", needed, int((1 - FREE_RESERVE) * hardware.nvme_free_bytes))


@dataclass(frozen=True)
class Spill:
    """Shares of each kind that live on the drive."""

    states: float = 0.0
    parameters: float = 0.0

    def words(self) -> str:
        """For people."""
        if self == Spill():
            return "all in RAM"
        named = (("states", self.states), ("parameters", self.parameters))
        whole = [what for what, share in named if share >= 1]
        if len(whole) == len(named):
            return "all on NVMe"
        parts = [f"{100 * share:.0f} % of {what}" for what, share in named if 0 < share < 1]
        return " and ".join([*whole, *parts]) + " on NVMe"

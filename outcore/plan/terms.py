"""Terms of both engines' forecasts: the case, its arithmetic, bytes moved, rates, spill.

Traffic of a step, counted without a rate, and its seconds: a machine's rates as far as an engine reaches them. How
passes overlap is each engine's own.

Cost of a step in arithmetic and in traffic through the device's own memory, shared by both engines.

One question to the planner: this model, run and machine, and one layout of an engine; what its plan becomes without
a GPU, and how much drive it needs.

Needed of the drive: parts that live there x 1.5, and the checkpoints (kept ones and the one being written). Usable:
what is free, less a fifth of it."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from outcore.common.quantities import GB
from outcore.machine.offload import FREE_RESERVE, SPACE_SAFETY
from outcore.plan import constants as k
from outcore.plan.hardware import Hardware
from outcore.plan.profile import RunRequest
from outcore.plan.record import COMMUNICATOR, OVERHEAD, SPARE, Item, Plan, StepTime, TierUse
from outcore.sizing.activations import chunk_tokens, has_masks
from outcore.sizing.layouts import DeepSpeedLayout, StreamLayout
from outcore.sizing.shape import ModelShape
from outcore.sizing.states import MOMENT_BYTES, STATE_FORMATS
from outcore.sizing.streaming import CPU_PROCESS_BYTES


@dataclass(frozen=True)
class PassSeconds:
    """One pass, each term as if it ran alone."""

    device_s: float
    host_s: float
    h2d_s: float
    d2h_s: float
    drive_s: float
    gpu_s: float
    """The longer of device and host, and what the GPU waits for."""


@dataclass(frozen=True)
class Rates(ABC):
    """One engine on one machine."""

    hardware: Hardware
    states: str
    """Format of the optimizer states."""
    drive_share: float
    """Share of the drive's rate that is reached."""
    attention_share: float = k.ATTENTION_SHARE
    slower: float = 1.0
    """Times that layers take as long as compiled ones."""
    pageable: float = 0.0
    """Share of homes that is not pinned."""

    @abstractmethod
    def seconds(self, traffic: Traffic) -> StepTime:
        """The step, with what overlaps."""

    def of(self, one: Pass) -> PassSeconds:
        """One pass by term."""
        hw = self.hardware
        h2d_rate, d2h_rate = (hw.with_copies(link, self.pageable) * GB for link in (hw.h2d_gb_per_s, hw.d2h_gb_per_s))
        device_s = self.slower * hw.compute_s(one.flops, one.device_bytes, one.attention_flops, self.attention_share)
        host_s, h2d_s = hw.host_s(one.launched_layers), one.h2d_bytes / h2d_rate
        gpu_s = max(device_s, host_s)
        if one.awaited_read_bytes is not None:
            gpu_s += max(h2d_s, hw.drive_s(one.awaited_read_bytes, 0.0))
        drive_s = hw.drive_s(one.read_bytes, one.written_bytes) / self.drive_share
        return PassSeconds(device_s, host_s, h2d_s, one.d2h_bytes / d2h_rate, drive_s, gpu_s)

    def cpu_s(self, *passes: Pass) -> float:
        """Updates and copies that share the RAM while these passes run."""
        ram_bytes = sum(one.ram_bytes for one in passes)
        params, copied = sum(one.updated_params for one in passes), sum(one.copied_bytes for one in passes)
        update_s = self.hardware.update_s(self.states, params, copied) if params or copied else 0.0
        return update_s + ram_bytes / (self.hardware.ram_gb_per_s * GB)


def overlapped_s(*terms_s: float) -> float:
    """Wall clock of terms that run at the same time: the longest, and a residue of the second longest."""
    first, second, *_ = [*sorted(terms_s, reverse=True), 0.0, 0.0]
    return first + k.OVERLAP_RESIDUE * second


@dataclass(frozen=True)
class Pass:
    """One way through the model, forward, backward or the update, on one GPU; bytes by direction."""

    flops: float = 0.0
    """Matrix products."""
    attention_flops: float = 0.0
    device_bytes: float = 0.0
    """Through the device's own memory, beside the operands of matrix products."""
    launched_layers: float = 0.0
    """Eager layers' worth of launches by the host."""
    h2d_bytes: float = 0.0
    d2h_bytes: float = 0.0
    read_bytes: float = 0.0
    """From the drive."""
    written_bytes: float = 0.0
    copied_bytes: float = 0.0
    """Copies through RAM beside an update's own."""
    updated_params: float = 0.0
    """Parameters that the CPU updates meanwhile."""
    ram_bytes: float = 0.0
    """An update's at the plain rate of RAM, where no measured one applies."""
    awaited_read_bytes: float | None = None
    """Weights from the drive that layers wait for, and for the link: nothing comes ahead of its use. None: it does."""


@dataclass(frozen=True)
class Traffic:
    """A step, pass by pass."""

    passes: tuple[Pass, ...]
    are_apart: bool = True
    """Whether each pass waits for the one before. Otherwise they overlap as if they were one."""
    between_layers: float = 0.0
    """Eager layers' worth of launches that no work of the GPU hides."""

    def sum(self, of: Callable[[Pass], float]) -> float:
        """Total of one figure."""
        return sum(of(one) for one in self.passes)

    @property
    def read_bytes(self) -> float:
        """All that the drive reads in a step."""
        return self.sum(lambda one: one.read_bytes)

    @property
    def written_bytes(self) -> float:
        """All that the drive writes in a step."""
        return self.sum(lambda one: one.written_bytes)


@dataclass(frozen=True)
class Flops:
    """FLOPs of one step on one GPU."""

    forward: float
    backward: float
    """Recomputation included."""
    attention_forward: float = 0.0
    attention_backward: float = 0.0
    """Scores and weighted values, counted as causal; not in the two above, since their kernels are slower."""

    @property
    def total(self) -> float:
        """Matrix products and attention."""
        return self.forward + self.backward + self.attention

    @property
    def attention(self) -> float:
        return self.attention_forward + self.attention_backward


def step_flops(shape: ModelShape, request: RunRequest, seq_length: int, tokens: int) -> Flops:
    """Arithmetic of a step over `tokens` tokens of this GPU.

    Forward: 2 FLOPs per active parameter and token, and causal attention 2 * seq * q per layer. Backward: twice that
    for full training, once with adapters only (no gradients of frozen weights); attention 2.5 times, because its
    kernels recompute the scores. Recomputation: the layers once more.
    """
    attention = tokens * 2.0 * seq_length * shape.num_heads * shape.head_dim * shape.num_layers
    if not shape.fused_attention:  # the whole square, also what the mask hides
        attention *= 2.0
    active = shape.active_layer_params / max(1, sum(shape.layer_params))
    layers = 2 * (shape.active_layer_params + active * shape.adapter_params)
    head = 2 * shape.head_weight_numel
    gradient_passes = 1 if shape.lora_r else 2
    again = 1 if request.activation_checkpointing else 0
    return Flops(
        forward=tokens * float(layers + head),
        backward=tokens * float(gradient_passes * (layers + head) + again * layers),
        attention_forward=attention,
        attention_backward=(k.ATTENTION_BACKWARD + again) * attention,
    )


def device_bytes(
    shape: ModelShape, request: RunRequest, seq_length: int, micro_tokens: int, micro_batches: int
) -> tuple[float, float, float]:
    """(forward, head, backward) bytes of one step that pass through the device's own memory beside the matrix products'
    operands; recomputation and the adding up of gradients are backward's, the loss is the head's.

    Of `micro_batches` micro-batches of `micro_tokens` tokens in rows of `seq_length`, with fused element-wise work.

    Per token and layer forward: 8h (norms, residuals), 4(q + kv) (rotation, attention's operands), 3f (gated) or 2f;
    backward three times that, recomputation included. Loss: LOSS_BYTES_PER_LOGIT. Gradients: each micro-batch (of the
    head: each chunk of the loss) is read and added to an fp32 sum, 10 B per trained parameter. Adapters: the input is
    read for the narrow product, the wide one's result is written, and added to the layer's, in + 4 out; backward 5 in +
    4 out, and recomputation. Derived from the products, not measured.
    """
    e, h, f = request.element_bytes, shape.hidden_size, shape.ffn_width
    heads = shape.num_heads + shape.num_kv_heads
    per_token = e * (8 * h + 4 * heads * shape.head_dim + (3 if shape.gated_ffn else 2) * f)
    if not shape.fused_attention:
        per_token += e * k.SCORE_PASSES * shape.num_heads * seq_length
    layers = float(per_token * shape.num_layers * micro_tokens * micro_batches)
    passes = (2 if request.activation_checkpointing else 1) + 1
    per_logit = k.LOSS_BYTES_PER_LOGIT + (k.CAPPED_BYTES_PER_LOGIT * e if shape.caps_logits else 0)
    logits = per_logit * shape.vocab_size * micro_tokens * micro_batches
    summed = 0.0
    if shape.lora_r:
        active = shape.active_layer_params / max(1, sum(shape.layer_params))
        inner, outer = (float(sum(pair[side] for pair in shape.layer_matrices)) for side in (0, 1))
        one = active * e * micro_tokens * micro_batches
        layers += one * (inner + 4 * outer)
        summed = one * (3 * inner - 4 * outer)  # beside twice the forward's, as of the layers
    else:
        chunks = -(-micro_tokens // chunk_tokens(shape, micro_tokens))
        layer_passes = micro_batches if micro_batches > 1 else 0
        summed = 10.0 * (sum(shape.layer_params) * layer_passes + shape.head_weight_numel * chunks * micro_batches)
    return layers, logits, passes * layers + summed


Layout = TypeVar("Layout", StreamLayout, DeepSpeedLayout)


@dataclass(frozen=True)
class Case(Generic[Layout]):
    """Model, run, machine and layout to plan: every count of bytes and seconds starts from this."""

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
        """Text for people: what of the states and parameters lives on the drive."""
        if self == Spill():
            return "all in RAM"
        named = (("states", self.states), ("parameters", self.parameters))
        whole = [what for what, share in named if share >= 1]
        if len(whole) == len(named):
            return "all on NVMe"
        parts = [f"{100 * share:.0f} % of {what}" for what, share in named if 0 < share < 1]
        return " and ".join([*whole, *parts]) + " on NVMe"

"""The answer: a `Plan` of named parts per tier, seconds by term, and what limits it. Frozen, plain values, to JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from outcore.common.quantities import GIB

TIERS = ("vram", "pinned", "ram", "nvme")
EVALUATION = "evaluation beyond a step"
RESERVES = ("desktop reserve", "page cache reserve", EVALUATION)
"""Parts that a plan leaves free: no measurement of a training step will find them."""
OVERHEAD, SPARE, COMMUNICATOR = "framework overhead", "allocator's spare memory", "NCCL's communicator"
"""Parts of a GPU's memory: what the driver counts and the allocator does not; what the allocator holds beyond its
tensors; buffers of DeepSpeed's collectives, which the driver counts, too."""
NOT_TENSORS = (OVERHEAD, SPARE, COMMUNICATOR, *RESERVES)
MASKS = "masks of packed rows"
BORDERS = "attention over packed rows"
STAYING = "layers that stay, with their states"
AHEAD = "master and moments of updates ahead of the norm"
NESTED = ("parts", "tiers", "time", "time_whole", "compute_known")
"""Fields that a plan's JSON has in another form."""
TIER_WORDS = {"vram": "VRAM", "pinned": "pinned RAM", "ram": "RAM", "nvme": "NVMe"}


@dataclass(frozen=True)
class Item:
    """Bytes of one thing in one tier."""

    tier: str
    name: str
    size_bytes: int


@dataclass(frozen=True)
class TierUse:
    """Use of a tier against its capacity."""

    tier: str
    used_bytes: int
    """RAM counts its pinned part in; NVMe counts the safety factor in."""
    capacity_bytes: int

    @property
    def short_bytes(self) -> int:
        """Bytes that are missing; 0 when it fits."""
        return max(0, self.used_bytes - self.capacity_bytes)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step by term, each as if it ran alone, and the step with their overlap."""

    compute_s: float
    h2d_s: float
    d2h_s: float
    drive_read_s: float
    drive_write_s: float
    cpu_optimizer_s: float
    """Update on the CPU, by its measured rate or by the bytes of RAM that it and the copies need; see `Hardware`."""
    host_overhead_s: float
    """Python and launches that no GPU work hides behind."""
    step_s: float
    """A forecast of the wall clock."""

    @property
    def terms_s(self) -> dict[str, float]:
        """The terms by name."""
        values = dataclasses.asdict(self)
        return {name: seconds for name, seconds in values.items() if name != "step_s"}

    def to_dict(self) -> dict[str, float]:
        """Plain JSON values."""
        return {**self.terms_s, "exposed_s": self.exposed_s, "step_s": self.step_s}

    @property
    def exposed_s(self) -> float:
        """Seconds that the overlap leaves on top of computing."""
        return max(0.0, self.step_s - self.compute_s)

    @property
    def longest(self) -> str:
        """The name of the longest term; reading and writing the drive count as one."""
        terms = self.terms_s
        drive_s = terms.pop("drive_read_s") + terms.pop("drive_write_s")
        return max({**terms, "drive_s": drive_s}.items(), key=lambda item: item[1])[0]


@dataclass(frozen=True)
class Plan:
    """One way to run a model on a machine."""

    model: str
    params: int
    trainable_params: int
    machine: str
    engine: str
    zero_stage: str
    offload: str
    """Homes of parameters and states live, in words."""
    state_format: str
    precision: str
    seq_length: int
    micro_batch: int
    accumulation: int
    num_gpus: int
    lora_r: int
    homes: dict[str, str]
    """State -> home in words ('RAM', 'RAM 40 % + NVMe 60 %')."""
    parts: tuple[Item, ...]
    tiers: tuple[TierUse, ...]
    time: StepTime
    drive_read_bytes_per_step: int
    drive_written_bytes_per_step: int
    drive_rated_write_bytes: int
    """0: the drive's size is not known."""
    checkpoint_bytes: int
    checkpoint_s: float
    notes: tuple[str, ...] = ()
    compute_known: bool = True
    time_whole: StepTime | None = None
    """A step that clips nothing and whose updates begin ahead of the norm; `time`: where all of them wait."""
    tiling: str = "auto"
    """Setting of the streaming engine; 'off' where its own decision would leave no room elsewhere."""
    staged: bool = False
    """DeepSpeed with outcore's staged offload."""
    ram_budget_bytes: int | None = None
    """Budget of the staged offload, where the plan rests on one."""
    lora_targets: tuple[str, ...] = ()
    use_dora: bool = False
    quantize: str = ""
    """Format of the frozen base; '': 16 or 32 bits."""
    is_published_packed: bool = False
    """The checkpoint has that format, so no flag asks for it."""
    modules_to_save: tuple[str, ...] = ()
    """Targets as in `ModelShape`."""

    @property
    def tokens_per_step(self) -> int:
        return self.seq_length * self.micro_batch * self.accumulation * self.num_gpus

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_step / self.time.step_s if self.time.step_s else float("inf")

    @property
    def fits(self) -> bool:
        return not self.short_tiers

    @property
    def short_tiers(self) -> tuple[TierUse, ...]:
        """Tiers that hold less than is needed."""
        return tuple(use for use in self.tiers if use.short_bytes)

    @property
    def shortage(self) -> float:
        """Distance from fitting: missing bytes as a share of what each tier has, summed; 0 when it fits."""
        return sum(use.short_bytes / max(use.capacity_bytes, 1) for use in self.tiers)

    def used_bytes(self, tier: str) -> int:
        """Sum of a tier's own parts."""
        return sum(part.size_bytes for part in self.parts if part.tier == tier)

    def part_bytes(self, tier: str, name: str) -> int:
        """Bytes of one part; 0 when there is none."""
        return sum(part.size_bytes for part in self.parts if (part.tier, part.name) == (tier, name))

    def expected_bytes(self, *tiers: str) -> int:
        """Count bytes that a measurement of the run should find in these tiers: their parts without reserves."""
        return sum(part.size_bytes for part in self.parts if part.tier in tiers and part.name not in RESERVES)

    @property
    def tensor_bytes(self) -> int:
        """Bytes that the allocator's peak should be."""
        return sum(part.size_bytes for part in self.parts if part.tier == "vram" and part.name not in NOT_TENSORS)

    def tier(self, tier: str) -> TierUse:
        """A tier's use against its capacity."""
        return next(use for use in self.tiers if use.tier == tier)

    @property
    def uses_drive(self) -> bool:
        """True when states live on the drive (checkpoints do not count)."""
        return self.drive_read_bytes_per_step + self.drive_written_bytes_per_step > 0

    @property
    def written_bytes_per_day(self) -> float:
        """Bytes written by training day and night, checkpoints not counted."""
        return self.drive_written_bytes_per_step * 86400 / self.time.step_s if self.time.step_s else 0.0

    @property
    def drive_life_steps(self) -> float | None:
        """Steps until the drive's rated writes are used up; None when nothing is written or the rating is unknown."""
        if not self.drive_written_bytes_per_step or not self.drive_rated_write_bytes:
            return None
        return self.drive_rated_write_bytes / self.drive_written_bytes_per_step

    @property
    def drive_life_days(self) -> float | None:
        """Days of training day and night until then."""
        steps = self.drive_life_steps
        return None if steps is None else steps * self.time.step_s / 86400

    @property
    def flags(self) -> str:
        """train_model.py's flags for this plan."""
        words = [f"--engine {self.engine}"]
        if self.engine == "deepspeed":
            words.append(f"--zero_stage {self.zero_stage}")
            home = {"VRAM": "none", "RAM": "cpu", "NVMe": "nvme"}
            if self.zero_stage == "infinity":
                words.append("--nvme_offload_path DIR")
                if self.homes["parameters"] == "RAM":
                    words.append("--nvme_offload_params false")
            elif self.zero_stage != "none":
                words.append(f"--offload_optimizer {home[self.homes['optimizer states']]}")
                if self.zero_stage == "zero3":
                    words.append(f"--offload_params {home[self.homes['parameters']]}")
        elif self.zero_stage == "infinity":
            words.append("--nvme_offload_path DIR")
        if self.engine == "stream" and self.tiling != "auto":
            words.append(f"--tiling {self.tiling}")
        if self.engine == "deepspeed" and self.homes["gradients"] == "NVMe":
            words.append("--nvme_offload_gradients true")
        if self.ram_budget_bytes is not None:
            words.append(f"--ram_budget_gib {self.ram_budget_bytes // GIB}")
        if (self.engine == "stream" or self.staged) and self.state_format != (
            "split" if self.precision == "bf16" else "fp32"
        ):
            words.append(f"--state_format {self.state_format}")
        if self.lora_r:
            words.append(f"--lora_r {self.lora_r}")
        if self.lora_r and self.lora_targets:
            words.append(f"--lora_target_modules {','.join(self.lora_targets)}")
        words += ["--use_dora"] * (self.lora_r > 0 and self.use_dora)
        if self.lora_r and self.modules_to_save:
            words.append(f"--lora_modules_to_save {','.join(self.modules_to_save)}")
        if self.quantize and not self.is_published_packed:
            words.append(f"--quantize {self.quantize}")
        words.append(f"--seq_length {self.seq_length} --per_device_train_batch_size {self.micro_batch}")
        words.append(f"--gradient_accumulation_steps {self.accumulation}")
        return " ".join(words)

    @property
    def title(self) -> str:
        """Engine, stage and offload in a few words."""
        if self.engine == "stream":
            return f"stream, {self.quantize + ' base, ' if self.quantize else ''}{self.offload}"
        return f"DeepSpeed {self.zero_stage}, {self.offload}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; byte counts by name."""
        by_tier = {tier: {p.name: p.size_bytes for p in self.parts if p.tier == tier} for tier in TIERS}
        lists = ("lora_targets", "modules_to_save", "notes")
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in NESTED}
        return {
            **plain,
            **{name: list(plain[name]) for name in lists},
            "quantize": self.quantize or None,
            "fits": self.fits,
            "forecast": True,
            **{f"{tier}_bytes": self.used_bytes(tier) for tier in TIERS},
            "expected_vram_bytes": self.expected_bytes("vram"),
            "expected_tensor_bytes": self.tensor_bytes,
            "staying_bytes": self.part_bytes("vram", STAYING),
            "expected_rss_bytes": self.expected_bytes("ram", "pinned"),
            "parts_bytes": by_tier,
            "tiers": {
                use.tier: {name: getattr(use, name) for name in ("used_bytes", "capacity_bytes", "short_bytes")}
                for use in self.tiers
            },
            "ahead_bytes": self.part_bytes("ram", AHEAD),
            "time_s": self.time.to_dict(),
            "time_whole_s": self.time_whole.to_dict() if self.time_whole else None,
            "step_is_lower_bound": not self.compute_known,
            "tokens_per_step": self.tokens_per_step,
            "tokens_per_s": self.tokens_per_s,
            "drive_written_bytes_per_day": self.written_bytes_per_day,
            "drive_life_steps": self.drive_life_steps,
            "drive_life_days": self.drive_life_days,
        }

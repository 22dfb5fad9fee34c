"""From what was said (flags over YAML over deepspeed_config.json) and what the process found to `RunSettings`.

The one place where a default is chosen, an overruled value noted, and a contradiction refused.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from outcore.common.quantities import ELEMENT_BYTES, GB, GIB
from outcore.config.checks import check_homes, check_range, check_state_format
from outcore.config.convert import ConfigError
from outcore.config.deepspeed_file import DeepSpeedFile
from outcore.config.fields import FIELDS, TrainConfig
from outcore.config.run_settings import AS_SAID, DEFAULTS, LOSS_SCALING, LossScaling, Offload, Precision, RunSettings
from outcore.sizing.engine_rule import BELOW_ZERO3
from outcore.sizing.streaming import SLOT_BYTES, STAGING_BYTES

DEFAULT_MICRO_BATCH, DEFAULT_ACCUMULATION = 2, 4
DEFAULT_MAX_IN_CPU_GB = 1.0
SECTOR_BYTES = 4096
"""Direct drive transfers take whole sectors."""
LORA_LR, FINE_TUNE_LR, SCRATCH_LR, TINY_LR = 2e-4, 2e-5, 3e-4, 2e-3
"""Usual peak learning rates: LoRA (Hu et al. 2021, table 12), full fine-tuning, pre-training of small models."""
UNSAID = (None, "auto")


@dataclass(frozen=True)
class ProcessFacts:
    """Facts that the process finds before it knows the model."""

    precision: Precision | None = None
    """Precision chosen for the device. None: the flag's, else the file's, else bf16."""
    world_size: int = 1
    ranks_per_host: int | None = None
    """Ranks of a host; None: all ranks are on one host."""


def is_tiny(config: TrainConfig) -> bool:
    """True for the presets that are made to be seen working, on two CPU cores."""
    named = config.model_name_or_path or config.config_file or config.model_module
    return not named and (config.preset or "tiny").startswith("tiny")


def recomputes(config: TrainConfig) -> bool:
    """Whether activations are recomputed in the backward pass."""
    if config.activation_checkpointing is not None:
        return config.activation_checkpointing
    return not is_tiny(config) and config.model_module is None


def resolve(config: TrainConfig, file: DeepSpeedFile, place: ProcessFacts) -> RunSettings:
    """Settle everything that needs no model. ConfigError for contradictions and for values out of range."""
    return _Resolver(config, file, place).settings()


class _Resolver:
    """Collects reasons, notes and warnings on the way."""

    def __init__(self, config: TrainConfig, file: DeepSpeedFile, place: ProcessFacts) -> None:
        self.said, self.file, self.place = config, file, place
        self.reasons: dict[str, str] = {}
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self.zero_stage = self._stage()
        self.config = self._merged()
        check_homes(self.config)

    def settings(self) -> RunSettings:
        precision = self._precision()
        micro, accumulation = self._batch()
        rate, why = _default_rate(self.said)
        states = self._state_format(precision)
        return RunSettings(
            precision=precision,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=accumulation,
            world_size=self.place.world_size,
            ranks_per_host=self.place.ranks_per_host or self.place.world_size,
            learning_rate=self._pick("learning_rate", rate, why),
            decay_all=self._decay_all(),
            max_grad_norm=self._pick("max_grad_norm", 1.0, "global norm; the usual choice for language models"),
            activation_checkpointing=recomputes(self.said),
            zero_stage=self.zero_stage,
            state_format=states,
            offload=self._offload(precision),
            staging_bytes=int(self._pick("staging_gib", STAGING_BYTES / GIB) * GIB),
            resident_bytes=_bytes_of(self.said.resident_gib),
            ahead_bytes=_bytes_of(self.said.ahead_gib),
            storage_block_bytes=self._in_sectors("storage_block_bytes", 8 << 20),
            lane_slot_bytes=self._in_sectors("lane_slot_bytes", SLOT_BYTES),
            packed_attention="auto" if self.said.attn_implementation == "auto" else "masks",
            cut_is_open=self._cut_is_open,
            loss_scaling=LossScaling(*(self._pick(name, default) for name, default in LOSS_SCALING.items())),
            file=self.file,
            reasons=self.reasons,
            notes=tuple(self.notes),
            warnings=tuple(self.warnings),
            **{name: self._pick(name, default) for name, default in DEFAULTS.items()},
            **{name: getattr(self.said, name) for name in AS_SAID},
        )

    # --- flags over the file

    def _stage(self) -> str:
        """The ZeRO stage by name: the flag, else residency nvme, else the file's, else zero3."""
        said, in_file = self.said.zero_stage, self.file.values.get("zero_stage")
        residency = self.said.residency or self.file.values.get("residency")
        if said is not None:
            if in_file is not None and {"infinity": "zero3"}.get(said, said) != in_file:
                self.notes.append(f"zero_stage = {said}: --zero_stage wins over {self.file.path}'s {in_file}")
            self.reasons["zero_stage"] = "--zero_stage"
            return said
        if residency == "nvme" and in_file in (None, "zero3"):
            self.reasons["zero_stage"] = "residency is nvme"
            return "infinity"
        if in_file is None:
            self.reasons["zero_stage"] = "neither flag nor file says; zero3 fits the largest models"
            return "zero3"
        self.reasons["zero_stage"] = f"{self.file.path}: zero_optimization.stage"
        return in_file

    def _merged(self) -> TrainConfig:
        """Take the file's values where flags and YAML say nothing; the file's homes count below infinity only, and
        where the stage has such homes."""
        changes: dict[str, Any] = {"zero_stage": self.zero_stage}
        for name, value in self.file.values.items():
            said = getattr(self.said, name)
            if name == "zero_stage" or value == "auto":
                continue
            key = self.file.keys[name]
            if said not in UNSAID:
                if value != said:
                    self.notes.append(f"{name} = {said}: --{name} wins over {self.file.path}'s {key} {value}")
                continue
            if name == "activations" and (self.said.engine or self.file.values.get("engine")) == "deepspeed":
                continue  # the key is DeepSpeed's own then
            if name in ("offload_optimizer", "offload_params") and not self._home_counts(name, value, key):
                continue
            changes[name] = value
            self.reasons[name] = f"{self.file.path}: {key}"
        return dataclasses.replace(self.said, **changes)

    def _home_counts(self, name: str, value: str, key: str) -> bool:
        """Whether the device in a block of the file means something for the run's stage."""
        if self.zero_stage == "infinity":
            on_nvme = self.said.nvme_offload_optimizer if name == "offload_optimizer" else self.said.nvme_offload_params
            return not on_nvme and value == "none"
        is_there = self.zero_stage == "zero3" or (name == "offload_optimizer" and self.zero_stage != "none")
        if not is_there and value != "none":
            why = "zero_stage is none" if name == "offload_optimizer" else "only ZeRO-3 offloads parameters"
            self.warnings.append(f"{key.rpartition('.')[0]} left out: {why}; zero_stage is {self.zero_stage}")
        return is_there

    def _pick(self, name: str, default: Any, why: str = "default") -> Any:
        """The merged value; the default, with its reason, where nobody says."""
        value = getattr(self.config, name)
        if value in UNSAID:
            self.reasons[name] = why
            return default
        self.reasons.setdefault(name, f"--{name}")
        check_range(FIELDS[name], value)
        return value

    def _in_sectors(self, name: str, default: int) -> int:
        value = self._pick(name, default)
        if value % SECTOR_BYTES:
            raise ConfigError(
                f"{self.file.keys.get(name, name)}: {name} {value} is not a multiple of {SECTOR_BYTES} bytes: direct "
                "drive transfers take whole sectors. Use a power of two such as 1048576."
            )
        return value

    # --- what needs more than one field

    def _decay_all(self) -> bool:
        """Whether norms and biases decay: as asked, as DeepSpeed does where its file gives the decay, else as HF's
        Trainer does."""
        if self.said.decay_all is not None:
            self.reasons["decay_all"] = "--decay_all"
            return self.said.decay_all
        is_of_file = self.said.weight_decay is None and "weight_decay" in self.file.values
        self.reasons["decay_all"] = (
            f"{self.file.path} gives the decay, and DeepSpeed has one for all"
            if is_of_file
            else "default, as HF Trainer"
        )
        return is_of_file

    def _precision(self) -> Precision:
        in_file: Precision | None = None
        if self.file.get("bf16.enabled"):
            in_file = "bf16"
        elif self.file.get("fp16.enabled"):
            in_file = "fp16"
        elif False in (self.file.get("bf16.enabled"), self.file.get("fp16.enabled")):
            in_file = "fp32"
        said = self.said.precision if self.said.precision != "auto" else None
        chosen = self.place.precision or said or in_file or "bf16"
        self.reasons["precision"] = "as asked" if said else "what the device has" if self.place.precision else "default"
        if in_file is not None and chosen != in_file:
            self.notes.append(f"precision {chosen} wins over the file's {in_file}")
        wanted = self.file.get("data_types.param_dtype")
        if wanted not in (None, chosen):
            raise ConfigError(
                f"{self.file.path}: data_types.param_dtype {wanted} contradicts the precision {chosen}. Remove it."
            )
        return chosen

    def _batch(self) -> tuple[int, int]:
        """(micro-batch, accumulation), whose product with the ranks is the file's train_batch_size where it has one."""
        total, world = self.file.get("train_batch_size"), self.place.world_size
        micro, accumulation = self.config.per_device_train_batch_size, self.config.gradient_accumulation_steps
        if self._cut_is_open:
            return self._open_batch(total)
        assert micro != "auto"
        flags = (self.said.per_device_train_batch_size, self.said.gradient_accumulation_steps)
        if total is not None and (micro is None or accumulation is None):
            known = micro or accumulation or DEFAULT_MICRO_BATCH
            if total % (known * world):
                raise ConfigError(
                    f"{self.file.path}: train_batch_size {total} cannot be split into whole micro-batches: it must be "
                    f"a multiple of {known} x {world} rank(s). Set train_micro_batch_size_per_gpu and "
                    "gradient_accumulation_steps instead."
                )
            rest, why = total // (known * world), f"train_batch_size {total} / ({known} x {world})"
            name = "gradient_accumulation_steps" if accumulation is None else "per_device_train_batch_size"
            micro, accumulation = (known, rest) if accumulation is None else (rest, accumulation)
            self.reasons[name] = why
        if micro is None:
            micro, self.reasons["per_device_train_batch_size"] = DEFAULT_MICRO_BATCH, "small enough for 8 GB GPUs"
        if accumulation is None:
            accumulation = DEFAULT_ACCUMULATION
            self.reasons["gradient_accumulation_steps"] = "pays the optimizer step once per 4 micro-batches"
        product = micro * accumulation * world
        if total is not None and total != product:
            if flags == (None, None):
                raise ConfigError(
                    f"{self.file.path}: train_batch_size {total} is not train_micro_batch_size_per_gpu {micro} x "
                    f"gradient_accumulation_steps {accumulation} x {world} rank(s) = {product}. Remove one of the "
                    "three."
                )
            self.warnings.append(
                f"train_batch_size changed from {total} to {product}: {micro} x {accumulation} x {world} rank(s)"
            )
        return micro, accumulation

    @property
    def _cut_is_open(self) -> bool:
        return self.said.per_device_train_batch_size == "auto"

    def _open_batch(self, total: int | None) -> tuple[int, int]:
        """The rows of a step in micro-batches of the usual size, until a forecast cuts them."""
        micro, accumulation = self.config.per_device_train_batch_size, self.config.gradient_accumulation_steps
        world, usual = self.place.world_size, DEFAULT_MICRO_BATCH if micro in UNSAID else int(micro or 0)
        if total is not None and self.said.gradient_accumulation_steps is None:
            if total % world:
                raise ConfigError(
                    f"{self.file.path}: train_batch_size {total} cannot be shared by {world} ranks. Set a multiple."
                )
            rows = total // world
        else:
            rows = usual * (accumulation or DEFAULT_ACCUMULATION)
        micro = max(n for n in range(1, usual + 1) if rows % n == 0)
        why = f"auto: {rows} rows of a step"
        self.reasons |= {"per_device_train_batch_size": why, "gradient_accumulation_steps": why}
        return micro, rows // micro

    def _state_format(self, precision: Precision) -> str:
        if self.config.state_format == "auto":
            self.reasons["state_format"] = f"the smallest exact one in {precision}"
            return "split" if precision == "bf16" else "fp32"
        self.reasons.setdefault("state_format", "--state_format")
        check_state_format(self.config.state_format, precision)
        return self.config.state_format

    def _offload(self, precision: Precision) -> Offload:
        config, stage = self.config, self.zero_stage
        residency: Literal["auto", "ram", "nvme"] = self._pick("residency", "auto")
        optimizer, params = self._home("offload_optimizer"), self._home("offload_params")
        path = config.nvme_offload_path or None
        may_spill = path is not None and residency == "auto" and stage not in BELOW_ZERO3
        asked_nvme = stage == "infinity" or "nvme" in (self.said.offload_optimizer, self.said.offload_params)
        if residency == "ram" and "nvme" in (optimizer, params) and not asked_nvme:
            raise ConfigError(
                f"{self.file.path}: outcore.residency ram contradicts the device nvme in zero_optimization. Set "
                "residency to auto or nvme, or the device to cpu."
            )
        if config.strict_offload and stage == "infinity" and path is None:
            raise ConfigError("strict_offload with zero_stage infinity needs --nvme_offload_path DIR.")
        paths = {self.file.get(f"zero_optimization.{key}.nvme_path") for key in ("offload_optimizer", "offload_param")}
        if len(paths - {None}) > 1 and self.said.nvme_offload_path is None:
            self.warnings.append(
                f"the nvme_path of offload_param and that of offload_optimizer differ; both are used as {path}"
            )
        return Offload(
            optimizer=optimizer,
            params=params,
            optimizer_may_spill=may_spill and self._is_open("offload_optimizer", self.said.nvme_offload_optimizer),
            params_may_spill=may_spill and self._is_open("offload_params", self.said.nvme_offload_params),
            gradients_on_nvme=self._pick("nvme_offload_gradients", False),
            residency=residency,
            everything=residency == "nvme" and self.said.zero_stage is None,
            nvme_path=path,
            path_is_asked=self.said.nvme_offload_path is not None,
            strict=self.said.strict_offload,
            ram_budget_gib=self._pick("ram_budget_gib", None, "what is available"),
            engine=self._pick("deepspeed_offload", "staged"),
            pin_memory=self._pick("pin_memory", True),
            pin_is_asked=self.said.pin_memory is not None,
            max_in_cpu_numel=self._max_in_cpu(precision),
            aio_block_size=self._in_sectors("aio_block_size", 1 << 20),
            aio_queue_depth=self._pick("aio_queue_depth", 8),
        )

    def _is_open(self, name: str, of_infinity: bool) -> bool:
        """Whether a drive that is named may take it although nobody said nvme."""
        return getattr(self.said, name) in ("auto", "nvme") and (self.zero_stage != "infinity" or of_infinity)

    def _home(self, name: str) -> Any:
        """Home where optimizer states or parameters are to live."""
        chosen = getattr(self.config, name)
        if self.zero_stage == "infinity":
            on_nvme = self.said.nvme_offload_optimizer if name == "offload_optimizer" else self.said.nvme_offload_params
            return "nvme" if on_nvme else "cpu" if chosen == "auto" else chosen
        if chosen != "auto":
            self.reasons.setdefault(name, f"--{name}")
            return chosen
        if self.zero_stage == "zero3":
            self.reasons[name] = "RAM, the default of zero3: it fits larger models than the GPU's memory"
            return "cpu"
        return "none"

    def _max_in_cpu(self, precision: Precision) -> int:
        in_file = self.file.get("zero_optimization.offload_param.max_in_cpu")
        if self.said.max_in_cpu_gb is None and in_file is not None:
            return int(in_file)
        gb = DEFAULT_MAX_IN_CPU_GB if self.said.max_in_cpu_gb is None else self.said.max_in_cpu_gb
        return int(gb * GB) // ELEMENT_BYTES[precision]


def _default_rate(config: TrainConfig) -> tuple[float, str]:
    """Peak learning rate when neither flag nor file names one, and why."""
    if config.lora_r:
        return LORA_LR, "usual for LoRA"
    if config.model_name_or_path:
        return FINE_TUNE_LR, "usual for fine-tuning"
    return (TINY_LR, "a tiny preset's") if is_tiny(config) else (SCRATCH_LR, "usual from scratch")


def _bytes_of(gib: float | None) -> int | None:
    return None if gib is None else int(gib * GIB)

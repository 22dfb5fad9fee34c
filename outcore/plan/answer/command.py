"""The command that makes a plan a run: pasted, it plans to the same values."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from outcore.common.words import own_command
from outcore.config import FIELDS, TrainConfig
from outcore.plan.profile import RunRequest
from outcore.plan.record import Plan

PLANNED = {
    "model_name_or_path", "preset", "config_file", "random_base", "trust_remote_code", "seq_length", "dataset",
    "precision",
    "per_device_train_batch_size", "gradient_accumulation_steps", "max_grad_norm", "activation_checkpointing",
    "lora_r", "lora_target_modules", "use_dora", "lora_modules_to_save", "quantize", "save_total_limit", "plan",
}  # fmt: skip
"""Settings that the plan, or `Said` by a field of its own, spells out."""
ENGINE_GROUP = FIELDS["engine"].group
"""Settings of where bytes live and how they move: those the plan decides."""
KEPT = {
    "residency",
    "staging_gib", "storage_engine", "storage_threads", "storage_block_bytes", "nvme_checksums", "strict_offload",
    "fit_check", "initial_scale_power", "loss_scale_window", "loss_scale_hysteresis", "min_loss_scale",
}  # fmt: skip
"""Settings of that group which no plan decides; where bytes shall live, it follows."""
TAKEN = {"engine", "zero_stage", "state_format", "ram_budget_gib", "nvme_offload_path", "deepspeed_config"}
"""Settings of that group within which the plan is made."""


@dataclass(frozen=True)
class Said:
    """Settings that the user gave and a plan does not carry."""

    source: str
    """Setting that names the model: model_name_or_path, preset or config_file."""
    model: str
    dataset: tuple[str, ...] = ()
    nvme_path: str | None = None
    trust_remote_code: bool = False
    settings: str = ""
    """Flags of all else."""
    has_adapters: bool = False
    """Whether adapters are trained, which need a trained model below them."""

    @property
    def model_flags(self) -> str:
        """train_model.py's flags for the model; of adapters they name the published one of a preset."""
        from outcore.model import PRESETS

        published = PRESETS[self.model].published if self.source == "preset" else None
        if published and self.has_adapters:
            return f"--model_name_or_path {published}"
        flags = f"--{self.source} {shlex.quote(self.model)}" + " --trust_remote_code" * self.trust_remote_code
        return flags + " --random_base" * (self.has_adapters and self.source != "model_name_or_path")


def kept(config: TrainConfig) -> str:
    """Flags of the settings that the user gave and no plan decides: the optimizer, learning rate, data, logs."""
    words = []
    for name, field in FIELDS.items():
        value = getattr(config, name)
        decided = name in PLANNED or (field.group == ENGINE_GROUP and name not in KEPT)
        if not decided and value != field.default:
            words.append(f"--{name} {shlex.quote(str(value).lower() if isinstance(value, bool) else str(value))}")
    return " ".join(words)


def check_undecided(config: TrainConfig) -> None:
    """ValueError for a setting that is the plan's to choose and that it would not follow."""
    for name, field in FIELDS.items():
        decided = field.group == ENGINE_GROUP and name not in KEPT | TAKEN
        if decided and getattr(config, name) != field.default:
            raise ValueError(
                f"{name}: outcore plan chooses this itself; a run with --{name} is planned by "
                f"{own_command('train')} --plan with the same flags."
            )


def command(plan: Plan, request: RunRequest, said: Said) -> str:
    """The whole command line, everything that train_model.py would choose otherwise spelt out."""
    words = [own_command("train", plan.num_gpus), said.model_flags]
    words += [f"--dataset {shlex.quote(source)}" for source in said.dataset]
    flags = plan.flags
    if said.nvme_path is not None:
        flags = flags.replace("--nvme_offload_path DIR", f"--nvme_offload_path {shlex.quote(said.nvme_path)}")
    words += [flags, f"--precision {plan.precision}", f"--max_grad_norm {request.max_grad_norm:g}"]
    words.append(f"--activation_checkpointing {str(request.activation_checkpointing).lower()}")
    if request.save_total_limit != RunRequest.save_total_limit:
        words.append(f"--save_total_limit {request.save_total_limit}")
    words += [said.settings] * bool(said.settings)
    return " ".join(words)


def notes(request: RunRequest, said: Said) -> list[str]:
    """List what must be set elsewhere for the command to be this plan, and what weights the run begins with."""
    from outcore.model import PRESETS

    found = []
    if request.checkpoints_elsewhere:
        found.append("checkpoints were planned on another drive: add --checkpoint_dir with a folder there")
    if "--model_name_or_path" not in said.model_flags:
        preset = PRESETS.get(said.model)
        of_shape = f": --model_name_or_path {preset.published}" if preset and preset.published else ""
        found.append(
            f"{said.model} is a shape: the run begins with random weights"
            + (", over which adapters learn little" if said.has_adapters else "")
            + f"; name a trained model to begin with that{of_shape}"
        )
    return found

"""Optimization: fields of the settings; each docstring is the text of `--help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outcore.config.spec import setting

Precision = Literal["auto", "bf16", "fp16", "fp32"]
Schedule = Literal["warmup_decay", "cosine", "cosine_with_min_lr", "constant", "constant_with_warmup", "wsd"]
SCHEDULE_WORDS = {
    "linear": "warmup_decay",
    "warmup_stable_decay": "wsd",
    "WarmupDecayLR": "warmup_decay",
    "WarmupCosineLR": "cosine",
    "WarmupLR": "constant_with_warmup",
}


@dataclass(frozen=True)
class OptimizationFields:
    """Optimization."""

    per_device_train_batch_size: int | Literal["auto"] | None = setting(
        None,
        aliases=("micro_batch_size", "batch_size", "train_batch_size"),
        file=("train_micro_batch_size_per_gpu",),
        above=0,
        common=True,
    )
    """Micro-batch per GPU. Default: deepspeed_config.json's (2). auto: the rows of a step stay what the default makes
    them (or train_batch_size) and are cut as the forecast is fastest, within the GPU's memory."""
    per_device_eval_batch_size: int | None = setting(None, above=0, aliases=("eval_batch_size",))
    """Micro-batch of evaluation. Default: the training micro-batch."""
    gradient_accumulation_steps: int | None = setting(
        None, file=("gradient_accumulation_steps",), above=0, common=True, aliases=("grad_accum",)
    )
    """Micro-batches per optimizer step and GPU. Default: deepspeed_config.json's (4)."""
    optimizer: Literal["adamw", "muon"] = setting("adamw", aliases=("optim",))
    """muon: torch's Muon for the layers' matrices (a momentum alone; Newton-Schulz on the GPU), AdamW for all
    else, at one learning rate."""
    learning_rate: float | None = setting(None, aliases=("lr",), file=("optimizer.params.lr",), above=0, common=True)
    """Peak learning rate. Default: deepspeed_config.json's optimizer block, else 3e-4 from scratch (2e-3 for the
    tiny presets), 2e-5 for fine-tuning, 2e-4 for LoRA."""
    weight_decay: float | None = setting(None, file=("optimizer.params.weight_decay",), least=0)
    """AdamW's decoupled weight decay, of all trained parameters but norms and biases (decay_all). Default 0.01."""
    decay_all: bool | None = None
    """Decay norms and biases, too. Default: no, as HF Trainer; yes where deepspeed_config.json gives weight_decay."""
    adam_beta1: float | None = setting(None, file=("optimizer.params.betas.0",), least=0, below=1, aliases=("beta1",))
    """AdamW's beta1. Default 0.9."""
    adam_beta2: float | None = setting(None, file=("optimizer.params.betas.1",), least=0, below=1)
    """AdamW's beta2. Default 0.999."""
    adam_epsilon: float | None = setting(None, file=("optimizer.params.eps",), above=0)
    """AdamW's epsilon. Default 1e-8."""
    max_grad_norm: float | None = setting(None, file=("gradient_clipping",), least=0, aliases=("gradient_clipping",))
    """Clip the global gradient norm at this value; 0 turns clipping off. Default 1.0."""
    lr_scheduler_type: Schedule | None = setting(
        None, file=("scheduler.type",), words=SCHEDULE_WORDS, aliases=("lr_scheduler",)
    )
    """warmup_decay (linear; the default), cosine, constant_with_warmup, wsd (stays, then falls over the last tenth):
    each after a warm-up, down to 0 or min_lr_ratio. cosine_with_min_lr: to a tenth. constant: no warm-up by default."""
    min_lr_ratio: float | None = setting(None, aliases=("min_lr_rate",), least=0, most=1)
    """Share of the peak at which the schedule ends. Default 0; cosine_with_min_lr: 0.1."""
    lr_decay_ratio: float | None = setting(None, above=0, most=1)
    """Schedule wsd: share of the run in which the rate falls, at its end. Default 0.1."""
    warmup_ratio: float | None = setting(None, least=0, below=1)
    """Warm-up as a share of the run, instead of warmup_steps."""
    warmup_steps: int | None = setting(None, file=("scheduler.params.warmup_num_steps",), least=0)
    """Steps of linear warm-up, from a rate of 0 on. Default: 3 % of the run, at most 100."""
    max_steps: int = setting(-1, least=-1, common=True)
    """Optimizer steps; overrides num_train_epochs. The embedded default runs 150."""
    num_train_epochs: float = setting(1.0, above=0, common=True, aliases=("epochs", "num_epochs"))
    """Passes over the data when max_steps is not given."""
    precision: Precision = setting("auto", common=True)
    """Compute precision; auto: bf16 where the GPU (or CPU) has it, else fp16 with loss scaling, else fp32."""
    activation_checkpointing: bool | None = setting(None, aliases=("gradient_checkpointing",))
    """Recompute activations in the backward pass instead of keeping them. Default: on, but for the tiny presets
    and models of your own."""
    label_smoothing: float = setting(0.0, aliases=("label_smoothing_factor",), least=0, below=1)
    """Share of each target's probability that is spread over the vocabulary, in training and evaluation."""
    neftune_noise_alpha: float | None = setting(None, above=0)
    """NEFTune: uniform noise on the embeddings in training, of at most this / sqrt(tokens x width of a row)."""
    seed: int = setting(42, least=0, most=2**63 - 1)
    """Seeds weights, data order and dropout."""
    deterministic: bool = False
    """Bit-identical repeats on a GPU as well (slower); on a CPU they always are."""

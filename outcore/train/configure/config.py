"""The one training configuration: a frozen, typed dataclass; a docstring under each field is its `--help`.

Sources, weakest first: the defaults here, the YAML file of `--config`, flags. Names are Hugging Face's where
Hugging Face has one. `None` means "not said": the value then comes from deepspeed_config.json or is derived,
and the run prints what was chosen and why. All cross-checks are in `check_config`, so that wrong input fails
before any download, build or file is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["auto", "bf16", "fp16", "fp32"]
ZeroStage = Literal["none", "zero1", "zero2", "zero3", "infinity"]
Schedule = Literal["warmup_decay", "cosine", "constant"]
StateFormat = Literal["auto", "fp32", "split", "fp32_m8", "split8", "fp24_m8"]

ZERO_STAGE_ALIASES = {"0": "none", "1": "zero1", "2": "zero2", "3": "zero3", "linear": "warmup_decay"}
BARE_FLAGS = {"trace": "2"}
"""Flags that may stand alone, with what they mean then."""
SCHEDULE_ALIASES = {"linear": "warmup_decay", "WarmupDecayLR": "warmup_decay", "WarmupCosineLR": "cosine"}
FIELD_ALIASES = {
    "gradient_checkpointing": "activation_checkpointing",
    "max_seq_length": "seq_length",
    "max_length": "seq_length",
    "micro_batch_size": "per_device_train_batch_size",
    "model": "model_name_or_path",
    "lr": "learning_rate",
}
"""Other tools' names for our fields; accepted in YAML and as flags."""


@dataclass(frozen=True)
class TrainConfig:
    """Everything that defines a training run."""

    # --- model
    model_name_or_path: str | None = None
    """Hub id or local folder of a Hugging Face model to fine-tune."""
    preset: str | None = None
    """Train from scratch with a built-in shape: tiny (the default), llama-1b, llama-8b, qwen3-8b, gpt2, t5-small ..."""
    config_file: str | None = None
    """Train from scratch with the shape of this Hugging Face config.json."""
    model_module: str | None = None
    """Your own model and loss: `my.py:build` (see docs/models.md)."""
    tokenizer_name_or_path: str | None = None
    """Tokenizer, when it is not the model's own. From scratch the default is a byte-level BPE trained on the data."""
    trust_remote_code: bool = False
    """Run Python code that a hub repository ships. Off unless you ask for it."""
    attn_implementation: str = "auto"
    """Attention of transformers: auto (sdpa, or eager where a model lacks it), sdpa, eager, flash_attention_2."""
    seq_length: int | None = None
    """Tokens per training row. Default: 256 for tiny, else the smaller of 1024 and what the model can take."""

    # --- data
    dataset: str = "embedded"
    """A .txt, .jsonl, .json, .csv or .parquet file, a folder of text, a hub id, or `embedded` (Python's own source)."""
    dataset_config: str | None = None
    """Configuration name of a hub dataset."""
    dataset_split: str = "train"
    """Split of a hub dataset."""
    eval_dataset: str | None = None
    """Separate evaluation data; otherwise `eval_fraction` of the documents is held out."""
    eval_fraction: float = 0.05
    """Share of documents held out for evaluation when there is no eval_dataset."""
    data_format: Literal["auto", "text", "prompt_completion", "alpaca", "sharegpt", "messages"] = "auto"
    """Shape of the rows; auto tells them apart."""
    text_extensions: str | None = None
    """Comma-separated: which files are text. Default: .txt,.text,.md,.rst."""
    text_column: str | None = None
    """Column that holds the text."""
    prompt_column: str | None = None
    """Column that holds the prompt."""
    completion_column: str | None = None
    """Column that holds the completion."""
    messages_column: str | None = None
    """Column that holds the list of messages."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Pack several documents in a row, isolated from each other in attention and positions."""
    streaming: Literal["auto", "on", "off"] = "auto"
    """Tokenize without holding the data in RAM."""
    on_bad_row: Literal["error", "skip"] = "error"
    """A malformed row stops the run, or is skipped and counted."""
    train_on_prompt: bool = False
    """Take the loss on prompt tokens as well."""
    max_train_samples: int | None = None
    """Use at most this many training documents."""
    max_eval_samples: int | None = None
    """Use at most this many evaluation rows."""
    data_cache_dir: str = ".cache/data"
    """Where tokenized data is kept between runs."""

    # --- optimization
    per_device_train_batch_size: int | None = None
    """Micro-batch per GPU. Default: deepspeed_config.json's (2)."""
    per_device_eval_batch_size: int | None = None
    """Micro-batch of evaluation. Default: the training micro-batch."""
    gradient_accumulation_steps: int | None = None
    """Micro-batches per optimizer step and GPU. Default: deepspeed_config.json's (4)."""
    learning_rate: float | None = None
    """Peak learning rate. Default: deepspeed_config.json's optimizer block, else 3e-4 from scratch (2e-3 for the
    tiny presets), 2e-5 for fine-tuning, 2e-4 for LoRA."""
    weight_decay: float | None = None
    """AdamW's decoupled weight decay. Default 0.01."""
    adam_beta1: float | None = None
    """AdamW's beta1. Default 0.9."""
    adam_beta2: float | None = None
    """AdamW's beta2. Default 0.999."""
    adam_epsilon: float | None = None
    """AdamW's epsilon. Default 1e-8."""
    max_grad_norm: float | None = None
    """Clip the global gradient norm at this value; 0 turns clipping off. Default 1.0."""
    lr_scheduler_type: Schedule | None = None
    """warmup_decay (linear warm-up, linear decay to 0), cosine, or constant. Default warmup_decay."""
    warmup_steps: int | None = None
    """Steps of linear warm-up. Default: 3 % of the run, at most 100."""
    max_steps: int = -1
    """Optimizer steps; overrides num_train_epochs. The embedded default runs 150."""
    num_train_epochs: float = 1.0
    """Passes over the data when max_steps is not given."""
    precision: Precision = "auto"
    """Compute precision; auto: bf16 where the GPU (or CPU) has it, else fp16 with loss scaling, else fp32."""
    activation_checkpointing: bool | None = None
    """Recompute activations in the backward pass instead of keeping them. Default: on, but for the tiny presets
    and models of your own."""
    seed: int = 42
    """Seeds weights, data order and dropout."""
    deterministic: bool = False
    """Bit-identical repeats on a GPU as well (slower); on a CPU they always are."""

    # --- LoRA
    lora_r: int = 0
    """Rank of LoRA adapters; 0 trains all weights."""
    lora_alpha: int | None = None
    """LoRA scale. Default: 2 x lora_r."""
    lora_dropout: float = 0.0
    """Dropout on the adapters' input."""
    lora_target_modules: str = "auto"
    """Comma-separated module names; auto: every linear layer but the head."""
    lora_export: Literal["merged", "adapter"] = "merged"
    """Export the merged model, or the adapter alone."""

    # --- evaluation, logging, checkpoints
    run_name: str | None = None
    """Name of the run's folders. Default: <model>-<data>, with a number when that run exists."""
    eval_steps: int | None = None
    """Evaluate every so many steps; 0 only at the end. Default: a fifth of the run."""
    sample_steps: int | None = None
    """Write a sample every so many steps; 0 only at the end. Default: as eval_steps."""
    sample_prompt: str | None = None
    """Prompt of the samples. Default: "def "."""
    sample_tokens: int = 48
    """Tokens of a sample; 0: no samples."""
    logging_steps: int = 1
    """Print a line every so many steps; metrics.jsonl has every step."""
    save_steps: int | None = None
    """Save a checkpoint every so many steps; 0 only at the end. Default: a fifth of the run."""
    save_strategy: Literal["steps", "no"] = "steps"
    """no: never write a checkpoint, not even at the end or when stopped (for measurements)."""
    save_total_limit: int = 2
    """Keep this many checkpoints; the newest complete one is never removed."""
    resume_from_checkpoint: str | None = None
    """`auto` or a checkpoint folder. auto: the complete checkpoint of the run that was saved, or gone back to, last;
    what it left behind by going back to an earlier one does not count, whatever its step."""
    checkpoint_dir: str = "checkpoints"
    """Where checkpoints go: <checkpoint_dir>/<run>/step-00000123."""
    log_dir: str = "logs"
    """Where metrics.jsonl, loss.png, plan.json and TensorBoard files go: <log_dir>/<run>."""
    export_dir: str = "final_model"
    """Where the finished model goes: <export_dir>/<run>."""
    report_to: str = "tensorboard"
    """Comma-separated: tensorboard, trackio, wandb, none."""
    metrics_port: int | None = None
    """Serve the run's figures for Prometheus on this port of the loopback interface (0: any free one)."""
    plan: bool = False
    """Print the forecast for this run on this machine and stop: exit code 0 when it fits, 1 when it does not. No
    weights are loaded, nothing is trained."""
    trace: int = 0
    """Record a timeline of this many steps (alone: 2), after two of warm-up, as <log_dir>/<run>/trace.json."""
    export: bool = True
    """Write the finished model at the end."""

    # --- engine and offload
    engine: Literal["auto", "stream", "deepspeed"] | None = None
    """Who moves the bytes: auto streams a decoder-only model on one process and says why where it does not.
    Default: deepspeed_config.json's outcore block (auto)."""
    state_format: StateFormat = "auto"
    """Offloaded optimizer states, with either engine: as fp32, or split (bf16 only: the same numbers in 10 B a
    parameter instead of 12), or with 8-bit moments as fp32_m8 or split8 (other numerics), or with a master of 24 bits
    beside those, too, as fp24_m8 (bf16 only). auto: split with bf16, else fp32."""
    ram_budget_gib: float | None = None
    """GiB of RAM for parameters, gradients and optimizer states; what does not fit goes to the NVMe path. Default: what
    is available now, less 3 GiB (DeepSpeed's engine: 2 GiB, and it counts the whole process)."""
    activations: Literal["auto", "device", "ram", "nvme"] = "auto"
    """Engine stream: where activation checkpoints wait for their backward; auto: in RAM beside a GPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Engine stream: layers through torch.compile; auto: on a GPU, where the model allows it."""
    tiling: Literal["auto", "on", "off"] = "auto"
    """Engine stream: layers and heads computed in tiles; auto: those that do not fit on the GPU whole."""
    tile_bytes: int | None = None
    """Engine stream: bytes of one tile of a weight. Default: up to 64 MiB, by the GPU's memory."""
    deepspeed_config: str = "deepspeed_config.json"
    """The DeepSpeed configuration file."""
    zero_stage: ZeroStage | None = None
    """none, zero1, zero2, zero3 or infinity (0/1/2/3 accepted). Default: deepspeed_config.json's (3)."""
    nvme_offload_path: str | None = None
    """Folder on an NVMe drive for what RAM does not hold."""
    nvme_offload_optimizer: bool = True
    """With infinity: optimizer states on NVMe."""
    nvme_offload_params: bool = True
    """With infinity: parameters on NVMe."""
    nvme_offload_gradients: bool = False
    """DeepSpeed with the optimizer on NVMe: gradients on NVMe too. Slower; saves 2 B of RAM per parameter."""
    offload_optimizer: Literal["auto", "none", "cpu", "nvme"] = "auto"
    """Where optimizer states live below infinity; auto: deepspeed_config.json's, RAM for zero3."""
    offload_params: Literal["auto", "none", "cpu", "nvme"] = "auto"
    """Where parameters live below infinity; auto: deepspeed_config.json's, RAM for zero3."""
    aio_block_size: int = 1048576
    """DeepSpeed's own NVMe offload: bytes per drive request."""
    aio_queue_depth: int = 8
    """DeepSpeed's own NVMe offload: drive requests in flight."""
    pin_memory: bool = True
    """Pinned staging buffers."""
    max_in_cpu_gb: float = 1.0
    """DeepSpeed with parameters on NVMe: GB of them kept in RAM."""
    strict_offload: bool = False
    """An unusable NVMe path is an error; otherwise the run falls back to RAM and says so."""
    local_rank: int = -1
    """Set by the deepspeed launcher."""

"""Of each setting of a run another value than its default, and beside what it matters."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

LORA = {"lora_r": 4}
CHAT = {"dataset": "{chat}"}
QUESTIONS = {"dataset": "{questions}", "packing": "off"}
RISING = {"eval_steps": 1, "learning_rate": 1.0, "max_steps": 4}
DEEPSPEED = {"engine": "deepspeed"}
STAGED = {**DEEPSPEED, "zero_stage": "infinity", "nvme_offload_path": "/mnt/a"}
INFINITY = {**STAGED, "deepspeed_offload": "stock"}
FP16 = {"precision": "fp16"}


class Flip(NamedTuple):
    """A value that is not the default, and other settings that both runs have."""

    value: Any
    beside: Mapping[str, Any] = MappingProxyType({})


TOLD = {
    "attn_implementation": Flip("eager"),
    "optimizer": Flip("muon"),
    "weight_decay": Flip(0.25),
    "decay_all": Flip(True),
    "adam_beta1": Flip(0.8),
    "adam_beta2": Flip(0.9),
    "adam_epsilon": Flip(1e-3),
    "max_grad_norm": Flip(0.25),
    "precision": Flip("fp32"),
    "per_device_train_batch_size": Flip(3, DEEPSPEED),
    "gradient_accumulation_steps": Flip(3, DEEPSPEED),
    "seed": Flip(7),
    "engine": Flip("deepspeed"),
    "state_format": Flip("fp32_m8"),
    "ram_budget_gib": Flip(8),
    "staging_gib": Flip(2.5),
    "residency": Flip("nvme", {"nvme_offload_path": "/mnt/a"}),
    "write_combined": Flip("on"),
    "storage_engine": Flip("posix"),
    "storage_threads": Flip(7),
    "storage_block_bytes": Flip(8192),
    "transfer_path": Flip("kvikio"),
    "lane_slots": Flip(7),
    "lane_slot_bytes": Flip(8192),
    "grad_accum_dtype": Flip("bf16"),
    "activations": Flip("ram"),
    "matmul": Flip("float8_rowwise"),
    "compile": Flip("off"),
    "tiling": Flip("tokens"),
    "tile_bytes": Flip(4096),
    "resident_gib": Flip(0),
    "ahead_gib": Flip(0),
    "zero_stage": Flip("zero2"),
    "nvme_offload_path": Flip("/mnt/a", {"ram_budget_gib": 8}),
    "nvme_offload_optimizer": Flip(False, INFINITY),
    "nvme_offload_params": Flip(False, INFINITY),
    "nvme_offload_gradients": Flip(True, STAGED),
    "nvme_checksums": Flip("off"),
    "offload_optimizer": Flip("none", DEEPSPEED),
    "offload_params": Flip("none", DEEPSPEED),
    "initial_scale_power": Flip(7, FP16),
    "loss_scale_window": Flip(7, FP16),
    "loss_scale_hysteresis": Flip(7, FP16),
    "min_loss_scale": Flip(0.25, FP16),
    "deepspeed_offload": Flip("stock", STAGED),
    "aio_block_size": Flip(8192, INFINITY),
    "aio_queue_depth": Flip(7, INFINITY),
    "pin_memory": Flip(False, DEEPSPEED),
    "max_in_cpu_gb": Flip(0, INFINITY),
    "strict_offload": Flip(True, {"zero_stage": "infinity"}),
}
"""Those that an engine is told."""

RUN = {
    "model_name_or_path": Flip("{base}"),
    "preset": Flip("tiny-moe"),
    "config_file": Flip("{base}/config.json"),
    "config_overrides": Flip('{"num_hidden_layers": 2}'),
    "model_module": Flip("examples/my_model.py:build"),
    "tokenizer_name_or_path": Flip("{base}"),
    "trust_remote_code": Flip(True, {"model_name_or_path": "{own_code}"}),
    "train_vision": Flip("none"),
    "router_loss": Flip("micro_batch", {"preset": "tiny-moe"}),
    "seq_length": Flip(16),
    "method": Flip("dpo"),
    "beta": Flip(0.25),
    "teacher": Flip("{base}"),
    "dataset": Flip("{chat}"),
    "dataset_config": Flip("other", {"dataset": "nobody/nothing"}),
    "dataset_split": Flip("other", {"dataset": "nobody/nothing"}),
    "eval_dataset": Flip("{questions}", QUESTIONS),
    "eval_fraction": Flip(0.25),
    "data_format": Flip("text", CHAT),
    "text_extensions": Flip(".log"),
    "text_column": Flip("answer", {"dataset": "{columns}"}),
    "prompt_column": Flip("question", {"dataset": "{columns}", "completion_column": "answer"}),
    "completion_column": Flip("answer", {"dataset": "{columns}", "prompt_column": "question"}),
    "messages_column": Flip("talk", {"dataset": "{columns}"}),
    "chat_template": Flip("{template}", CHAT),
    "packing": Flip("off", {"dataset": "{questions}"}),
    "group_by_length": Flip(True, QUESTIONS),
    "on_bad_row": Flip("skip", {"dataset": "{bad}"}),
    "long_rows": Flip("drop", CHAT),
    "as_chat": Flip(True, QUESTIONS),
    "train_on_prompt": Flip(True, QUESTIONS),
    "train_on_last_turn": Flip(True, CHAT),
    "max_train_samples": Flip(3),
    "max_eval_samples": Flip(3),
    "data_cache_dir": Flip("{root}/elsewhere"),
    "per_device_eval_batch_size": Flip(1),
    "learning_rate": Flip(0.25),
    "lr_scheduler_type": Flip("cosine"),
    "min_lr_ratio": Flip(0.25),
    "lr_decay_ratio": Flip(1.0, {"lr_scheduler_type": "wsd"}),
    "warmup_ratio": Flip(0.9),
    "warmup_steps": Flip(2),
    "max_steps": Flip(2),
    "num_train_epochs": Flip(0.5, {"max_steps": -1, "max_train_samples": 16}),
    "label_smoothing": Flip(0.25),
    "neftune_noise_alpha": Flip(0.25),
    "deterministic": Flip(True),
    "lora_r": Flip(4),
    "lora_alpha": Flip(16, LORA),
    "lora_dropout": Flip(0.25, LORA),
    "lora_target_modules": Flip("q_proj", LORA),
    "lora_modules_to_save": Flip("embed_tokens", LORA),
    "random_base": Flip(True, {**LORA, "random_base": False}),
    "use_dora": Flip(True, LORA),
    "use_rslora": Flip(True, LORA),
    "init_lora_weights": Flip("gaussian", LORA),
    "quantize": Flip("nf4", LORA),
    "base_hash": Flip("whole", {**LORA, "model_name_or_path": "{base}"}),
    "lora_export": Flip("adapter", LORA),
    "run_name": Flip("other"),
    "eval_steps": Flip(1),
    "sample_steps": Flip(1),
    "sample_prompt": Flip("jumps"),
    "sample_tokens": Flip(2),
    "logging_steps": Flip(1),
    "save_steps": Flip(1),
    "save_strategy": Flip("no"),
    "eval_strategy": Flip("no"),
    "save_total_limit": Flip(1),
    "load_best_model_at_end": Flip(True, {"eval_steps": 1, "save_steps": 0}),
    "metric_for_best_model": Flip("loss", {"eval_steps": 1, "load_best_model_at_end": True}),
    "early_stopping_patience": Flip(1, RISING),
    "early_stopping_threshold": Flip(9.0, {"eval_steps": 1, "early_stopping_patience": 1}),
    "resume_from_checkpoint": Flip("{saved}"),
    "continue_with_changes": Flip(True, {"resume_from_checkpoint": "{saved}", "learning_rate": 0.25}),
    "checkpoint_dir": Flip("{root}/elsewhere"),
    "log_dir": Flip("{root}/elsewhere"),
    "export_dir": Flip("{root}/elsewhere"),
    "report_to": Flip("tensorboard"),
    "metrics_port": Flip(0),
    "plan": Flip(True),
    "trace": Flip(1),
    "export": Flip(False),
    "push_to_hub": Flip("a/b"),
    "deepspeed_config": Flip("config/deepspeed_zero2.json"),
}
"""Those that only a run shows."""

ELSEWHERE = {
    "streaming": "data/test_tokenizer_hub.py",
    "activation_checkpointing": "plan/test_deepspeed.py",
    "fit_check": "train/test_fit_check.py",
    "local_rank": "train/test_run.py",
}
"""Those that need a hub, a larger model, a smaller machine or several ranks -> the file of tests that has it."""

"""Names of settings in Hugging Face's Trainer, TRL, axolotl or LLaMA-Factory -> what they are called here.

Names that mean the same are accepted as they are (`Spec.aliases`); here stand those that need other words: two settings
in one, a setting with another unit, or something that this program does by itself or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from outcore.common.words import own_command

MEANINGS: Mapping[str, str] = MappingProxyType({
    # precision
    "bf16": "--precision bf16",
    "fp16": "--precision fp16",
    "fp32": "--precision fp32",
    "pure_bf16": "--precision bf16 --state_format split8",
    "tf32": "leave it out: matrix products of fp32 weights follow torch's own setting",
    **dict.fromkeys(("torch_dtype", "dtype"), "--precision bf16 (or fp16, fp32)"),
    # quantization
    "load_in_4bit": "--quantize nf4, with --lora_r 16",
    "load_in_8bit": "--quantize int8, with --lora_r 16",
    "quantization_bit": "--quantize nf4 or int8, with --lora_r 16",
    "qlora": "--lora_r 16 --quantize nf4",
    # LoRA
    **dict.fromkeys(("use_peft", "use_lora", "r"), "--lora_r 16"),
    "finetuning_type": "--lora_r 16 for adapters; without it all weights are trained",
    "adapter": "--lora_r 16 to train one, --lora_export adapter to export it alone",
    **dict.fromkeys(("adapter_name_or_path", "lora_model_dir"), "--resume_from_checkpoint with that run's checkpoint"),
    "lora_target_linear": "--lora_target_modules auto",
    **dict.fromkeys(("merge", "merge_adapter", "merge_lora"), "--lora_export merged (the default); or outcore export"),
    # what is run
    "do_train": "leave it out: every run trains; evaluation: --eval_dataset, or the documents that are held out",
    "do_eval": "leave it out: every run evaluates; on other data: --eval_dataset FILE",
    "do_predict": "--sample_prompt TEXT shows what the model writes during the run",
    "stage": "leave it out: a model is trained on text, prompts with answers, or chats, as the data is",
    "output_dir": "--run_name NAME; the folders: --checkpoint_dir, --log_dir, --export_dir",
    "overwrite_output_dir": "leave it out: no run writes into another; choose another --run_name",
    "logging_dir": "--log_dir DIR",
    "deepspeed": "--deepspeed_config FILE",
    "fsdp": "leave it out: --engine and --zero_stage say how a model is spread",
    "accelerator_config": f"leave it out: {own_command('train', 'N')}",
    # data
    "train_file": "--dataset FILE",
    "validation_file": "--eval_dataset FILE",
    "dataset_dir": "--dataset DIR",
    **dict.fromkeys(("val_set_size", "test_size", "val_size"), "--eval_fraction 0.05"),
    "template": "leave it out: the tokenizer's own chat template is used",
    "train_sampling_strategy": "--group_by_length for rows of like length together; order is random otherwise",
    "sample_packing": "--packing on",
    "pad_to_sequence_len": "leave it out: rows that are packed are full",
    "completion_only_loss": "leave it out: loss is on the answers; on all of it: --train_on_prompt",
    "assistant_only_loss": "leave it out: loss is on the answers; on all of it: --train_on_prompt",
    "train_on_inputs": "--train_on_prompt",
    "remove_unused_columns": "leave it out: columns that are not needed are not read",
    "dataloader_num_workers": "leave it out: rows are tokenized once, before the run, and read from the drive",
    "dataloader_pin_memory": "--pin_memory",
    "preprocessing_num_workers": "leave it out: rows are tokenized once and kept in --data_cache_dir",
    # what this program does by itself
    **dict.fromkeys(("flash_attn", "flash_attention"), "--attn_implementation flash_attention_2"),
    "use_liger_kernel": "leave it out: the loss is computed in chunks here",
    "use_unsloth": "leave it out: --compile on compiles the layers",
    "torch_compile": "--compile on",
    "auto_find_batch_size": "leave it out: outcore plan NAME chooses the micro-batch",
    "gradient_checkpointing_kwargs": "leave it out: --activation_checkpointing is all there is to set",
    "ddp_timeout": "leave it out",
    "save_safetensors": "leave it out: nothing else is written",
    "save_only_model": "--save_strategy no, and the finished model is exported all the same",
    "greater_is_better": "leave it out: lower is better for every --metric_for_best_model",
    "lr_scheduler_kwargs": "--min_lr_ratio, --lr_decay_ratio",
    "min_lr": "--min_lr_ratio, a share of the peak",
    "wandb_project": "--report_to wandb, and WANDB_PROJECT in the environment",
    "use_wandb": "--report_to wandb",
    "saved_gib": "leave it out: backward computes every layer again, which was faster than keeping forwards on the GPU",
    "plot_loss": "leave it out: logs/<run>/loss.png is always drawn",
})  # fmt: skip
"""Spelling, without its dashes -> what to write instead."""


def meaning_of(word: str) -> str:
    """A hint for a setting that is called otherwise here; '' for one that nobody knows."""
    words = MEANINGS.get(word.lstrip("-").replace("-", "_").removeprefix("no_"))
    return f" Here: {words}." if words else ""

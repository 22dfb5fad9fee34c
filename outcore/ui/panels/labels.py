"""Labels of fields, in words; the name that flags and routes use stands beneath."""

LABELS = {
    "model_name_or_path": "Model to teach",
    "preset": "Or a new model of a known shape",
    "seq_length": "Length of a row, tokens",
    "dataset": "Data",
    "eval_dataset": "Data to evaluate with",
    "per_device_train_batch_size": "Rows at a time on each GPU",
    "per_device_eval_batch_size": "Rows at a time in evaluation",
    "gradient_accumulation_steps": "Times that before each step",
    "max_steps": "Steps",
    "num_train_epochs": "Passes over the data",
    "lora_r": "Rank of the adapters",
    "quantize": "Keep the base in 4 or 8 bits",
    "run_name": "Name of the run",
    "max_grad_norm": "Largest gradient norm",
    "lr_scheduler_type": "Learning rate's schedule",
    "save_steps": "Steps between checkpoints",
    "save_total_limit": "Checkpoints to keep",
    "load_best_model_at_end": "Export the best model",
    "resume_from_checkpoint": "Go on from a checkpoint",
    "checkpoint_dir": "Folder of checkpoints",
    "report_to": "Trackers",
    "zero_stage": "What is shared out or offloaded (ZeRO)",
    "nvme_offload_path": "Folder on the drive",
    "state_format": "Format of optimizer states",
    "ram_budget_gib": "RAM for the run, GiB",
    "pin_memory": "Page-locked RAM",
    "tensor_parallel": "GPUs that share each layer",
    "pipeline_parallel": "Stages of layers",
    "context": "Context, tokens",
    "max_sequences": "Answers at a time",
    "kv_gib": "Room for keys and values, GiB",
    "kv_home": "Home of keys and values",
    "kv_format": "Format of keys and values",
    "nvme_path": "Folder for weights on a drive",
    "max_tokens": "Longest answer, tokens",
}
"""Fields that are met first, and those whose names say little."""
KINDS = "a folder, a GGUF file or a hub id, such as Qwen/Qwen3-4B"
"""Text for people: what can name a model."""
WORDS = {
    "adam": "Adam", "aio": "AIO", "cpu": "CPU", "deepspeed": "DeepSpeed", "dora": "DoRA", "eval": "evaluation",
    "gb": "GB", "gib": "GiB", "init": "initial", "k": "K", "lora": "LoRA", "lr": "learning rate", "max": "most",
    "min": "least", "neftune": "NEFTune", "num": "number of", "nvme": "NVMe", "ram": "RAM", "rslora": "rsLoRA",
    "vram": "VRAM",
}  # fmt: skip


def label_of(name: str) -> str:
    """A field's name in words."""
    words = " ".join(WORDS.get(word, word) for word in name.split("_"))
    return LABELS.get(name) or words[0].upper() + words[1:]


def info_of(name: str, words: str) -> str:
    """Write the line beneath a field: what it does, then its name. Help is our own text, so its Markdown counts."""
    return f"{KINDS if name == 'model_name_or_path' else words} `{name}`"

"""LoRA of a model of any size with TRL: python examples/hf/sft.py Qwen/Qwen3-8B rows.jsonl"""

import sys

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from outcore.hf import OutcoreConfig

model, rows = sys.argv[1:]
trainer = SFTTrainer(
    model,
    args=SFTConfig(model_init_kwargs={"quantization_config": OutcoreConfig(vram_gib=6.5, base="nf4")}, max_steps=100),
    train_dataset=load_dataset("json", data_files=rows, split="train"),
    peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model()

"""DPO with adapters, the reference being the same streamed base: python examples/hf/dpo.py Qwen/Qwen3-8B pairs.jsonl"""

import sys

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer

import outcore.hf

name, pairs = sys.argv[1:]
model = outcore.hf.stream(AutoModelForCausalLM.from_pretrained(name, dtype="auto"), vram_gib=6.5)
trainer = DPOTrainer(
    model,
    args=DPOConfig(max_steps=100),
    train_dataset=load_dataset("json", data_files=pairs, split="train"),
    processing_class=AutoTokenizer.from_pretrained(name),
    peft_config=LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"),
)
trainer.train()
trainer.save_model()

"""All weights in 16 bits, masters and moments in RAM: python examples/hf/full.py Qwen/Qwen3-1.7B rows.jsonl"""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import outcore.hf

name, rows = sys.argv[1:]
model = outcore.hf.stream(AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16), vram_gib=6.5)
trainer = SFTTrainer(
    model,
    args=SFTConfig(max_grad_norm=0, max_steps=100),  # the optimizer clips, by the exact norm
    train_dataset=load_dataset("json", data_files=rows, split="train"),
    processing_class=AutoTokenizer.from_pretrained(name),
    optimizers=(outcore.hf.optimizer(model, lr=1e-5, max_grad_norm=1.0), None),
)
trainer.train()
trainer.save_model()

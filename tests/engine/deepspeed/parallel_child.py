"""A rank that trains a tiny Llama by a file of `config/` as a script of one's own does: DeepSpeed alone, on the CPU.

Usage: python parallel_child.py FILE (RANK, WORLD_SIZE and MASTER_PORT in the environment); prints LOSSES [...]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

STEPS = 3


def main(path: Path) -> None:
    torch.set_num_threads(1)
    config = json.loads(path.read_text())
    # The CPU optimizer is torch's here: DeepSpeed's needs a compiler.
    config["optimizer"]["params"] |= {"lr": 1e-3, "torch_adam": True}
    config["zero_force_ds_cpu_optimizer"] = False
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, max_position_embeddings=64,
    ))  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, config=config)
    losses = []
    accumulation = config["gradient_accumulation_steps"]
    for number in range(STEPS * accumulation):
        ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(number % accumulation))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    assert engine.global_steps == STEPS and engine.zero_optimization_stage() == 3
    print("LOSSES", json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Runs in a child process with the CPU accelerator: DeepSpeed's own parser over configurations, and real training of
some.

Usage: python dsconfig_child.py WORK_DIR. Reads WORK_DIR/jobs.json, writes WORK_DIR/results.json.
"""

import gc
import json
import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from outcore.common.os_layer import remove_own_buffer


class Block(torch.nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, inner)
        self.down = torch.nn.Linear(inner, width)

    def forward(self, hidden_BTD: torch.Tensor) -> torch.Tensor:
        return hidden_BTD + self.down(torch.nn.functional.gelu(self.up(self.norm(hidden_BTD))))


class Net(torch.nn.Module):
    """Activation checkpointing as in real runs."""

    def __init__(self, vocab: int, width: int, inner: int, tied: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, width)
        self.blocks = torch.nn.ModuleList(Block(width, inner) for _ in range(2))
        self.head = torch.nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids_BT) * 0.1
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.training else block(hidden)
        return torch.nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), labels_BT.flatten())


def train(config: dict, model: dict, steps: int) -> dict:
    import deepspeed

    torch.manual_seed(0)
    partitioned = config["zero_optimization"]["stage"] == 3
    with deepspeed.zero.Init(config_dict_or_path=config) if partitioned else nullcontext():
        net = Net(**model)
    parameters: Any = list(net.parameters())
    engine, *_ = deepspeed.initialize(model=net, config=config, model_parameters=parameters)
    generator = torch.Generator().manual_seed(1)
    losses: list[float] = []
    ids = loss = torch.empty(0)
    for step in range(steps):
        for _ in range(config["gradient_accumulation_steps"]):
            shape = (config["train_micro_batch_size_per_gpu"], 16)
            ids = torch.randint(0, model["vocab"], shape, generator=generator)
            loss = engine(ids, ids.roll(1, 1))
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
        if step == 0:
            engine.eval()
            with torch.no_grad():
                losses.append(engine(ids, ids).item())
            engine.train()
    engine.destroy()
    gc.collect()
    return {"losses": losses, "global_steps": engine.global_steps}


def main(work_dir: Path) -> None:
    import deepspeed
    from deepspeed.runtime import config as ds_config
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )
    from deepspeed.utils import logger

    logger.setLevel(logging.ERROR)
    torch.set_num_threads(2)
    jobs = json.loads((work_dir / "jobs.json").read_text())
    results: dict = {"parsed": {}, "trained": {}}
    models = {
        "zero_optimization": DeepSpeedZeroConfig, "offload_param": DeepSpeedZeroOffloadParamConfig,
        "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig, "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
    }  # fmt: skip
    results["keys"] = {
        name: sorted({f.alias or field for field, f in cls.model_fields.items()} | set(cls.model_fields))
        for name, cls in models.items()
    }
    results["removed"] = sorted(ds_config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    results["removed_zero"] = sorted(ds_config._REMOVED_ZERO_CONFIG_KEYS)
    for name, config in jobs["parse"].items():
        try:
            parsed = ds_config.DeepSpeedConfig(config)
            results["parsed"][name] = {
                "train_batch_size": parsed.train_batch_size, "stage": int(parsed.zero_config.stage),
            }  # fmt: skip
        except Exception as error:  # the test shows it
            results["parsed"][name] = {"error": f"{type(error).__name__}: {error}"}
    deepspeed.init_distributed("gloo")
    remove_own_buffer(0)
    for name, job in jobs["train"].items():
        try:
            results["trained"][name] = train(job["config"], job["model"], job["steps"])
        except Exception as error:  # the test shows it
            results["trained"][name] = {"error": f"{type(error).__name__}: {error}"}
    (work_dir / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Child of `stream_race.py`: stock DeepSpeed on one variant, given as JSON. See there.

`where`: cpu (states and parameters in RAM), optimizer-nvme (states on the drive). `chunked_loss`: ours, in
chunks of tokens, in place of transformers' own, which holds the logits of the whole micro-batch.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from race_common import (
    DeviceWatch,
    cap_allocator,
    config_of,
    drive_bytes,
    finish,
    free_port,
    synchronize,
    token_batches,
)


def deepspeed_config(options: dict[str, Any]) -> dict[str, Any]:
    """Stock settings: those of the sweep over good general values."""
    zero = {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": int(5e7),
        "sub_group_size": int(options.get("sub_group", 1e8)),
        "stage3_prefetch_bucket_size": int(options.get("prefetch", 5e7)),
        "stage3_param_persistence_threshold": int(1e5),
        "stage3_max_live_parameters": int(options.get("live", 3e8)),
        "stage3_max_reuse_distance": int(options.get("live", 3e8)),
        "offload_optimizer": {
            "device": "cpu" if options["where"] == "cpu" else "nvme",
            "pin_memory": True,
            "nvme_path": options.get("nvme") or "",
            "buffer_count": 12,
            "pipeline_read": True,
            "pipeline_write": True,
        },
        "offload_param": {
            "device": "cpu",
            "pin_memory": True,
            "nvme_path": options.get("nvme") or "",
            "buffer_count": 24,
            "buffer_size": options["largest_numel"] + 4096,
            "max_in_cpu": int(1e8),
        },
    }
    return {
        "train_micro_batch_size_per_gpu": options["mb"],
        "gradient_accumulation_steps": options["gas"],
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": float(options["clip"]),
        "zero_optimization": zero,
        "aio": {
            "block_size": 1 << 20,
            "queue_depth": 32,
            "intra_op_parallelism": 8,
            "single_submit": False,
            "overlap_events": True,
        },
        "steps_per_print": 10**9,
    }


def stock(options: dict[str, Any]) -> Any:
    """A function that makes one step and returns its loss."""
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    os.environ.update({name: os.environ.get(name, value) for name, value in one.items()})
    import deepspeed
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    config = config_of(options["shape"], options["seq"])
    options["largest_numel"] = max(config.vocab_size, config.intermediate_size) * config.hidden_size
    settings = deepspeed_config(options)
    deepspeed.init_distributed()
    keep = HfDeepSpeedConfig(settings)  # must live until the model is made
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = AutoModelForCausalLM.from_config(config)
    del keep
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    module = model
    if options.get("chunked_loss"):
        from outcore.model.loss import LossModule, TokenLoss

        module = LossModule(model, TokenLoss(model, chunked=True))
    engine, *_ = deepspeed.initialize(model=module, model_parameters=model.parameters(), config=settings)
    batches = token_batches(options, "cuda")
    num_targets = float(options["mb"] * (options["seq"] - 1))

    def step() -> float:
        total = 0.0
        for batch in batches:
            loss = engine(**batch).loss if module is model else engine(batch, num_targets)[0]
            engine.backward(loss)
            engine.step()
            total = total + loss.detach()
        return float(total) / len(batches)

    return step


def main() -> None:
    """Warm up, then time steps."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    watch = DeviceWatch()
    cap_allocator(options.get("cap_gib", 0))
    step = stock(options)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    watch.restart()
    for _ in range(options["warm"]):
        step()
    synchronize()
    repeats, losses = [], []
    before = drive_bytes(options.get("nvme"))
    for _ in range(options["repeats"]):
        start_s = time.perf_counter()
        for _ in range(options["steps"]):
            losses.append(step())
        synchronize()
        repeats.append((time.perf_counter() - start_s) / options["steps"])
    after = drive_bytes(options.get("nvme"))
    n_steps = options["steps"] * options["repeats"]
    finish(
        {
            "step_s": sorted(repeats)[len(repeats) // 2],
            "repeats_s": repeats,
            "losses": losses,
            "peak_vram_bytes": watch.stop(),
            "drive_bytes_per_step": {k: (after[k] - before[k]) / n_steps for k in after} if before and after else None,
        }
    )
    os._exit(0)  # DeepSpeed's threads and process group have nothing left to do


if __name__ == "__main__":
    main()

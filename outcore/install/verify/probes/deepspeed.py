"""Trials of DeepSpeed: its built extensions load and work, and one ZeRO-3 step equals torch's own AdamW step."""

from __future__ import annotations

import os
from typing import Any

from outcore.common.ports import free_port
from outcore.install.verify.probes.recorder import ProbeRecorder


def check_deepspeed(recorder: ProbeRecorder, accelerator: str, built: list[str]) -> None:
    """Load what is built, then one optimizer step."""
    has_adam = "cpu_adam" in built and recorder.try_part("cpu_adam", lambda: _load_extension("CPUAdamBuilder"))
    if "deepspeed_shm_comm" in built:
        recorder.try_part("deepspeed_shm_comm", lambda: _load_extension("ShareMemCommBuilder"))
    if accelerator != "cpu" or "deepspeed_shm_comm" in built:
        recorder.try_part("deepspeed", lambda: _zero3_step(accelerator, has_adam))
    else:  # it would start compiling by itself
        recorder.try_part("deepspeed", _refuse_uncompiled)


def _refuse_uncompiled() -> str:
    raise RuntimeError("its CPU collectives (deepspeed_shm_comm) are not built")


def _load_extension(builder_name: str) -> str:
    _builder(builder_name).load(verbose=False)
    return "built, loads"


def _zero3_step(accelerator: str, has_adam: bool) -> str:
    """One AdamW step under ZeRO-3 must give what torch's own AdamW gives."""
    import torch

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone, MASTER_PORT=str(free_port()))
    import deepspeed

    from outcore.common.os_layer import remove_own_buffer

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    reference = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 1))
    reference.load_state_dict(model.state_dict())
    inputs = torch.randn(4, 8)
    settings = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {**settings, **({} if has_adam else {"torch_adam": True})}},
        "zero_optimization": {"stage": 3, **({"offload_optimizer": {"device": "cpu"}} if has_adam else {})},
    }
    start: Any = deepspeed.initialize  # its annotations say less than it takes
    engine, *_ = start(model=model, model_parameters=model.parameters(), config=config)
    remove_own_buffer(0)
    loss = engine(inputs.to(engine.device)).square().mean()
    engine.backward(loss)
    engine.step()
    optimizer = torch.optim.AdamW(reference.parameters(), **settings)
    reference(inputs).square().mean().backward()
    optimizer.step()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        pairs = zip(engine.module.parameters(), reference.parameters(), strict=True)
        worst = max((a.detach().float().cpu() - b.detach()).abs().max().item() for a, b in pairs)
    torch.distributed.destroy_process_group()
    if not worst < 1e-3:  # lr is 1e-2: a wrong or missing step is off by about that
        raise RuntimeError(f"one ZeRO-3 step differs from torch's AdamW by {worst:.1e}")
    where = "with the optimizer in RAM" if has_adam else "without offload"
    return f"{deepspeed.__version__}, one ZeRO-3 step on {accelerator} {where}, {worst:.0e} from torch's AdamW"


def build(builder_name: str) -> None:
    """Build and load one extension; raises what DeepSpeed's builder raises."""
    _builder(builder_name).load(verbose=True)


def _builder(name: str) -> Any:
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    builder = accelerator.create_op_builder(name)
    if builder is None:
        raise RuntimeError(f"DeepSpeed has no {name} for the {accelerator.device_name()} accelerator")
    return builder

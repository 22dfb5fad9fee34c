"""Child of `stream_race.py`: systems a user would pick instead, on one variant given as JSON. See there.

`system`, all with AdamW over every parameter and layers recomputed in the backward pass:

    zero2        DeepSpeed ZeRO-2, 16-bit weights on the GPU, optimizer in RAM (`offload_optimizer`)
    zero2-bf16   zero2 with masters and moments in bf16: not exact, the peer of our 8-bit moments
    zero3        DeepSpeed ZeRO-3, weights on the GPU, optimizer in RAM
    fsdp2        torch's fully_shard with CPUOffloadPolicy: fp32 weights, gradients and states in RAM
    torchao      CPUOffloadOptimizer over bf16 weights without masters: not exact; it cannot clip
    trainstream  TrainStream's wrap(): fp32 states in RAM, weights as its planner places them
    roundpipe    RoundPipe, exact (each step waits for its update); `stale`: as it comes, one step stale

`compile`: each layer compiled. `chunked`: cross-entropy in chunks of 2,048 tokens, so that the logits of a micro-batch
are never whole. Every rival gets the cuts of the tokens and the allocator that make it fastest; `stream_race.py`
(--group rivals) names the sweep. Packages beside torch: deepspeed, torchao, trainstream, roundpipe (requirements of
the race only).
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from race_common import (
    DeviceWatch,
    cap_allocator,
    config_of,
    finish,
    free_port,
    rss_bytes,
    synchronize,
    token_batches,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

CHUNK_TOKENS = 2048
Step = Callable[[], float]


def filled_model(options: dict[str, Any], dtype: torch.dtype, device: str) -> Any:
    """The shape with random weights, made tensor by tensor so that the GPU never holds more than one."""
    from transformers import LlamaForCausalLM

    config = config_of(options["shape"], options["seq"])
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    model = model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    fill_device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            value = torch.ones(()) if p.dim() == 1 else torch.randn(p.shape, device=fill_device, dtype=dtype) * 0.02
            p.copy_(value)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


def _chunk_loss(hidden: Tensor, labels: Tensor, head: nn.Module) -> Tensor:
    return F.cross_entropy(head(hidden).float(), labels, reduction="sum")


class Loss(nn.Module):
    """Mean cross-entropy of a causal LM, its logits whole or in chunks that are recomputed in the backward pass."""

    def __init__(self, model: Any, chunked: bool) -> None:
        super().__init__()
        self.model, self.chunked = model, chunked

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:  # both [B, T]
        if not self.chunked:
            return self.model(input_ids=input_ids, labels=labels).loss
        hidden = self.model.model(input_ids=input_ids).last_hidden_state[:, :-1].flatten(0, 1)
        targets = labels[:, 1:].flatten()
        total = hidden.new_zeros((), dtype=torch.float32)
        for start in range(0, len(targets), CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            total = total + checkpoint(
                _chunk_loss, hidden[part], targets[part], self.model.lm_head, use_reentrant=False
            )
        return total / len(targets)


def compile_layers(model: Any, options: dict[str, Any]) -> None:
    """Each layer compiled in place, where asked for."""
    if options.get("compile"):
        for layer in model.model.layers:
            layer.compile()


def one_process() -> None:
    """This process as the only rank."""
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "127.0.0.1")):
        os.environ[name] = str(value)
    os.environ["MASTER_PORT"] = free_port()


def zero(options: dict[str, Any], device: str) -> Step:
    """DeepSpeed with weights on the GPU and the optimizer in RAM."""
    one_process()
    import deepspeed

    system = options["system"]
    stage = 3 if system == "zero3" else 2
    section: dict[str, Any] = {
        "stage": stage,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": int(5e7),
        "offload_optimizer": {"device": "cpu", "pin_memory": device == "cuda"},
    }
    if stage == 3:
        section |= {"sub_group_size": int(3e7), "stage3_param_persistence_threshold": int(1e5)}
    bf16: dict[str, Any] = {"enabled": True}
    if system == "zero2-bf16":
        bf16 |= {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    settings = {
        "train_micro_batch_size_per_gpu": options["mb"],
        "gradient_accumulation_steps": options["gas"],
        "bf16": bf16,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": float(options["clip"]),
        "zero_optimization": section,
        "steps_per_print": 10**9,
    }
    deepspeed.init_distributed()
    model = filled_model(options, torch.bfloat16, device)
    compile_layers(model, options)
    loss_of = Loss(model, options["chunked"])
    engine, *_ = deepspeed.initialize(model=loss_of, model_parameters=list(model.parameters()), config=settings)
    batches = token_batches(options, device)

    def step() -> float:
        total = 0.0
        for batch in batches:
            loss = engine(**batch)
            engine.backward(loss)
            engine.step()
            total = total + loss.detach()
        return float(total) / len(batches)

    return step


def fsdp2(options: dict[str, Any], device: str) -> Step:
    """Torch's own offload: fp32 in RAM, 16 bits in the layers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    one_process()
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    model = filled_model(options, torch.float32, "cpu")
    compile_layers(model, options)
    mesh = init_device_mesh(device, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    shard = partial(
        fully_shard, mesh=mesh, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=device == "cuda")
    )
    loss_of = Loss(model, options["chunked"])
    for layer in model.model.layers:
        shard(layer)
    shard(loss_of)
    model.model.rotary_emb.to(device)
    optimizer = torch.optim.AdamW(loss_of.parameters(), lr=1e-4, fused=True)
    batches = token_batches(options, device)

    def step() -> float:
        total = 0.0
        for number, batch in enumerate(batches):
            loss_of.set_requires_gradient_sync(number == len(batches) - 1)
            loss = loss_of(**batch)
            (loss / len(batches)).backward()
            total = total + loss.detach()
        if options["clip"]:
            torch.nn.utils.clip_grad_norm_(loss_of.parameters(), options["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(total) / len(batches)

    return step


def torchao(options: dict[str, Any], device: str) -> Step:
    """Weights and gradients on the GPU, AdamW of bf16 weights on the CPU while gradients arrive."""
    from torchao.optim import CPUOffloadOptimizer

    model = filled_model(options, torch.bfloat16, device)
    compile_layers(model, options)
    loss_of = Loss(model, options["chunked"])
    optimizer = CPUOffloadOptimizer(
        model.parameters(), torch.optim.AdamW, offload_gradients=options["gas"] == 1, fused=True, lr=1e-4
    )
    batches = token_batches(options, device)

    def step() -> float:
        total = 0.0
        for batch in batches:
            loss = loss_of(**batch)
            (loss / len(batches)).backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return float(total) / len(batches)

    return step


def trainstream(options: dict[str, Any], device: str) -> Step:
    """TrainStream, weights where its planner puts them."""
    import trainstream as system

    model = filled_model(options, torch.bfloat16, "cpu")
    compile_layers(model, options)
    model, optimizer = system.wrap(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        device=device,
        offload=True,
        param_offload="auto",
        activation_offload=False,
        max_grad_norm=float(options["clip"]) or None,
        accumulation_steps=options["gas"],
        blocks=model.model.layers,
    )
    loss_of = Loss(model, options["chunked"])
    batches = token_batches(options, device)

    def step() -> float:
        total = 0.0
        for batch in batches:
            loss = loss_of(**batch)
            (loss / len(batches)).backward()
            total = total + loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        return float(total) / len(batches)

    return step


class _First(nn.Module):
    """Tokens to (hidden states, cos, sin)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed, self.rotary = model.model.embed_tokens, model.model.rotary_emb

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.embed(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
        return hidden, *self.rotary(hidden, positions)


class _Middle(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, state: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        hidden, cos, sin = state
        return self.layer(hidden, attention_mask=None, position_embeddings=(cos, sin)), cos, sin


class _Last(nn.Module):
    """Hidden states to logits of all tokens but each row's last."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.head = model.model.norm, model.lm_head

    def forward(self, state: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return self.head(self.norm(state[0])[:, :-1])


def _microbatch_loss(tokens: int, logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum") / tokens


def roundpipe(options: dict[str, Any], device: str) -> Step:
    """RoundPipe over an own nn.Sequential, fp32 masters in RAM, on every GPU that it sees."""
    from roundpipe import RoundPipe, RoundPipeRunConfig
    from roundpipe.optim import Adam

    model = filled_model(options, torch.bfloat16, "cpu")
    model.gradient_checkpointing_disable()  # it recomputes by itself
    compile_layers(model, options)
    stages = [_First(model), *(_Middle(layer) for layer in model.model.layers), _Last(model)]
    pipe = RoundPipe(
        nn.Sequential(*stages),
        optim_dtype=torch.float32,
        model_run_config=RoundPipeRunConfig(num_microbatch=options["gas"]),
    )
    optimizer = Adam(pipe.optim_parameters(), lr=1e-4, decoupled_weight_decay=True)
    batches = token_batches(options)
    ids = torch.cat([batch["input_ids"] for batch in batches])
    tokens = ids.shape[0] * (ids.shape[1] - 1)

    def update() -> None:
        if options["clip"]:
            torch.nn.utils.clip_grad_norm_(list(pipe.optim_parameters()), options["clip"])
        optimizer.step()
        optimizer.zero_grad()

    def step() -> float:
        loss = pipe.forward_backward((ids,), label=ids, loss_fn=partial(_microbatch_loss, tokens))
        pipe.step(update, is_async=bool(options.get("stale")))
        return float(loss)

    return step


SYSTEMS: dict[str, Callable[[dict[str, Any], str], Step]] = {
    **dict.fromkeys(("zero2", "zero2-bf16", "zero3"), zero),
    "fsdp2": fsdp2,
    "torchao": torchao,
    "trainstream": trainstream,
    "roundpipe": roundpipe,
}


def main() -> None:
    """Warm up, then time steps."""
    options: dict[str, Any] = json.loads(sys.argv[1])
    faulthandler.dump_traceback_later(max(1.0, options["limit_s"] - 5))  # where it hung, if it did
    device = "cuda" if torch.cuda.is_available() else "cpu"
    watch = DeviceWatch() if device == "cuda" else None
    for gpu in range(torch.cuda.device_count() if options["system"] == "roundpipe" else 1):
        cap_allocator(options.get("cap_gib", 0), gpu)
    begin_s = time.perf_counter()
    step = SYSTEMS[options["system"]](options, device)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if watch is not None:
        watch.restart()
    losses = [step() for _ in range(options["warm"])]
    synchronize()
    init_s = time.perf_counter() - begin_s
    repeats = []
    for _ in range(options["repeats"]):
        start_s = time.perf_counter()
        losses += [step() for _ in range(options["steps"])]
        synchronize()
        repeats.append((time.perf_counter() - start_s) / options["steps"])
    finish(
        {
            "step_s": sorted(repeats)[len(repeats) // 2],
            "repeats_s": repeats,
            "losses": losses,
            "init_s": init_s,
            "peak_vram_bytes": watch.stop() if watch is not None else None,
            "rss_training": rss_bytes(),
        }
    )
    os._exit(0)  # threads and process groups of theirs have nothing left to do


if __name__ == "__main__":
    main()

"""Does a model train when it is streamed? A tiny copy's loss and every gradient, part by part and by plain autograd.

Can this model be computed in tiles? Found out by doing it: a tiny copy, all of it in tiles, against plain autograd.

Loss and every gradient of two micro-batches are compared in fp32, as in `check`, but through a whole engine on the CPU,
because what is to be shown is that the model's own code does nothing with its weights but what goes in tiles. Cost: a
fraction of a second."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from outcore.common.errors import line_of
from outcore.common.quantities import MIB
from outcore.engine.stream.backward.head import StreamedHeadGradient
from outcore.engine.stream.backward.layer import BackwardRunner
from outcore.engine.stream.gradients.download import GradAccumulator
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.check import (
    TOLERANCE,
    Batch,
    Trial,
    slab_of,
    tiny_copy,
    try_tiny_copy,
    why_config_not_streamed,
    why_not_streamed,
)
from outcore.flow.layers import CompiledLayers, Head, HeadInput, LongRows, PartRunner, RouterTaps, RowHomes
from outcore.flow.parts import StreamUnsupported, discover_units
from outcore.flow.trace import PhaseClock
from outcore.model import LoadedModel
from outcore.model.forward import IGNORE, count_target_tokens
from outcore.model.trial import VOCAB, on_one_thread
from outcore.model.weights import seeded_cpu
from outcore.staging.pool import HostMemory


def run_units(
    loaded: LoadedModel,
    batch: Batch,
    compiled: CompiledLayers | None = None,
    tile_tokens: int = 0,
    near: bool = False,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(summed objective, gradients of its mean by name) of one micro-batch, unit by unit on the CPU, no engine.
    `tile_tokens`: of a tile, where layers are to run as on long rows; `near`: whose rows pass on the device."""
    units = discover_units(loaded)
    aux_coefficient = loaded.token_loss().aux_coefficient
    runner = PartRunner(units, compiled=compiled, taps=RouterTaps(units) if aux_coefficient else None)
    if tile_tokens:
        runner.long_rows = LongRows(units, tile_tokens, RowHomes(HostMemory(), near=near), compiled)
    backward = BackwardRunner(runner)
    head = Head(
        runner,
        vocab_size=loaded.facts.vocab_size,
        logits_chunk_bytes=4 * 16 * loaded.facts.vocab_size,
        head_loss=loaded.head_loss,
    )
    head_gradient = StreamedHeadGradient(head, aux_coefficient=aux_coefficient)
    total = int((batch["labels"][:, 1:] != IGNORE).sum())
    slabs = {unit.index: slab_of(unit) for unit in units.all}
    sums = {u.index: GradAccumulator(u.layout, torch.zeros(u.layout.numel, dtype=u.layout.dtype)) for u in units.all}
    log = runner.embed(slabs[units.embed.index], batch)
    hidden, inputs, routers, counts = log.hidden, [], [], []
    for index, unit in enumerate(units.layer_units):
        inputs.append(hidden)
        hidden, found = runner.layer(index, slabs[unit.index], hidden, log.call(index))
        routers += found
        counts.append(len(found))
    at = units.head.index
    item = HeadInput(hidden, batch, log)
    result = head_gradient.one(slabs[at], item, routers, grad_scale=1.0 / total, into=sums[at])
    grad, grad_routers = result.grad_hidden, result.grad_routers
    for index, unit in reversed(list(enumerate(units.layer_units))):
        cut = len(grad_routers) - counts[index]
        own, grad_routers = grad_routers[cut:], grad_routers[:cut]
        grad = backward.layer(index, slabs[unit.index], inputs[index], log.call(index), grad, own, sums[unit.index])
    backward.embed(slabs[units.embed.index], batch, grad, sums[units.embed.index])
    objective = result.ce_sum if result.aux_loss is None else result.ce_sum + result.aux_loss * result.n_tokens
    grads: dict[str, torch.Tensor] = {}
    for unit in units.all:
        views = unit.layout.grad_views(sums[unit.index].complete())
        grads |= {slot.name: view for slot, view in zip(unit.layout.trainable_slots, views, strict=True)}
    return objective, grads


def gradient_difference(tiny: LoadedModel, batch: Batch, tile_tokens: int = 0, *, near: bool = False) -> float:
    """Largest difference of loss and gradients, relative to the largest gradient of the model, in fp32 on the CPU.
    `tile_tokens`, `near`: as in `run_units`."""
    loss = tiny.token_loss()
    loss_sum = loss(tiny.model, batch)
    total = int(loss_sum.n_tokens)
    whole = loss_sum.objective(total)
    named = {name: parameter for name, parameter in tiny.model.named_parameters() if parameter.requires_grad}
    grads = torch.autograd.grad(whole, list(named.values()), allow_unused=True)
    objective, mine = run_units(tiny, batch, tile_tokens=tile_tokens, near=near)
    largest = max((float(g.abs().max()) for g in grads if g is not None), default=1.0)
    worst = abs(float(objective) / total - float(whole.detach())) / max(1.0, abs(float(whole.detach())))
    for (name, parameter), grad in zip(named.items(), grads, strict=True):
        expected = torch.zeros_like(parameter) if grad is None else grad
        off = float((mine[name] - expected).abs().max()) / max(largest, 1e-12)
        worst = max(worst, off if off == off else float("inf"))
    return worst


GRADIENTS = Trial("gradients", gradient_difference)
TRIAL_TILE_TOKENS = 10
"""A trial has 2 x 12 tokens."""


def why_not_in_tiles_of_tokens(loaded: LoadedModel) -> str:
    """Reason, in words; '' when a tiny copy's layers get the same gradients on tiles of tokens as on whole rows."""
    # Near: who changes in place what attention needs again does so to the rows themselves.
    difference = partial(gradient_difference, tile_tokens=TRIAL_TILE_TOKENS, near=True)
    trial = Trial("gradients in tiles of tokens", difference)
    try:
        try_tiny_copy(loaded, trial)
    except StreamUnsupported as error:
        return str(error)
    return ""


def why_not_trained(loaded: LoadedModel) -> str:
    """Reason why not, in words; '' when the streaming engine trains this model; otherwise the reason, in words.
    Parameters must be on the CPU."""
    return why_not_streamed(loaded, GRADIENTS)


def why_config_not_trained(
    config: Any,
    attention: str = "auto",
    trust_remote_code: bool = False,
    dtype: torch.dtype = torch.float32,
    *,
    trained: bool = False,
) -> str:
    """Answer `why_not_trained` from a transformers config alone: no weight is read, no memory is spent. `dtype`: of the
    run; `trained`: its weights come from a checkpoint."""
    return why_config_not_streamed(config, attention, trust_remote_code, dtype, trial=GRADIENTS, trained=trained)


TILE_BYTES = 4096
"""A few tiles to each weight of a tiny copy."""


@on_one_thread()
def try_tiled_copy(loaded: LoadedModel, build: Callable[..., Any]) -> None:
    """StreamUnsupported when a tiny copy of the model gives other numbers in tiles. `build`: build_stream_engine."""
    try:
        with seeded_cpu(0, "tile trial"):
            tiny = tiny_copy(loaded)
            batches = [{"input_ids": ids, "labels": ids.clone()} for ids in torch.randint(2, VOCAB, (2, 2, 12))]
        total = sum(count_target_tokens(batch) for batch in batches)
        loss = tiny.token_loss()
        for batch in batches:
            loss(tiny.model, batch).objective(total).backward()
        expected = {name: p.grad for name, p in tiny.model.named_parameters() if p.requires_grad}
        for p in tiny.model.parameters():
            p.grad = None
        found = _gradients(tiny, batches, total, build)
    except StreamUnsupported:
        raise
    except Exception as error:  # any model's own code may fail in any way when a weight is not a tensor
        raise StreamUnsupported(
            f"it does not fit on the device whole, and a tiny copy of it failed in tiles ({line_of(error)})"
        ) from error
    largest = max((float(g.abs().max()) for g in expected.values() if g is not None), default=1.0)
    for name, grad in expected.items():
        mine = found[name]
        off = float((mine - (0.0 if grad is None else grad)).abs().max()) / max(largest, 1e-12)
        if not off <= TOLERANCE:
            raise StreamUnsupported(
                f"it does not fit on the device whole, and in tiles a tiny copy of it gets another gradient of {name} "
                f"(off by {off:.1e} of the largest)"
            )


def _gradients(
    tiny: LoadedModel, batches: list[dict[str, torch.Tensor]], total: int, build: Callable[..., Any]
) -> dict[str, torch.Tensor]:
    settings = StreamSettings(
        tiling="on",
        tile_bytes=TILE_BYTES,
        staging_bytes=MIB,
        slot_bytes=MIB // 16,
        num_slots=2,
        optimizer_threads=1,
        optimizer_backend="torch",
        compile="off",
        packed_attention="masks",
        logits_chunk_bytes=TILE_BYTES,
    )
    engine = build(tiny, settings, device="cpu", pinned_grant=False, trial=False)
    try:
        sent: list[Any] = []
        engine._parts.schedule.train(
            batches,
            step=1,
            num_tokens=total,
            loss_scale=1.0,
            on_gradient=lambda unit, transfer: sent.append((unit, transfer)),
            clock=PhaseClock(torch.device("cpu")),
        )
        found: dict[str, torch.Tensor] = {}
        for unit, transfer in sent:
            transfer.wait()
            views = unit.layout.grad_views(engine._parts.arena[unit])
            found |= {slot.name: view.clone() for slot, view in zip(unit.layout.trainable_slots, views, strict=True)}
        return found
    finally:
        engine.close()

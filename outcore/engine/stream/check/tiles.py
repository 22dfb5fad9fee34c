"""Can this model be computed in tiles? Found out by doing it: a tiny copy, all of it in tiles, against plain autograd.

Loss and every gradient of two micro-batches are compared in fp32, as in `check`, but through a whole engine on the CPU,
because what is to be shown is that the model's own code does nothing with its weights but what goes in tiles. Cost: a
fraction of a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from outcore.common.errors import line_of
from outcore.common.quantities import MIB
from outcore.engine.stream.settings import StreamSettings
from outcore.flow.check import TOLERANCE, tiny_copy
from outcore.flow.parts import StreamUnsupported
from outcore.flow.trace import PhaseClock
from outcore.model import LoadedModel
from outcore.model.forward import count_target_tokens
from outcore.model.trial import VOCAB, on_one_thread
from outcore.model.weights import seeded_cpu

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

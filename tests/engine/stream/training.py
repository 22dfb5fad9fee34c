"""Training of tiny models by the streaming engine on the CPU, and the same by torch's own AdamW."""

import pytest
import torch

from outcore.engine.stream.build import build_stream_engine
from tests.engine.inside import parts_of
from tests.flow.models import TINY_SETTINGS, packed_batch, padded_batch, plain_batch, set_dropout, tiny_loaded

TINY = TINY_SETTINGS
LR = 3e-3


@pytest.fixture
def build(engines):
    def make(model="llama", settings=TINY, *, dropout=0.0, dtype=torch.float32, prepare=None, **fields):
        loaded = tiny_loaded(model, dtype=dtype, **fields)
        set_dropout(loaded.model, dropout)
        if prepare is not None:
            prepare(loaded.model)
        engines.append(build_stream_engine(loaded, settings, device="cpu", pinned_grant=False, trial=False))
        return engines[-1]

    return make


def batches_of(step: int, count: int = 2):
    kinds = [plain_batch, padded_batch, packed_batch]
    return [kinds[(step + m) % 3](2 - m % 2, 12 + 3 * m, seed=100 * step + m) for m in range(count)]


def weights_of(engine) -> dict[str, torch.Tensor]:
    parts_of(engine).updates.drain()
    return {n: p.detach().clone() for n, p in engine.loaded.model.named_parameters()}


def plain_training(loaded, steps, *, max_norm, settings=TINY, batches=batches_of):
    """(losses, norms) of torch's own AdamW over the whole model."""
    loss = loaded.token_loss()
    trained = [p for p in loaded.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=LR, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay, foreach=False
    )
    losses, norms = [], []
    for step in range(steps):
        micro = batches(step)
        total = sum(int((b["labels"][:, 1:] != -100).sum()) for b in micro)
        optimizer.zero_grad()
        summed = 0.0
        for batch in micro:
            result = loss(loaded.model, batch)
            result.objective(total).backward()
            summed += float(result.loss_sum.detach())
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, max_norm or float("inf"))))
        optimizer.step()
        losses.append(summed / total)
    return losses, norms


fixtures = (build,)

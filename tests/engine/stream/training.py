"""Training of tiny models by the streaming engine on the CPU, and the same by torch's own optimizers."""

from dataclasses import replace

import pytest
import torch

from outcore.engine.stream.build import build_stream_engine
from outcore.model import LoadedModel, LoraSettings
from outcore.model.adapters import apply_lora
from outcore.model.facts import model_facts
from outcore.storage import PosixEngine
from tests.engine.inside import parts_of
from tests.flow.models import TINY_SETTINGS, packed_batch, padded_batch, plain_batch, set_dropout, tiny_loaded
from tests.storage.faulty import FaultyEngine

TINY = TINY_SETTINGS
LR = 3e-3


@pytest.fixture
def build(engines):
    """Engines of a kind of model, or of one that is loaded already; `fields` are of its configuration."""

    def make(
        model="llama", settings=TINY, *, dropout=0.0, dtype=torch.float32, prepare=None, trial=False, storage=None,
        **fields,
    ):  # fmt: skip
        loaded = model
        if not isinstance(model, LoadedModel):
            loaded = tiny_loaded(model, dtype=dtype, **fields)
            set_dropout(loaded.model, dropout)
        if prepare is not None:
            prepare(loaded.model)
        engine = build_stream_engine(loaded, settings, device="cpu", pinned_grant=False, trial=trial, storage=storage)
        engines.append(engine)
        return engine

    return make


@pytest.fixture
def drive():
    """A drive that fails on command."""
    inner = PosixEngine(2)
    yield FaultyEngine(inner)
    inner.close()


def adapted(model="llama", seed: int = 0, *, filled=0.02, r=4, targets="auto", **fields) -> LoadedModel:
    """A tiny model under LoRA adapters whose second matrices are `filled` with this."""
    loaded = tiny_loaded(model, seed=seed, **fields)
    set_dropout(loaded.model, 0.0)
    network = apply_lora(loaded.model, LoraSettings(r=r, alpha=2.0 * r, dropout=0.0, target_modules=targets), seed=seed)
    with torch.no_grad():
        for name, p in network.named_parameters():
            if "lora_B" in name:
                p.fill_(filled)
    return replace(loaded, model=network.train(), facts=model_facts(network))


def freeze_most(model) -> None:
    """All but the attention of the second layer."""
    for name, p in model.named_parameters():
        p.requires_grad_("layers.1." in name and "self_attn" in name)


def batches_of(step: int, count: int = 2, longer: int = 0):
    """Micro-batches of all kinds; rows are `longer` by so many tokens with each step."""
    kinds = [plain_batch, padded_batch, packed_batch]
    lengths = [12 + longer * step + 3 * m for m in range(count)]
    return [kinds[(step + m) % 3](2 - m % 2, length, seed=100 * step + m) for m, length in enumerate(lengths)]


def losses_of(engine, steps, batches=batches_of) -> list[float]:
    return [engine.train_step(batches(step), LR).loss for step in steps]


def weights_of(engine) -> dict[str, torch.Tensor]:
    engine._drain()  # those that stay on a GPU, too
    return {n: p.detach().clone() for n, p in engine.loaded.model.named_parameters()}


def homes_of(engine) -> dict[str, torch.Tensor]:
    """Every weight, wherever it lives."""
    parts_of(engine).updates.drain()
    parts_of(engine).residents.write_back()
    homes = parts_of(engine).homes.weights
    return {name: homes.read(name).clone() for name in homes.names()}


def result_of(engine, steps, num_sampled: int = 3):
    """What training, an evaluation and a sample give; then every weight."""
    losses = losses_of(engine, steps)
    losses.append(engine.evaluate([padded_batch(2, 14, seed=9)]).loss)
    return (losses, engine.sample([5, 6, 7], num_sampled, None)), homes_of(engine)


def same(a, b) -> bool:
    """Whether values are equal and tensors too, to the bit."""
    return a[0] == b[0] and a[1].keys() == b[1].keys() and all(torch.equal(a[1][n], b[1][n]) for n in a[1])


def adamw_of(parameters, settings=TINY):
    return torch.optim.AdamW(
        parameters, lr=LR, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay, foreach=False
    )


def plain_training(loaded, steps, *, max_norm, batches=batches_of, optimizers=None):
    """(losses, norms) of torch's own optimizers over the whole model; `steps`: their number or which."""
    loss = loaded.token_loss()
    trained = [p for p in loaded.model.parameters() if p.requires_grad]
    optimizers = optimizers or [adamw_of(trained)]
    losses, norms = [], []
    for step in range(steps) if isinstance(steps, int) else steps:
        micro = batches(step)
        total = sum(int((b["labels"][:, 1:] != -100).sum()) for b in micro)
        loaded.model.zero_grad()
        summed = 0.0
        for batch in micro:
            result = loss(loaded.model, batch)
            result.objective(total).backward()
            summed += float(result.loss_sum.detach())
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, max_norm or float("inf"))))
        for optimizer in optimizers:
            optimizer.step()
        losses.append(summed / total)
    return losses, norms


fixtures = (build,)
with_drive = (build, drive)

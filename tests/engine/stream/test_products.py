"""Layers whose products are in float8: the engine trains as plain PyTorch does with the same products."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from outcore.model.forward import LayerProducts
from tests.engine.stream.training import TINY, adapted, fixtures, losses_of, plain_training
from tests.flow.models import plain_batch, set_dropout, tiny_loaded

(build,) = fixtures
pytestmark = pytest.mark.usefixtures("one_thread")
CPU, BF16 = torch.device("cpu"), torch.bfloat16


def batches_of(step: int):
    return [plain_batch(2, 16, seed=10 * step + micro) for micro in range(2)]


@pytest.mark.more(after=1)
@pytest.mark.parametrize("recipe", ["float8_tensorwise", "float8_rowwise"])
def test_losses_and_gradients_are_those_of_plain_pytorch_with_these_products(build, recipe):
    reference = tiny_loaded("llama", dtype=BF16)
    set_dropout(reference.model, 0.0)
    products = LayerProducts(recipe, reference.model.model.layers, CPU, BF16, tiled=False)
    losses, norms = plain_training(reference, 1, max_norm=0.5, batches=batches_of)
    products.close()
    engine = build("llama", replace(TINY, matmul=recipe, max_grad_norm=0.5), dtype=BF16, trial=True)
    first = engine.train_step(batches_of(0), 3e-3)
    assert first.loss == pytest.approx(losses[0], rel=1e-4)
    assert first.grad_norm == pytest.approx(norms[0], rel=2e-2)
    plain = build("llama", replace(TINY, max_grad_norm=0.5), dtype=BF16)
    other = plain.train_step(batches_of(0), 3e-3).loss
    assert other != first.loss and other == pytest.approx(first.loss, rel=0.02)
    later = losses_of(engine, [step % 3 for step in range(1, 13)], batches_of)
    assert later[-1] < 0.95 * first.loss
    assert "products: float8" in engine.describe()
    engine.close()
    assert not [m for m in engine.loaded.model.modules() if isinstance(m, nn.Linear) and type(m) is not nn.Linear]


def test_an_engine_that_cannot_be_built_leaves_the_model_as_it_was(build):
    loaded = tiny_loaded("llama", dtype=BF16)
    settings = replace(TINY, matmul="float8_rowwise", max_grad_norm=0.0, gradient_bytes=1)
    with pytest.raises(ValueError, match="cannot hold the gradient"):
        build(loaded, settings)
    assert not [m for m in loaded.model.modules() if isinstance(m, nn.Linear) and type(m) is not nn.Linear]


@pytest.mark.more
def test_compiled_adapters_compute_what_eager_ones_do(build):
    """On a CPU torch's compiler makes no code for float8, but what adapters stand on it does not look into."""

    def first_losses(compile: str) -> list[float]:
        engine = build(adapted(r=16, dtype=BF16), replace(TINY, matmul="float8_tensorwise", compile=compile))
        return [engine.train_step(batches_of(step), 1e-3).loss for step in range(3)]

    assert first_losses("on") == pytest.approx(first_losses("off"), rel=1e-2)

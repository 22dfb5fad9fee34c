"""The loss of a chunk and its gradient in one go, against autograd through torch's own cross-entropy."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.engine.stream.backward.head import CrossEntropy, sum_and_gradient, sum_and_gradient_eager
from outcore.model.forward import IGNORE
from tests.refused import failing


def by_autograd(logits: torch.Tensor, targets: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf.float(), targets, ignore_index=IGNORE, reduction="sum")
    (loss * scale).backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def case(n: int, vocab: int, dtype: torch.dtype, masked: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    targets = torch.randint(0, vocab, (n,))
    targets[torch.rand(n) < masked] = IGNORE
    return (torch.randn(n, vocab) * 5).to(dtype), targets


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(1, 9), vocab=st.integers(1, 67),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), masked=st.sampled_from([0.0, 0.4, 1.0]),
    scale=st.sampled_from([1.0, 1e-3, 128.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_equals_autograd(n, vocab, dtype, masked, scale, seed):
    logits, targets = case(n, vocab, dtype, masked, seed)
    before = logits.clone()
    loss, grad = by_autograd(logits, targets, scale)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    for function in (sum_and_gradient, sum_and_gradient_eager):
        found, found_grad = function(logits, targets, torch.tensor(scale))
        torch.testing.assert_close(found, loss, rtol=1e-5, atol=1e-5)
        assert found_grad.dtype == dtype
        torch.testing.assert_close(found_grad, grad, rtol=tolerance, atol=tolerance * scale * 0.1)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "vocab"), [(1, 1), (7, 1001), (64, 32000)])
def test_eagerly_the_bits_are_those_of_logsumexp(n, vocab, dtype, device):
    logits, targets = (t.to(device) for t in case(n, vocab, dtype, 0.2, n))
    logits[0, 0] = -torch.inf  # a masked token, all of a row where there is one only
    scale = torch.tensor(1 / 3, device=device)
    lse = torch.logsumexp(logits.float(), dim=-1, keepdim=True)
    counted, column = (targets != IGNORE)[:, None], targets.clamp(min=0)[:, None]
    loss = torch.where(counted, lse - logits.float().gather(1, column), 0.0).sum()
    grad = (logits.float() - lse).exp().scatter_add(1, column, torch.full_like(lse, -1.0))
    grad = (grad * torch.where(counted, scale, 0.0)).to(dtype)
    found, found_grad = sum_and_gradient_eager(logits, targets, scale)
    assert torch.equal(found.nan_to_num(7.0), loss.nan_to_num(7.0))
    assert torch.equal(found_grad.nan_to_num(7.0), grad.nan_to_num(7.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_shows(bad):
    logits, targets = case(3, 7, torch.bfloat16, 0.0, 1)
    logits[1, 2] = bad
    for function in (sum_and_gradient, sum_and_gradient_eager):
        loss, grad = function(logits, targets, torch.tensor(1.0))
        assert not loss.isfinite() and not grad.isfinite().all()


def test_compiles_for_chunks_of_any_length():
    torch._dynamo.reset()
    compiled = CrossEntropy(compiled=True, backend="eager")
    for n in (4, 4, 5, 2, 1):
        logits, targets = case(n, 11, torch.bfloat16, 0.3, n)
        loss, grad = compiled(logits, targets, 0.5)
        expected = by_autograd(logits, targets, 0.5)
        torch.testing.assert_close((loss, grad), expected, rtol=1e-2, atol=1e-4)
    assert not compiled.why_not


def test_goes_on_eagerly_when_the_compiler_gives_up(caplog):
    torch._dynamo.reset()
    loss = CrossEntropy(compiled=True, backend=failing(RuntimeError("no compiler here")))
    logits, targets = case(3, 7, torch.float32, 0.0, 2)
    for _ in range(2):
        torch.testing.assert_close(loss(logits, targets, 1.0), by_autograd(logits, targets, 1.0))
    assert "no compiler here" in loss.why_not
    assert sum("eagerly" in line for line in caplog.messages) == 1

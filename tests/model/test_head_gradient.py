"""The head's weight gets one gradient for all chunks: autograd's own values, and one matrix instead of two."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outcore.model.forward import CausalParts, has_one_gradient
from outcore.model.load import enable_activation_checkpointing
from outcore.model.loss import chunked_ce_sum
from tests.flow.models import packed_batch, plain_batch, set_dropout, tiny_loaded

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = 30
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "qwen2": {"tie_word_embeddings": True},
    "phi": {},  # a bias
    "gemma2": {},  # tied, logits soft-capped
    "cohere": {},  # tied, logits scaled
    "qwen3_moe": {"output_router_logits": True},
    "gpt2": {},  # tied
}


class Made(TorchDispatchMode):
    """Storages of results of `shape` that did not exist before."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.pointers, self.names = shape, set(), []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.shape == self.shape and not func.is_view:
            self.pointers.add(result.untyped_storage().data_ptr())
            self.names.append(func.__name__)
        return result


def gradients(loaded: Any, batches: list[dict[str, torch.Tensor]], num_chunks: int) -> dict[str, torch.Tensor]:
    """Of a step's micro-batches, by name."""
    loss = loaded.token_loss(num_chunks)
    loaded.model.zero_grad()
    for batch in batches:
        loss(loaded.model, batch).objective(TOKENS).backward()
    return {name: p.grad.clone() for name, p in loaded.model.named_parameters() if p.grad is not None}


def head_of(loaded: Any) -> torch.nn.Linear:
    head = CausalParts(loaded.model).projection
    assert isinstance(head, torch.nn.Linear)
    return head


@pytest.mark.more(after=6)
@pytest.mark.parametrize("model_type", list(MODELS))
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_the_whole_head(model_type: str, checkpointing: bool) -> None:
    loaded = tiny_loaded(model_type, **MODELS[model_type])
    assert has_one_gradient(head_of(loaded))
    set_dropout(loaded.model, 0.0)
    if checkpointing:
        enable_activation_checkpointing(loaded.model)
    batches = [plain_batch(2, 16, seed=1), packed_batch(2, 16, seed=2)]
    whole, chunked = gradients(loaded, batches, 1), gradients(loaded, batches, 5)
    assert set(whole) == set(chunked)
    for name, value in whole.items():
        torch.testing.assert_close(chunked[name], value, rtol=1e-4, atol=1e-6 * float(value.abs().max()))


def test_a_model_that_names_no_head_or_has_it_frozen_or_wrapped_is_left_to_autograd() -> None:
    loaded = tiny_loaded("llama", tie_word_embeddings=False)
    batch = plain_batch(2, 16)
    whole = gradients(loaded, [batch], 1)
    head = head_of(loaded)
    head.forward = head.forward  # as accelerate's hooks do
    assert not has_one_gradient(head)
    chunked = gradients(loaded, [batch], 4)
    del head.forward
    head.weight.requires_grad_(False)
    assert not has_one_gradient(head) and not has_one_gradient(None) and not has_one_gradient(torch.nn.Conv1d(1, 1, 1))
    frozen = gradients(loaded, [batch], 4)
    assert set(chunked) == set(whole) and set(frozen) == set(whole) - {"lm_head.weight"}
    for name, value in whole.items():
        for other in (chunked, frozen):
            if name in other:
                torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-6)


def test_autocast_is_left_to_autograd() -> None:
    loaded = tiny_loaded("llama", tie_word_embeddings=False)
    batch = plain_batch(2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        whole, chunked = gradients(loaded, [batch], 1), gradients(loaded, [batch], 4)
    weight = whole["lm_head.weight"]
    torch.testing.assert_close(chunked["lm_head.weight"], weight, rtol=2e-2, atol=1e-2 * float(weight.abs().max()))


def chunks_of(head: torch.nn.Linear, hidden: torch.Tensor, targets: torch.Tensor, given: bool) -> torch.Tensor:
    return chunked_ce_sum(hidden, targets, head, 6, head=head if given else None)


def test_one_matrix_is_made_and_is_the_gradient() -> None:
    """Autograd makes one for each chunk, and has two of them at a time."""
    torch.manual_seed(0)
    head = torch.nn.Linear(24, 80, bias=False)
    hidden, targets = torch.randn(60, 24, requires_grad=True), torch.randint(0, 80, (60,))
    made = {}
    for given in (False, True):
        head.weight.grad = None
        loss = chunks_of(head, hidden, targets, given)
        with Made(head.weight.shape) as made[given]:
            loss.backward()
        assert head.weight.grad is not None
    assert [name for name in made[False].names if name.startswith("mm")] == ["mm.default"] * 6
    assert made[True].names == ["mm.default"] + ["addmm_.default"] * 5
    assert made[True].pointers == {head.weight.grad.untyped_storage().data_ptr()}


def test_16_bit_sums_are_not_less_exact_than_autograds() -> None:
    errors = {False: 0.0, True: 0.0}
    for seed in range(5):
        torch.manual_seed(seed)
        exact = torch.nn.Linear(48, 96, bias=True)
        hidden, targets = torch.randn(90, 48).bfloat16(), torch.randint(0, 96, (90,))
        rounded = torch.nn.Linear(48, 96, bias=True).bfloat16()
        rounded.load_state_dict(exact.state_dict())
        exact.load_state_dict(rounded.state_dict())
        chunks_of(exact, hidden.float(), targets, False).backward()
        for given in errors:
            rounded.zero_grad()
            chunks_of(rounded, hidden, targets, given).backward()
            assert rounded.weight.grad is not None and exact.weight.grad is not None
            assert rounded.weight.grad.dtype == torch.bfloat16
            errors[given] += float((rounded.weight.grad.float() - exact.weight.grad).norm())
    assert errors[True] < errors[False]


def test_passes_over_one_graph_do_not_mix() -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 20)
    hidden, targets = torch.randn(30, 8, requires_grad=True), torch.randint(0, 20, (30,))
    whole = torch.autograd.grad(chunks_of(head, hidden, targets, False), [hidden, head.weight, head.bias])
    loss = chunks_of(head, hidden, targets, True)
    (of_hidden,) = torch.autograd.grad(loss, [hidden], retain_graph=True)  # the weight's is not asked for
    torch.testing.assert_close(of_hidden, whole[0])
    for _ in range(2):
        for found, expected in zip(
            torch.autograd.grad(loss, [hidden, head.weight, head.bias], retain_graph=True), whole, strict=True
        ):
            torch.testing.assert_close(found, expected)

"""Layers of a streamed model through torch.compile: what is computed, and when they run eagerly all the same."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.exc import Unsupported
from torch._dynamo.utils import counters

import outcore.hf
from tests.hf.callers import tiny
from tests.hf.test_what_callers_do import gradients

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of functions that ran as compiled code, which here is the function itself."""
    return _note_calls(monkeypatch, lambda function, **options: function)


def _note_calls(monkeypatch: pytest.MonkeyPatch, compile_: Callable[..., Any]) -> list[str]:
    calls = list[str]()

    def noted(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        made = compile_(function, **options)

        def run(*args: Any, **kwargs: Any) -> Any:
            result = made(*args, **kwargs)
            calls.append(function.__qualname__)
            return result

        return run

    _use(monkeypatch, noted)
    return calls


def _use(monkeypatch: pytest.MonkeyPatch, compile_: Callable[..., Any]) -> None:
    outcore.hf.compiled.compiled_forward.cache_clear()
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", compile_)


def trained(compile_: str, **how: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Gradients summed over batches of several lengths, and the model."""
    model = outcore.hf.stream(tiny(**how).train(), compile=compile_)
    for length in (7, 12, 9):
        ids = torch.arange(3, 3 + 2 * length).view(2, length)
        gradients(model, input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids))
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}, model


@pytest.mark.parametrize("lora", [False, True])
def test_gradients_are_those_of_eager_layers(lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One code for forward and backward, the first layer and the others, and batches of several lengths."""
    calls = _note_calls(monkeypatch, partial(torch.compile, backend="aot_eager"))
    eager, _ = trained("off", lora=lora)
    assert not calls
    counters.clear()
    compiled, model = trained("on", lora=lora)
    assert counters["stats"]["unique_graphs"] == 1
    assert calls == ["LlamaDecoderLayer.forward"] * 3 * 2 * model.config.num_hidden_layers
    for name, grad in eager.items():
        torch.testing.assert_close(compiled[name], grad, rtol=1e-4, atol=1e-6, msg=name)
    assert len(eager) == len(compiled)
    calls.clear()
    with torch.no_grad():
        model.eval()(torch.tensor([[5, 6, 7]]))
    assert not calls, "only layers in training mode are compiled"


def test_layers_with_dropout_run_eagerly(compiler: list[str], caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for compile_ in ("off", "on"):
        torch.manual_seed(3)
        found.append(trained(compile_, family="gpt2", dropout=0.2)[0])
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())
    assert caplog.text.count("random numbers") == 1


def test_a_hook_or_another_forward_within_a_layer_is_run(compiler: list[str]) -> None:
    seen: list[str] = []
    _, model = trained("on")
    inner = [model.model.layers[0].mlp, model.model.layers[1].mlp]
    count = len(compiler)
    handle = inner[0].register_forward_hook(lambda *_: seen.append("hook"))
    forward = inner[1].forward
    inner[1].forward = lambda *args: (seen.append("forward"), forward(*args))[1]
    gradients(model)
    assert sorted(seen) == ["forward", "forward", "hook", "hook"] and len(compiler) == count
    handle.remove()
    del inner[1].forward
    gradients(model)
    assert len(seen) == 4 and len(compiler) > count
    count = len(compiler)
    kind = type(inner[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", lambda self, x: 2 * forward(x))
        gradients(model)
        assert len(compiler) == count
    gradients(model)
    assert len(compiler) > count


@pytest.mark.parametrize("in_backward", [False, True])
def test_what_cannot_be_compiled_runs_eagerly(
    in_backward: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Refuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise Unsupported("a loop over experts", "loop")

    def refuse(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not in_backward:
                raise Unsupported("a loop over experts", "loop")
            return Refuses.apply(function(*args, **kwargs))

        return run

    eager, _ = trained("off")
    _use(monkeypatch, refuse)
    with caplog.at_level(logging.WARNING):
        compiled, _ = trained("on")
    assert caplog.text.count("a loop over experts") == 1
    assert all(torch.equal(grad, compiled[name]) for name, grad in eager.items())


def test_an_error_of_the_layer_is_the_callers(compiler: list[str]) -> None:
    _, model = trained("on")
    model.model.layers[1].mlp.down_proj = torch.nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        gradients(model)
    with pytest.raises(ValueError, match="compile must be"):
        outcore.hf.stream(tiny(), compile="yes")

"""LoRA's adapters as compiled layers run them: peft's numbers and gradients, and peft's own code for all else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.func import functional_call, vjp
from transformers.pytorch_utils import Conv1D

from outcore.flow.layers.compiled import AddedAdapter, with_added_adapters

WIDTH, WIDER, RANK = 12, 20, 3


class Gated(nn.Module):
    """A small layer: two projections up and one down."""

    def __init__(self, linear: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.gate, self.up, self.down = linear(WIDTH, WIDER), linear(WIDTH, WIDER), linear(WIDER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def adapted(linear: Callable[[int, int], nn.Module] = nn.Linear, **config: Any) -> Any:
    """With adapters whose second matrices are not zero, in fp64."""
    torch.manual_seed(1)
    settings = {"r": RANK, "lora_alpha": 7, "target_modules": ["gate", "up", "down"]} | config
    network = get_peft_model(Gated(linear), LoraConfig(**settings))  # pyright: ignore[reportArgumentType]
    for name, parameter in network.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return network.double()


def layer_of(network: Any) -> Gated:
    return network.base_model.model


def conv1d(wide_in: int, wide_out: int) -> nn.Module:
    return Conv1D(wide_out, wide_in)


@pytest.mark.parametrize("linear", [nn.Linear, conv1d])
def test_numbers_and_gradients_are_pefts(linear: Any) -> None:
    layer = layer_of(adapted(linear, fan_in_fan_out=linear is conv1d))
    added = with_added_adapters(layer)
    assert [type(m) for m in (added.gate, added.up, added.down)] == [AddedAdapter] * 3
    assert not any(isinstance(m, AddedAdapter) for m in layer.modules())
    assert {id(p) for p in added.parameters()} == {id(p) for p in layer.parameters()}
    x = torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(2, 5, WIDTH, dtype=torch.float64)
    trained = [p for p in layer.parameters() if p.requires_grad]
    assert len(trained) == 6
    found = []
    for module in (layer, added):
        output = module(x)
        found.append((output, *torch.autograd.grad(output, [x, *trained], grad)))
    for mine, peft in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, peft, rtol=1e-12, atol=1e-12)


def test_values_may_come_from_elsewhere() -> None:
    """As the engine calls it: every parameter is a view of a buffer on the device."""
    layer = layer_of(adapted())
    added = with_added_adapters(layer)
    other = {name: torch.randn_like(p) for name, p in added.named_parameters()}
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    mine = functional_call(added, other, x)
    with torch.no_grad():
        for name, p in added.named_parameters():
            p.copy_(other[name])
    torch.testing.assert_close(mine, layer(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("trains_bias", [True, False])
def test_gradients_through_torch_func(trains_bias: bool) -> None:
    """As the compiled backward takes them; also where LoRA's settings train the base's biases."""
    layer = layer_of(adapted(bias="all" if trains_bias else "none"))
    trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    assert any(name.endswith("bias") for name in trained) == trains_bias
    x, grad = torch.randn(2, 7, WIDTH, dtype=torch.float64), torch.randn(2, 7, WIDTH, dtype=torch.float64)
    wanted = torch.autograd.grad(layer(x), list(trained.values()), grad)
    added = with_added_adapters(layer)
    own_name = {id(p): name for name, p in added.named_parameters()}
    values = {own_name[id(p)]: p.detach() for p in trained.values()}
    frozen = {name: p.detach() for name, p in added.named_parameters() if name not in values}
    pull = vjp(lambda part: functional_call(added, {**frozen, **part}, x), values)[1]
    (found,) = pull(grad)
    for name, expected in zip(values, wanted, strict=True):
        torch.testing.assert_close(found[name], expected, rtol=1e-12, atol=1e-12)


def test_a_layer_without_adapters_is_itself() -> None:
    plain = Gated(nn.Linear)
    assert with_added_adapters(plain) is plain


def second(network: Any) -> None:
    network.add_adapter("second", LoraConfig(r=2, target_modules=["gate", "up", "down"]))


def second_at_work(network: Any) -> None:
    second(network)
    network.base_model.set_adapter(["default", "second"])


@pytest.mark.parametrize(
    ("config", "change"),
    [
        ({}, lambda network: network.merge_adapter()),
        ({}, lambda network: network.base_model.disable_adapter_layers()), ({}, second), ({}, second_at_work),
        ({"use_dora": True}, None), ({"lora_bias": True}, None),
        ({}, lambda network: [m.float() for n, m in network.named_modules() if n.endswith("lora_A")]),
    ],
    ids=["merged", "switched off", "one at rest", "two at work", "DoRA", "with a bias", "of another type"],
)  # fmt: skip
def test_other_adapters_stay_with_pefts_code(config: dict[str, Any], change: Callable[[Any], object] | None) -> None:
    network = adapted(**config)
    if change is not None:
        change(network)
    layer = layer_of(network)
    assert with_added_adapters(layer) is layer

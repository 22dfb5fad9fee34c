"""Products of linear layers in float8: their numbers, what they are for, and where they cannot be."""

import pytest
import torch
from torch import nn
from torch.func import vjp
from torch.fx.experimental.proxy_tensor import make_fx

from outcore.model.forward import MATMULS, LayerProducts
from outcore.model.forward.shared_rounding import SharedRounding
from tests.refused import refused

CPU, BF16 = torch.device("cpu"), torch.bfloat16
RECIPES = ("float8_tensorwise", "float8_rowwise")


def rounded(matrix: torch.Tensor, recipe: str, dtype: torch.dtype) -> torch.Tensor:
    """What is left of a matrix [n, k] in 8 bits, in fp64."""
    most = torch.finfo(dtype).max
    found = torch.empty(matrix.shape, dtype=torch.float64)
    for at in range(len(matrix)):
        amax = float((matrix[at] if recipe == "float8_rowwise" else matrix).abs().max())
        scale = torch.tensor(amax / most, dtype=torch.float32)
        if recipe == "float8_rowwise":
            scale = 2.0 ** scale.log2().ceil()
        found[at] = (matrix[at].float() / scale).to(dtype).double() * scale.double()
    return found


def near(found: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether `found` is the product of what is left of both, up to its own rounding."""
    expected = left @ right.t()
    return bool(((found.double() - expected).abs() <= 0.01 * expected.abs() + 1e-3 * expected.abs().max()).all())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("tokens", [32, 13])
def test_the_three_products_are_those_of_rounded_operands(recipe, tokens):
    torch.manual_seed(0)
    layer = nn.Linear(48, 32).to(BF16)
    x = (torch.randn(tokens, 48) * torch.logspace(-2, 1, tokens)[:, None]).to(BF16).requires_grad_()
    LayerProducts(recipe, [nn.Sequential(layer)], CPU, BF16, tiled=False)
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    of_values, of_gradients = torch.float8_e4m3fn, torch.float8_e5m2 if "tensor" in recipe else torch.float8_e4m3fn
    rows, weight = x.detach(), layer.weight.detach()
    assert x.grad is not None and layer.weight.grad is not None and layer.bias.grad is not None
    assert near(y - layer.bias, rounded(rows, recipe, of_values), rounded(weight, recipe, of_values))
    assert near(x.grad, rounded(grad, recipe, of_gradients), rounded(weight.t(), recipe, of_values))
    assert near(layer.weight.grad, rounded(grad.t(), recipe, of_gradients), rounded(rows.t(), recipe, of_values))
    assert torch.allclose(layer.bias.grad.float(), grad.float().sum(0), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("recipe", RECIPES)
def test_torch_func_takes_them_as_autograd_does(recipe):
    torch.manual_seed(0)
    layer = nn.Linear(32, 16, bias=False).to(BF16)
    LayerProducts(recipe, [nn.Sequential(layer)], CPU, BF16, tiled=False)
    x, grad = torch.randn(2, 8, 32).to(BF16).requires_grad_(), torch.randn(2, 8, 16).to(BF16)
    expected = torch.autograd.grad(layer(x), [x, layer.weight], grad)

    def run(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    def pull(weight: torch.Tensor, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return vjp(run, weight, x)[1](grad)

    traced = torch.compile(pull, fullgraph=True, backend="aot_eager")  # a CPU's code for float8 torch cannot make
    for function in (pull, traced):
        grad_weight, grad_x = function(layer.weight.detach(), x.detach(), grad)
        assert torch.equal(grad_x, expected[0]) and torch.equal(grad_weight, expected[1])


def test_what_two_layers_take_is_rounded_once_where_it_is_compiled():
    layers = [nn.Linear(32, 16, bias=False).to(BF16) for _ in range(3)]
    LayerProducts("float8_rowwise", layers, CPU, BF16, tiled=False)

    def both(x: torch.Tensor) -> torch.Tensor:
        return layers[0](x) + layers[1](x) - layers[2](x + 1)

    x = torch.randn(2, 8, 32).to(BF16)
    with torch.no_grad():
        graph = make_fx(both)(x)
    expected = graph(x)
    SharedRounding()(graph.graph)
    graph.recompile()
    roundings = [node for node in graph.graph.nodes if "float8_rounded" in str(node.target)]
    assert len(roundings) == 5 and torch.equal(graph(x), expected), "x, x + 1 and three weights"


def test_wide_linear_layers_are_changed_until_the_end():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.narrow = nn.Linear(32, 16), nn.Linear(32, 32), nn.Linear(32, 1)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(32, 16)})
            self.router = nn.ModuleDict({"layer": nn.Linear(32, 16)})

    layer = Layer().to(BF16)
    names = list(layer.state_dict())
    products = LayerProducts("float8_rowwise", [layer], CPU, BF16, tiled=False)
    assert products.words() == "float8_rowwise, 1 linear layers"
    changed = [name for name, module in layer.named_modules() if type(module) is not nn.Linear and name == "up"]
    assert changed == ["up"] and list(layer.state_dict()) == names
    assert all(type(module) is nn.Linear for module in (layer.gate, layer.narrow, layer.lora_A["default"]))
    assert type(layer.router["layer"]) is nn.Linear
    products.close()
    assert type(layer.up) is nn.Linear


def test_no_rows_give_none_and_gradients_of_zeros():
    layer = nn.Linear(16, 32, bias=False).to(BF16)
    products = LayerProducts("float8_rowwise", [nn.Sequential(layer)], CPU, BF16, tiled=False)
    x = torch.empty(0, 16, dtype=BF16, requires_grad=True)
    y = layer(x)
    y.backward(torch.empty(0, 32, dtype=BF16))
    assert y.shape == (0, 32) and x.grad is not None and x.grad.shape == (0, 16)
    assert layer.weight.grad is not None and not layer.weight.grad.any()
    products.close()


def test_a_row_of_zeros_gives_zeros():
    layer = nn.Linear(16, 16, bias=False).to(BF16)
    for recipe in RECIPES:
        products = LayerProducts(recipe, [nn.Sequential(layer)], CPU, BF16, tiled=False)
        assert not layer(torch.zeros(3, 16, dtype=BF16)).any()
        products.close()


@pytest.mark.parametrize(("name", "dtype", "tiled", "said"), [
    ("float8_rowwise", torch.float32, False, "gives results in bf16, and this run computes in float32"),
    ("float8_tensorwise", BF16, True, "some layers of this run are computed in tiles"),
    ("fp16_accumulation", torch.float16, False, "a switch of NVIDIA's GPUs, and this run has none"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_the_reason(name, dtype, tiled, said):
    layer = nn.Linear(16, 16)
    refused(
        ValueError,
        f"{said}. Leave --matmul out",
        lambda: LayerProducts(name, [nn.Sequential(layer)], CPU, dtype, tiled=tiled),
    )
    assert type(layer) is nn.Linear


def test_by_default_nothing_changes():
    layer = nn.Sequential(nn.Linear(16, 16))
    products = LayerProducts(MATMULS[0], [layer], CPU, torch.float32, tiled=True)
    assert products.words() == "" and type(layer[0]) is nn.Linear
    was = torch.backends.cuda.matmul.allow_fp16_accumulation
    try:
        torch.backends.cuda.matmul.allow_fp16_accumulation = True
        products.close()
        assert torch.backends.cuda.matmul.allow_fp16_accumulation, "somebody else's"
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = was

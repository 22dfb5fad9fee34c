"""LoRA's adapters as compiled layers run them: added to the product of the frozen weight in place.

peft computes y = W x + s B (A x) as three tensors of y's width (the weight's part, the adapter's part, their sum), and
scales the gradient of y in a fourth. A compiler joins sum and scaling with what is beside them, and so keeps both parts
of every projection until then: 11 tensors of the MLP's width at once in the backward of a layer of Llama, which without
adapters has 6 (counted in the code that torch 2.13's compiler makes for the CPU). Here weight and adapter are one
operation, which the compiler does not look into: the matrix product that makes the adapter's part adds it to the
weight's, and the scale is on the thin side. Going back

    dL/dx = W' g + s A' (B' g),  dL/dA = s (B' g) x',  dL/dB = s g (A x)',  with g = dL/dy

of which the first is the same operation again. The numbers are peft's up to rounding."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from outcore.flow.parts import Stand, shell_of
from outcore.model.forward import Float8Linear, float8_product, float8_rounded


@torch.library.custom_op("outcore::adapted_linear", mutates_args=())
def adapted_linear(
    x: torch.Tensor,
    sides: list[torch.Tensor],
    bias: torch.Tensor | None,
    down: torch.Tensor,
    up: torch.Tensor,
    scale: float,
    of_gradient: bool,
) -> torch.Tensor:
    """x [..., in], bias [out] or None, down (A) [rank, in], up (B) [out, rank] -> [..., out].

    `sides`: the weight [out, in]; where its product is in float8, x and the weight of `float8_product`. `of_gradient`:
    x is one."""
    rows = x.reshape(-1, x.shape[-1])
    if len(sides) > 1:
        y = float8_product(sides[:2], sides[2:], fast_sums=not of_gradient)
        if bias is not None:
            y += bias
    else:
        y = linear(rows, sides[0], bias)
    y.addmm_(linear(rows, down).mul_(scale), up.t())
    return y.view(*x.shape[:-1], -1)


@adapted_linear.register_fake
def _(x: torch.Tensor, sides: Any, bias: Any, down: Any, up: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], up.shape[0]))


class _Adapted(torch.autograd.Function):
    """`adapted_linear`, differentiable in all but the weight, also for `torch.func`. `in_8_bits`: the weight for
    `recipe`'s products, and the transposed one where a gradient is asked for; nothing without a recipe.

    The gradient of x is the same operation with everything transposed; the thin ones are the compiler's, so that x can
    go before the gradient of x comes."""

    @staticmethod
    def forward(
        x: Any, weight: Any, bias: Any, down: Any, up: Any, scale: float, recipe: str, *in_8_bits: torch.Tensor
    ) -> torch.Tensor:
        sides = [*_rounded(x, recipe, of_gradient=False), *in_8_bits[:2]] if recipe else [weight]
        return adapted_linear(x, sides, bias, down, up, scale, False)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, weight, bias, down, up, ctx.scale, ctx.recipe, *in_8_bits = inputs
        ctx.trains_bias = bias is not None and ctx.needs_input_grad[2]
        ctx.save_for_backward(x, down, up, *in_8_bits[2:] if ctx.recipe else [weight])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        (grad,), (x, down, up, *sides) = grad_outputs, ctx.saved_tensors
        rows, g = x.flatten(0, -2), grad.flatten(0, -2)
        grad_down = (g @ (ctx.scale * up)).t() @ rows
        grad_up = g.t() @ (rows @ (ctx.scale * down).t())
        grad_x = None
        if ctx.needs_input_grad[0]:
            sides = [*_rounded(grad, ctx.recipe, of_gradient=True), *sides] if ctx.recipe else [sides[0].t()]
            grad_x = adapted_linear(grad, sides, None, up.t(), down.t(), ctx.scale, True)
        grad_bias = g.sum(0) if ctx.trains_bias else None
        return grad_x, None, grad_bias, grad_down, grad_up, *(None for _ in ctx.needs_input_grad[5:])


def _rounded(x: torch.Tensor, recipe: str, *, of_gradient: bool) -> list[torch.Tensor]:
    return float8_rounded(x.flatten(0, -2), recipe, of_gradient, False)


def _adapted(x: Any, weight: Any, bias: Any, down: Any, up: Any, scale: float, recipe: str) -> torch.Tensor:
    to_x = torch.is_grad_enabled() and x.requires_grad
    in_8_bits = float8_rounded(weight, recipe, False, to_x) if recipe else []
    return _Adapted.apply(x, weight, bias, down, up, scale, recipe, *in_8_bits)  # pyright: ignore[reportReturnType]


@cache  # not at import: it imports the compiler, 1.4 s that runs without it need not wait for
def _tell_compiler() -> None:
    """torch 2.10's cannot look into an autograd.Function below torch.func, so that it takes the call as it is."""
    torch.compiler.allow_in_graph(_adapted)


def with_added_adapters(layer: nn.Module) -> nn.Module:
    """The layer with its plain adapters on linear layers computed as above, sharing everything else; the layer itself
    when it has none."""
    replaced = {path: AddedAdapter(module) for path, module in layer.named_modules() if _is_plain(module)}
    if not replaced:
        return layer
    _tell_compiler()
    return shell_of(layer, replaced)


class AddedAdapter(Stand):
    """Stands for peft's module around one linear layer with one adapter at work; shares its parameters.

    `forward(x)`: x [..., in] -> [..., out]."""

    def __init__(self, original: Any) -> None:
        super().__init__(original)
        (name,) = original.active_adapters
        self.base_layer = original.base_layer
        self.lora_A, self.lora_B = original.lora_A[name], original.lora_B[name]
        self.scale = float(original.scaling[name])
        self.is_transposed = bool(original.fan_in_fan_out)
        self.recipe = original.base_layer.recipe if isinstance(original.base_layer, Float8Linear) else ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.base_layer
        weight = base.weight.t() if self.is_transposed else base.weight
        return _adapted(x, weight, base.bias, self.lora_A.weight, self.lora_B.weight, self.scale, self.recipe)


def _is_plain(module: Any) -> bool:
    """Whether this is a linear layer of frozen weight (or GPT-2's Conv1D) under one adapter of peft's, no other there
    and this one at work, without dropout, variant (DoRA) or a bias of its own, all in one type."""
    peft = sys.modules.get("peft.tuners.lora.layer")  # whoever made adapters has imported it
    if peft is None or type(module) is not peft.Linear or module.disable_adapters or module.merged:
        return False
    names, base = list(module.active_adapters), module.base_layer
    if len(names) != 1 or list(module.lora_A) != names:  # one at rest has parameters, too
        return False
    if names[0] in module.lora_variant:
        return False
    thin, wide = module.lora_A[names[0]], module.lora_B[names[0]]
    if type(thin) is not nn.Linear or type(wide) is not nn.Linear or thin.bias is not None or wide.bias is not None:
        return False
    if type(base) not in (nn.Linear, Float8Linear, Conv1D) or base.weight.requires_grad:
        return False
    if not isinstance(module.lora_dropout[names[0]], nn.Identity):
        return False
    return base.weight.dtype == thin.weight.dtype == wide.weight.dtype

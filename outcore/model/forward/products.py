"""Matrix products of layers in fewer bits than the run's, where somebody asks for them: other numerics, for speed.

float8: each operand of a linear layer's three products (output, gradient of the input, gradient of the weight) is
divided by a scale, rounded to 8 bits and multiplied by the tensor cores, which sum in fp32. Scales are the operand's
largest value over the format's, made anew for every product: one for all of it (`float8_tensorwise`; gradients of the
output in e5m2, the rest in e4m3) or one for each row of the left and column of the right side, rounded up to a power of
two (`float8_rowwise`; all in e4m3). Both are recipes of torchao.float8, whose own modules torch.func cannot
differentiate. Embedding, head, routers and stacks of experts stay as they are.

`fp16_accumulation`: products of fp16 are summed in fp16 as well, which doubles their rate on GeForce cards. torch's own
switch, which holds for the whole process while the engine is open."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

MATMULS = ("same", "float8_tensorwise", "float8_rowwise", "fp16_accumulation")
FLOAT8 = ("float8_tensorwise", "float8_rowwise")
MULTIPLE = 16
"""The tensor cores want both sides of a matrix in 8 bits to be multiples of this."""
ROUTERS = frozenset({"gate", "router"})
"""Names of what chooses a mixture's experts: a linear layer, or a module around it."""
LEAST_AMAX = 1e-12
"""A matrix of zeros is divided by this over the format's largest value, as torchao does."""


def _rounded(rows: torch.Tensor, recipe: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [n, k] -> (in 8 bits, contiguous; fp32 scales, [n, 1] or a single one)."""
    largest = torch.finfo(dtype).max
    by_row = recipe == "float8_rowwise"
    amax = rows.abs().amax(1, keepdim=True) if by_row else rows.abs().amax()
    scale = amax.float().clamp(min=LEAST_AMAX) / largest
    if by_row:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return (rows.float() / scale).clamp(-largest, largest).to(dtype).contiguous(), scale


def float8_product(
    left: torch.Tensor, right: torch.Tensor, recipe: str, *, of_gradient: bool, fast_sums: bool = False
) -> torch.Tensor:
    """left [n, k], right [m, k] -> left right' [n, m] in left's type. `of_gradient`: the left one is a gradient."""
    if not left.numel():  # an expert that no token chose
        return left.new_zeros(left.shape[0], right.shape[0])
    if short := -left.shape[1] % MULTIPLE:
        left, right = pad(left, (0, short)), pad(right, (0, short))
    wide = of_gradient and recipe == "float8_tensorwise"
    a, scale_a = _rounded(left, recipe, torch.float8_e5m2 if wide else torch.float8_e4m3fn)
    b, scale_b = _rounded(right, recipe, torch.float8_e4m3fn)
    return torch.ops.aten._scaled_mm(  # what torchao calls; torch has no public name for it
        a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=left.dtype, use_fast_accum=fast_sums
    )


class _Float8(torch.autograd.Function):
    """x [n, in], weight [out, in] -> [n, out], differentiable, also for `torch.func`."""

    @staticmethod
    def forward(x: Any, weight: Any, recipe: str) -> torch.Tensor:
        return float8_product(x, weight, recipe, of_gradient=False, fast_sums=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, weight, ctx.recipe = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        (grad,), (x, weight) = grad_outputs, ctx.saved_tensors
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = float8_product(grad, weight.t(), ctx.recipe, of_gradient=True)
        if ctx.needs_input_grad[1]:
            grad_weight = float8_product(grad.t(), x.t(), ctx.recipe, of_gradient=True)
        return grad_x, grad_weight, None


def _float8(x: Any, weight: Any, recipe: str) -> torch.Tensor:
    return _Float8.apply(x, weight, recipe)  # pyright: ignore[reportReturnType]


@cache
def _tell_compiler() -> None:
    """The compiler of torch 2.10 cannot look into an autograd.Function below torch.func: it takes the call as it is."""
    torch.compiler.allow_in_graph(_float8)


class Float8Linear(nn.Linear):
    """A linear layer whose products are computed in float8. x [..., in] -> [..., out]."""

    recipe: str
    """One of `FLOAT8`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.reshape(-1, self.in_features)
        y = _float8(rows, self.weight, self.recipe)
        if self.bias is not None:
            y = y + self.bias
        return y.view(*input.shape[:-1], self.out_features)


class LayerProducts:
    """How products of `layers` are computed until `close`. `dtype`: of their weights; `tiled`: whether some come in
    tiles.

    Raises ValueError for what cannot be on this device, with this type or in tiles."""

    def __init__(
        self, name: str, layers: Sequence[nn.Module], device: torch.device, dtype: torch.dtype, *, tiled: bool
    ) -> None:
        self.name, self._changed = name, []
        self._was = torch.backends.cuda.matmul.allow_fp16_accumulation
        if why := self._why_not(device, dtype, tiled):
            raise ValueError(f"matmul {name} {why}. Leave --matmul out")
        if name == "fp16_accumulation":
            torch.backends.cuda.matmul.allow_fp16_accumulation = True
        elif name in FLOAT8:
            _tell_compiler()
            self._change([found for layer in layers for found in layer.named_modules()])

    def _why_not(self, device: torch.device, dtype: torch.dtype, tiled: bool) -> str:
        computes_in = str(dtype).removeprefix("torch.")
        if self.name == "fp16_accumulation":
            if device.type != "cuda":
                return "is a switch of NVIDIA's GPUs, and this run has none"
            return "" if dtype is torch.float16 else f"sums products of fp16, and this run computes in {computes_in}"
        if self.name not in FLOAT8:
            return ""
        if dtype is not torch.bfloat16:
            return f"gives results in bf16, and this run computes in {computes_in}"
        if tiled:
            return "takes whole weights, and some layers of this run are computed in tiles"
        try:
            ones = torch.ones(MULTIPLE, MULTIPLE, dtype=dtype, device=device)
            float8_product(ones, ones, self.name, of_gradient=False)
        except RuntimeError as error:
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
            return f"is nothing that {name} does ({str(error).splitlines()[0]})"
        return ""

    def _change(self, named: Sequence[tuple[str, nn.Module]]) -> None:
        for path, module in named:
            is_wide = isinstance(module, nn.Linear) and not (
                module.in_features % MULTIPLE or module.out_features % MULTIPLE
            )
            stays = "lora_" in path or not ROUTERS.isdisjoint(path.split("."))
            if type(module) is not nn.Linear or not is_wide or stays:
                continue
            module.__class__ = Float8Linear
            module.__dict__["recipe"] = self.name
            self._changed.append(module)

    def words(self) -> str:
        """For people; '' where products are the run's own."""
        if self.name == "same":
            return ""
        return self.name + (f", {len(self._changed)} linear layers" if self.name in FLOAT8 else "")

    def close(self) -> None:
        """Products are the run's own again."""
        for module in self._changed:
            module.__class__ = nn.Linear
            del module.__dict__["recipe"]
        self._changed = []
        if self.name == "fp16_accumulation":
            torch.backends.cuda.matmul.allow_fp16_accumulation = self._was

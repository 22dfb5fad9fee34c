"""Matrix products of layers in fewer bits than the run's, where somebody asks for them: other numerics, for speed.

float8: the operands of a linear layer's three products (output, gradient of the input, gradient of the weight) are
rounded to 8 bits with scales made anew each time (`float8`: torchao's recipes, whose own modules torch.func cannot
differentiate) and multiplied by the tensor cores, which sum in fp32. Embedding, head, routers and stacks of experts
stay as they are.

`fp16_accumulation`: products of fp16 are summed in fp16 as well, which doubles their rate on GeForce cards. torch's own
switch, which holds for the whole process while the engine is open.

Matrices rounded to 8 bits, and their products on the tensor cores: the two recipes of torchao.float8.

A matrix is multiplied by a factor and rounded, and its products are divided by that again. The factor is the format's
largest value over the matrix's: one for all of it (`float8_tensorwise`; gradients of the output in e5m2, the rest in
e4m3) or one for each row, rounded down to a power of two (`float8_rowwise`; all in e4m3). Rounding is one operation,
which the compiler does not look into: on a GPU two kernels (`float8_kernel`), elsewhere what they compute, in torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

FLOAT8 = ("float8_tensorwise", "float8_rowwise")
MULTIPLE = 16
"""The tensor cores want both sides of a matrix in 8 bits to be multiples of this."""
LEAST_AMAX = 1e-12
"""Stands for the largest value of a matrix of zeros, as in torchao."""
TILE = (64, 128, 4)
"""Rows, columns and warps of one program of the kernels."""
MOST_COLUMNS = 32768
"""Rows up to this long are read once, by a program that holds them whole."""


def _rounded(rows: torch.Tensor, recipe: str, dtype: torch.dtype) -> list[torch.Tensor]:
    """rows [n, k] -> [in 8 bits [n, k]; what each row is to be multiplied by again, [n, 1], or all by, []]."""
    by_row = recipe == "float8_rowwise"
    amax = rows.abs().amax(1, keepdim=True) if by_row else rows.abs().amax()
    factor = (torch.finfo(dtype).max / amax.double().clamp(min=LEAST_AMAX)).float()
    if by_row:
        factor = torch.exp2(torch.floor(torch.log2(factor)))
    return [(rows.float() * factor).to(dtype).contiguous(), factor.reciprocal()]


@torch.library.custom_op("outcore::float8_rounded", mutates_args=())
def float8_rounded(matrix: torch.Tensor, recipe: str, of_gradient: bool, both: bool) -> list[torch.Tensor]:
    """matrix [n, k], bf16 -> [it in 8 bits; what its rows [n, 1] or all of it [] are to be multiplied by again, fp32].

    `both`: behind these, the same of the transposed matrix, whose rows are filled up with zeros to whole `MULTIPLE`s.
    `of_gradient`: the matrix is one."""
    n, dtype = len(matrix), _type_of(recipe, of_gradient)
    places = _places(matrix, recipe, dtype, both)
    if not matrix.numel():  # an expert that no token chose
        return places
    if matrix.device.type == "cuda":
        round_by_kernels(matrix.contiguous(), recipe, places)
        return places
    found = _rounded(matrix, recipe, dtype)
    if both:
        turned, scale = _rounded(matrix.t(), recipe, dtype)
        found += [pad(turned.view(torch.uint8), (0, -n % MULTIPLE)).view(dtype), scale]
    return found


@float8_rounded.register_fake
def _(matrix: torch.Tensor, recipe: str, of_gradient: bool, both: bool) -> list[torch.Tensor]:
    return _places(matrix, recipe, _type_of(recipe, of_gradient), both)


def _type_of(recipe: str, of_gradient: bool) -> torch.dtype:
    return torch.float8_e5m2 if of_gradient and recipe == "float8_tensorwise" else torch.float8_e4m3fn


def _places(matrix: torch.Tensor, recipe: str, dtype: torch.dtype, both: bool) -> list[torch.Tensor]:
    n, k = matrix.shape
    found = []
    for rows, columns in ((n, k), (k, n + -n % MULTIPLE))[: 1 + both]:
        found.append(matrix.new_empty((rows, columns), dtype=dtype))
        found.append(matrix.new_empty((rows, 1) if recipe == "float8_rowwise" else (), dtype=torch.float32))
    return found


def round_by_kernels(matrix: torch.Tensor, recipe: str, places: Sequence[torch.Tensor]) -> None:
    """Write what `float8_rounded` gives of a contiguous matrix to `places`, by Triton's kernels."""
    from outcore.model.forward import float8_kernel

    kernels: Any = float8_kernel
    (n, k), by_row, both = matrix.shape, recipe == "float8_rowwise", len(places) == 4
    out, scale, turned, turned_scale = places if both else (*places, *places)
    bits, limits = matrix.view(torch.int16), {"MOST": torch.finfo(out.dtype).max, "LEAST": LEAST_AMAX}
    if by_row and not both and k <= MOST_COLUMNS:
        whole = 1 << (k - 1).bit_length()
        rows, warps = max(1, 8192 // whole), max(4, whole // 2048)
        grid = (-(-n // rows),)
        kernels.rounded_rows[grid](bits, out.view(torch.uint8), scale, n, k, **limits, N=rows, K=whole, num_warps=warps)
        return
    rows, columns, warps = TILE
    tops = torch.zeros(n + k if by_row else 1, dtype=torch.int32, device=matrix.device)
    given, grid = (bits, tops, tops[n:]), (-(-n // rows), -(-k // columns))
    shape = {"BY_ROW": by_row, "BOTH": both, "N": rows, "K": columns, "num_warps": warps}
    kernels.largest[grid](*given, n, k, **shape)
    kernels.rounded[grid](
        *given,
        out.view(torch.uint8),
        scale,
        turned.view(torch.uint8),
        turned_scale,
        n,
        k,
        turned.shape[1],
        WIDE=out.dtype is torch.float8_e5m2,
        **limits,
        **shape,
    )


def float8_product(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor], *, fast_sums: bool) -> torch.Tensor:
    """left [n, k], right [m, k], each with its scales -> left right' [n, m] in bf16."""
    (a, scale_a), (b, scale_b) = left, right
    if not a.numel():
        return scale_a.new_zeros((len(a), len(b)), dtype=torch.bfloat16)
    return torch.ops.aten._scaled_mm(  # what torchao calls; torch has no public name for it
        a, b.t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=torch.bfloat16, use_fast_accum=fast_sums
    )


MATMULS = ("same", *FLOAT8, "fp16_accumulation")
ROUTERS = frozenset({"gate", "router"})
"""Names of what chooses a mixture's experts: a linear layer, or a module around it."""


class _Float8(torch.autograd.Function):
    """x [n, in], weight [out, in] -> [n, out], differentiable, also for `torch.func`.

    Both are rounded for the way back as well while they are read: to results of their own, which are for nobody."""

    @staticmethod
    def forward(x: Any, weight: Any, recipe: str) -> tuple[torch.Tensor, ...]:
        x, weight = float8_rounded(x, recipe, False, True), float8_rounded(weight, recipe, False, True)
        return float8_product(x[:2], weight[:2], fast_sums=True), *x[2:], *weight[2:]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.recipe = inputs[-1]
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors[:2], ctx.saved_tensors[2:]
        to_x, to_weight, _ = ctx.needs_input_grad
        grad = float8_rounded(grad_outputs[0], ctx.recipe, True, to_weight)
        grad_x = float8_product(grad[:2], weight, fast_sums=False) if to_x else None
        grad_weight = float8_product(grad[2:], x, fast_sums=False) if to_weight else None
        return grad_x, grad_weight, None


def _float8(x: Any, weight: Any, recipe: str) -> torch.Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Float8.apply(x, weight, recipe)[0]  # pyright: ignore[reportOptionalSubscript]
    return float8_product(*(float8_rounded(side, recipe, False, False) for side in (x, weight)), fast_sums=True)


@cache
def _tell_compiler() -> None:
    """The compiler of torch 2.10 cannot look into an autograd.Function below torch.func: it takes the call as it is.
    What it compiles from now on rounds a matrix once for all that take it."""
    from torch._inductor import config as inductor_config

    from outcore.model.forward.shared_rounding import SharedRounding

    torch.compiler.allow_in_graph(_float8)
    inductor_config.post_grad_custom_pre_pass = SharedRounding()


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
    """Way in which products of `layers` are computed until `close`. `dtype`: of their weights; `tiled`: whether some
    come in tiles.

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
            side = ones.to(torch.float8_e4m3fn), ones[:, :1].float() if "row" in self.name else ones[0, 0].float()
            float8_product(side, side, fast_sums=True)  # before the kernels, which other GPUs cannot even compile
            _float8(ones, ones, self.name)
        except (RuntimeError, ImportError) as error:
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
        """Text for people; '' where products are the run's own."""
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

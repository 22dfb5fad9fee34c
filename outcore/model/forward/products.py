"""Matrix products of layers in fewer bits than the run's, where somebody asks for them: other numerics, for speed.

float8: the operands of a linear layer's three products (output, gradient of the input, gradient of the weight) are
rounded to 8 bits with scales made anew each time (`float8`: torchao's recipes, whose own modules torch.func cannot
differentiate) and multiplied by the tensor cores, which sum in fp32. Embedding, head, routers and stacks of experts
stay as they are.

`fp16_accumulation`: products of fp16 are summed in fp16 as well, which doubles their rate on GeForce cards. torch's own
switch, which holds for the whole process while the engine is open.

A pass of torch's compiler: what several linear layers take (queries, keys and values; a gate and what it gates) is
rounded to 8 bits once. The compiler itself joins equal operations only in graphs that it differentiates. Imported where
layers multiply in float8 only, as it imports the compiler."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from outcore.model.forward.float8 import FLOAT8, MULTIPLE, float8_product, float8_rounded

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


VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


class SharedRounding(CustomGraphPass):
    """Leaves the first of equal views and roundings in a graph without mutations."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        first: dict[str, torch.fx.Node] = {}
        for node in graph.nodes:
            if node.target in (*VIEWS, torch.ops.outcore.float8_rounded.default):
                kept = first.setdefault(repr((node.target, node.args, node.kwargs)), node)  # nodes by their names
                if kept is not node:
                    node.replace_all_uses_with(kept)
                    graph.erase_node(node)

    def uuid(self) -> bytes:
        return get_hash_for_files((__file__,))

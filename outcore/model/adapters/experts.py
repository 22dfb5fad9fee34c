"""LoRA on weights that hold all experts of a layer (peft's `target_parameters`), without a second copy of them.

peft adds s B_e A_e to every expert before any token comes: a whole stack more in memory, and its gradient again. Here
the stack's place is taken by an `AdaptedWeight`, to which the model's own code hands its tokens: a product with it is
the product with the frozen weight plus a thin one, expert after expert or grouped. Whatever else is done with it
happens to the merged stack, as in peft. The numbers are peft's up to rounding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

from outcore.model.weights import full_shape

GROUPED_ALIGN_BYTES = 16
"""Rows of the operands of a grouped product begin at multiples of it."""


def stacked_names(model: nn.Module) -> list[str]:
    """Names of the weights [experts, out, in] (or [experts, in, out]) of a model's layers."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if not type(module).__module__.startswith("torch.nn")  # a convolution's have three dimensions, too
        for name, parameter in module.named_parameters(recurse=False)
        if len(full_shape(parameter)) == 3
    ]


def add_to_products(model: nn.Module) -> None:
    """Have peft's adapters on parameters compute as above, in place."""
    for module in model.modules():
        if type(module).__name__ == "ParamWrapper":
            module.__class__ = _added_wrapper()


def thin_factors(wrapper: Any, down: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(A [experts, rank, in], B [experts, out, rank]) as views of what peft's `wrapper` holds for all experts at once
    (`down` [rank * experts, in], `up` [out, rank * experts])."""
    experts = wrapper.num_experts
    return down.view(experts, -1, down.shape[-1]), up.view(len(up), -1, experts).permute(2, 0, 1)


@torch.no_grad()
def merge_stack(wrapper: Any, weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The adapted weight, computed in fp32 one expert after another and rounded once."""
    (scale,) = wrapper.scaling.values()
    merged = torch.empty_like(weight)
    into, base = (merged, weight) if weight.ndim == 3 else (merged[None], weight[None])
    for target, own, a, b in zip(into, base, *thin_factors(wrapper, down, up), strict=True):
        delta = scale * (b.float() @ a.float()).to(own.device)
        target.copy_(own.float() + (delta if _has_outputs_first(wrapper) else delta.T))
    return merged


def _has_outputs_first(wrapper: Any) -> bool:
    return wrapper._did_swap_in_out_features or wrapper.num_experts == 1


class AdaptedWeight:
    """Stands for a frozen weight and its adapter: [out, in], or [in, out] where `outputs_first` is false, perhaps with
    the experts before. `down`: A [.., rank, in]; `up`: B [.., out, rank]."""

    def __init__(self, weight: Any, down: torch.Tensor, up: torch.Tensor, scale: float, *, outputs_first: bool) -> None:
        self.weight, self.down, self.up, self.scale, self.outputs_first = weight, down, up, scale, outputs_first
        self.shape, self.dtype, self.device, self.ndim = weight.shape, weight.dtype, weight.device, len(weight.shape)
        self._each: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.merged(), name)

    def __getitem__(self, index: Any) -> Any:
        """One expert, or [n, ..] of them by their numbers [n]."""
        if isinstance(index, torch.Tensor) and index.ndim == 1 and index.dtype == torch.long and self.ndim == 3:
            return self._of(self.weight[index], self.down[index], self.up[index]).merged()
        if self.ndim != 3 or not (isinstance(index, int) or (isinstance(index, torch.Tensor) and index.ndim == 0)):
            return self.merged()[index]
        if self._each is None:  # one gradient for all experts, not one of this size for each
            self._each = list(zip(self.down.unbind(), self.up.unbind(), strict=True))
        return self._of(self.weight[index], *self._each[int(index)])

    def transpose(self, first: int, second: int) -> Any:
        if {first % self.ndim, second % self.ndim} != {self.ndim - 2, self.ndim - 1}:
            return self.merged().transpose(first, second)
        weight = self.weight.transpose(first, second)
        return AdaptedWeight(weight, self.down, self.up, self.scale, outputs_first=not self.outputs_first)

    def _of(self, weight: Any, down: torch.Tensor, up: torch.Tensor) -> AdaptedWeight:
        return AdaptedWeight(weight, down, up, self.scale, outputs_first=self.outputs_first)

    def merged(self) -> torch.Tensor:
        """W + s B A, differentiable in A and B."""
        left, right = (self.up, self.down) if self.outputs_first else (self.down.mT, self.up.mT)
        return self.weight + self.scale * (left @ right)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, by_rows: bool) -> torch.Tensor:
        """x [.., in] -> [.., out] as F.linear (`by_rows`) or a matrix product calls for it."""
        if self.ndim != 2 or by_rows != self.outputs_first:
            return F.linear(x, self.merged(), bias) if by_rows else x @ self.merged()
        whole = F.linear(x, self.weight, bias) if by_rows else x @ self.weight
        return whole + self.scale * F.linear(F.linear(x, self.down), self.up)

    def grouped(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        """x [n, in], sorted by expert, whose rows end at `offs` [experts] -> [n, out]."""
        rank_bytes = self.down.shape[-2] * self.dtype.itemsize
        if self.outputs_first or rank_bytes % GROUPED_ALIGN_BYTES:
            return F.grouped_mm(x, self.merged(), offs=offs)
        thin = F.grouped_mm(x, self.down.mT, offs=offs)
        return F.grouped_mm(x, self.weight, offs=offs) + self.scale * F.grouped_mm(
            thin, self.up.mT.contiguous(), offs=offs
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if len(args) > 1 and isinstance(args[0], torch.Tensor) and isinstance(args[1], cls):
            x, weight = args[:2]
            if func is F.linear:
                return weight.product(x, *args[2:], **kwargs, by_rows=True)
            if func in _PRODUCTS and not (args[2:] or kwargs):
                return weight.product(x, by_rows=False)
            if func in _GROUPED and x.ndim == 2 and [n for n, v in kwargs.items() if v is not None] == ["offs"]:
                return weight.grouped(x, kwargs["offs"])
        merged = tree_map_only(cls, cls.merged, (args, kwargs), is_leaf=lambda value: isinstance(value, cls))
        return func(*merged[0], **merged[1])


_PRODUCTS = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm)
_GROUPED = (getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None))


@cache
def _added_wrapper() -> type[nn.Module]:
    from peft.tuners.lora.layer import ParamWrapper

    class AddedParamWrapper(ParamWrapper):
        """`ParamWrapper` that binds an `AdaptedWeight` while the module which holds the parameter runs."""

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            names = [name for name in self.active_adapters if name in self.lora_A]
            if self.disable_adapters or self.merged or len(names) != 1:
                return super().forward(x, *args, **kwargs)
            held: dict[str, Any] = self.get_base_layer()._parameters
            weight = held[self.parameter_name]
            down: Any = self.lora_A[names[0]]
            up: Any = self.lora_B[names[0]]
            factors = thin_factors(self, down.weight, up.weight)
            if weight.ndim == 2:
                factors = factors[0][0], factors[1][0]
            adapted = AdaptedWeight(
                weight, *factors, float(self.scaling[names[0]]), outputs_first=_has_outputs_first(self)
            )
            held[self.parameter_name] = adapted
            try:
                return self.base_layer(x, *args, **kwargs)
            finally:
                held[self.parameter_name] = weight

    return AddedParamWrapper

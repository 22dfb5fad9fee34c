"""DoRA: a trained length for each row of an adapted weight, whose direction the adapter turns (peft's `use_dora`)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

from outcore.model.facts import checkpoint_name


def check_dora(adapted: nn.Module) -> None:
    """ValueError for layers whose lengths are not those of the rows of one matrix."""
    for name, module in adapted.named_modules():
        if len(getattr(module, "lora_embedding_A", ())):
            raise ValueError(
                f"use_dora: {checkpoint_name(name)} is an embedding, whose lengths would be those of whole columns of "
                "its vocabulary. Leave it out of lora_target_modules, or train it whole (lora_modules_to_save)."
            )


def dora_lengths(model: nn.Module) -> dict[str, tuple[str, bool]]:
    """DoRA's lengths by checkpoint name: (name of the weight whose rows they are the norms of, whether it is stored
    transposed). At the start of training they are the base's, so that the model is the base."""
    return {
        checkpoint_name(f"{name}.lora_magnitude_vector.default.weight"): (
            checkpoint_name(f"{name}.base_layer.weight"),
            bool(module.fan_in_fan_out),
        )
        for name, module in model.named_modules()
        if len(getattr(module, "lora_magnitude_vector", ())) and hasattr(module, "base_layer")
    }


def multiply_dora(model: nn.Module) -> None:
    """Have DoRA layers multiply B and A by themselves. peft sends an identity of [in, in] through both instead (0.4 GB
    for an MLP of 14,336), because FSDP and ZeRO-3 give a weight to its own module only; here weights are whole."""
    for module in model.modules():
        if type(module).__name__ == "DoraLinearLayer":
            module.__class__ = _product_layer()


@cache
def _product_layer() -> type[nn.Module]:
    from peft.tuners.lora.dora import DoraLinearLayer

    class DoraProductLayer(DoraLinearLayer):
        def get_lora_weight(self, lora_A: Any, lora_B: Any, adapter_name: str | None = None) -> torch.Tensor:
            return lora_B.weight @ lora_A.weight

    return DoraProductLayer


def row_lengths(weight: torch.Tensor, *, is_transposed: bool) -> torch.Tensor:
    """L2 norms of the rows of `weight` [out, in] (of [in, out] when it is stored transposed), [out], as peft takes
    them."""
    return torch.linalg.norm(weight, dim=0 if is_transposed else 1).to(weight.dtype)

"""Attention over packed rows without a mask of T x T: torch's flash kernel for documents of various lengths.

transformers tells packed documents apart by a mask [B, 1, T, T], with which torch's fused attention cannot take its
flash kernel: every layer reads T x T bytes and computes the whole square. Here the mask is the documents' borders
(`borders`), and attention goes document by document: time grows with the sum of their squared lengths, and there is no
mask. The kernel is the one that torch takes for rows of one document, behind the same operator since torch 2.7, with
the same switch for a deterministic backward (`torch.use_deterministic_algorithms(True)`).

The function and its mask function are registered with transformers as `outcore_sdpa`. Whatever has no borders (rows of
one document, padded rows, sampling) goes to transformers' sdpa as it is, bit by bit. Where the kernel cannot be used
(CPU, fp32, dropout within attention, heads wider than 256) the mask is made from the borders, in each layer anew, and
sdpa does the rest: the same bits as with transformers' own mask. `packed_trial` decides who uses this."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from outcore.model.packed.borders import PACKED_ATTENTION, are_borders, known_borders, mask_of
from outcore.model.packed.kernel import by_kernel

KERNEL_TYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM, HEAD_DIM_STEP = 256, 8
"""Heads that the flash kernel takes as they are."""


def register() -> None:
    """Make the name known to transformers; again does no harm."""
    AttentionInterface.register(PACKED_ATTENTION, attend)
    AttentionMaskInterface.register(PACKED_ATTENTION, borders_or_mask)


def borders_or_mask(
    batch_size: int, q_length: int, kv_length: int, *args: Any, attention_mask: torch.Tensor | None = None, **more: Any
) -> torch.Tensor | None:
    """The borders of the micro-batch under way where they say all that the mask would; else sdpa's mask."""
    borders = known_borders()
    # use_vmap: the model adds a rule of its own to the mask, which borders cannot say
    if borders is not None and attention_mask is None and q_length == kv_length and not more.get("use_vmap"):
        return borders
    return sdpa_mask(batch_size, q_length, kv_length, *args, attention_mask=attention_mask, **more)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, H, T, D], key and value [B, H', T, D] -> [B, T, H, D]; as transformers' sdpa but for borders."""
    if are_borders(attention_mask):
        assert attention_mask is not None
        window = more.get("sliding_window")
        if kernel_takes(query, key, value, dropout, more):
            return by_kernel(query, key, value, attention_mask, scaling, window), None
        attention_mask = mask_of(attention_mask, query.shape[0], query.shape[2], window)
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)


def kernel_takes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, more: dict[str, Any]
) -> bool:
    """Whether the flash kernel computes what is asked. Shapes and types only: nothing is asked of the device."""
    width = query.shape[-1]
    return (
        has_kernel(query)
        and key.shape == value.shape
        and key.shape[-1] == width <= MAX_HEAD_DIM
        and width % HEAD_DIM_STEP == 0
        and key.shape[2] == query.shape[2]
        and query.shape[1] % key.shape[1] == 0
        and not dropout
        and all(more.get(name) is None for name in ("position_bias", "softcap", "s_aux", "cache"))
    )


def has_kernel(tensor: torch.Tensor) -> bool:
    """Whether the flash kernel is there for tensors of this device and type."""
    return tensor.is_cuda and tensor.dtype in KERNEL_TYPES

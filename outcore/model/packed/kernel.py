"""Torch's flash kernel for documents of various lengths that lie one behind another."""

from __future__ import annotations

import torch


def by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """[B, T, H, D] by the variable-length kernel. The longest document is taken to be a whole row, so that it is the
    same number for every batch; the kernel sees for itself where documents end."""
    rows, _, length, _ = query.shape
    flat = [x.transpose(1, 2).reshape(rows * length, x.shape[1], x.shape[3]) for x in (query, key, value)]
    output = torch.ops.aten._flash_attention_forward(
        *flat,
        borders,
        borders,
        length,
        length,
        0.0,
        True,  # causal
        False,
        scale=scaling,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]
    return output.view(rows, length, *output.shape[1:])

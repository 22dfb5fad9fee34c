"""Which tokens of a packed row may see each other. Legend: B micro-batch, T tokens of a row."""

import torch


def document_ids(position_ids_BT: torch.Tensor) -> torch.Tensor:
    """Number of each token's document, from 0 in every row; one begins where the position does not go up by one."""
    first = position_ids_BT[:, :1] - 1
    return (torch.diff(position_ids_BT, prepend=first, dim=-1) != 1).cumsum(-1)


def packed_attention_mask(position_ids_BT: torch.Tensor, *, sliding_window: int | None = None) -> torch.Tensor:
    """Causal mask that keeps packed documents apart, bool [B, 1, T, T]. `sliding_window`: tokens that one sees."""
    documents_BT = document_ids(position_ids_BT)
    places = torch.arange(position_ids_BT.shape[1], device=position_ids_BT.device)
    distance_TT = places[:, None] - places[None, :]
    near_TT = distance_TT >= 0
    if sliding_window is not None:
        near_TT &= distance_TT < sliding_window
    return (documents_BT[:, None, :, None] == documents_BT[:, None, None, :]) & near_TT

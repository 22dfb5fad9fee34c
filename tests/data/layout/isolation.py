"""Keeping packed documents apart inside the model. Legend: B micro-batch, T tokens of a row.

What transformers 5.23 does by itself (masking_utils, modeling_flash_attention_utils), given restarting position_ids:
- sdpa, eager, flex: isolates, for any micro-batch size, if the model hands position_ids to create_causal_mask AND no
  attention_mask is given AND there is no cache: the model must be called with use_cache=False, since with the default
  use_cache=True a cache is made in the forward and packing is silently not looked for.
- flash attention: looks for packing only at micro-batch size 1; above that it needs `varlen_kwargs`.
- models that never hand position_ids on (OPT, BLOOM, Falcon, MPT) mix the documents: they need `packed_attention_mask`.
- state-space and linear-attention layers carry their state over document borders, whatever the mask.
`isolates` finds out by experiment, so that no list of model names is needed.
"""

from collections.abc import Callable
from typing import Any

import torch


def document_ids(position_ids_BT: torch.Tensor) -> torch.Tensor:
    """Number of the document that each token belongs to, from 0 in every row; int64 [B, T].

    A document begins wherever the position does not go up by exactly one.
    """
    first = position_ids_BT[:, :1] - 1
    return (torch.diff(position_ids_BT, prepend=first, dim=-1) != 1).cumsum(-1)


def packed_attention_mask(
    position_ids_BT: torch.Tensor, *, dtype: torch.dtype = torch.bool, sliding_window: int | None = None
) -> torch.Tensor:
    """Causal mask that keeps packed documents apart, [B, 1, T, T]; transformers takes a 4-D mask as it is.

    bool (True = may attend) suits sdpa; a floating dtype gives the additive mask (0 or the dtype's minimum) that eager
    attention wants. `sliding_window`: a token sees at most so many tokens, itself included; models that mix full and
    sliding layers take a dict {"full_attention": ..., "sliding_attention": ...} of two masks. Costs B*T*T elements.
    """
    documents_BT = document_ids(position_ids_BT)
    length = position_ids_BT.shape[1]
    places = torch.arange(length, device=position_ids_BT.device)
    distance_TT = places[:, None] - places[None, :]
    near_TT = distance_TT >= 0
    if sliding_window is not None:
        near_TT &= distance_TT < sliding_window
    mask_B1TT = (documents_BT[:, None, :, None] == documents_BT[:, None, None, :]) & near_TT
    if dtype == torch.bool:
        return mask_B1TT
    zero = torch.zeros((), dtype=dtype, device=position_ids_BT.device)
    return torch.where(mask_B1TT, zero, torch.finfo(dtype).min)


def varlen_kwargs(position_ids_BT: torch.Tensor) -> dict[str, Any]:
    """Keyword arguments for a model with flash attention: document borders over the flattened micro-batch.

    cu_seq_lens_q / cu_seq_lens_k int32 [documents + 1], max_length_q / max_length_k int. Exact for any micro-batch size
    (transformers flattens [B, T] itself). Moves one number to the host.
    """
    flat = position_ids_BT.reshape(-1)
    begins = torch.diff(flat, prepend=flat[:1] - 2) != 1
    begins[:: position_ids_BT.shape[1]] = True
    starts = torch.nonzero(begins).reshape(-1).to(torch.int32)
    borders = torch.cat([starts, starts.new_tensor([flat.numel()])])
    longest = int(torch.diff(borders).max())
    return {"cu_seq_lens_q": borders, "cu_seq_lens_k": borders, "max_length_q": longest, "max_length_k": longest}


def isolates(
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    vocab_size: int,
    *,
    device: torch.device | str = "cpu",
    rows: int = 2,
    document_length: int = 8,
) -> bool:
    """True when changing a packed document leaves the outputs of its neighbours bit for bit as they were.

    `forward(input_ids [B, T], position_ids [B, T]) -> logits or hidden states [B, T, ...]` runs the model in evaluation
    mode exactly as training will call it. Two forwards of `rows` x 3 documents; no gradients.
    """
    generator = torch.Generator().manual_seed(0)
    length = 3 * document_length
    input_ids = torch.randint(0, vocab_size, (rows, length), generator=generator)
    changed = input_ids.clone()
    changed[:, :document_length] = (changed[:, :document_length] + 1) % vocab_size
    position_ids = (torch.arange(length) % document_length).expand(rows, -1).contiguous()
    with torch.no_grad():
        before = forward(input_ids.to(device), position_ids.to(device))
        after = forward(changed.to(device), position_ids.to(device))
    return bool(torch.equal(before[:, document_length:], after[:, document_length:]))

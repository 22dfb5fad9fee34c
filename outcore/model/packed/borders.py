"""Borders: where documents begin in packed rows: borders, a few numbers in place of a mask of T x T. Legend: B rows,
T tokens.

Borders are cumulative lengths of the documents over the flattened micro-batch, 0, ..., B*T, as variable-length kernels
take them: a 1-D int32 tensor, told from every other mask by its type and shape. Each row begins a document.
The total is repeated at the end, which adds documents of no length, so that shapes are few: compiled layers and CUDA
graphs see one, or two, for a run. The number of entries depends on the micro-batch alone, never on what came before.

`borders_known` makes them known to the mask function (`packed_attention`) for the time of a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

PACKED_ATTENTION = "outcore_sdpa"
"""The attention that takes borders for a mask, among transformers' implementations."""
TOKENS_PER_ENTRY = 256
"""There are at least this many times fewer entries than tokens, whatever the documents, so that most batches of usual
text have one shape. A document of no length costs the backward kernel 128 rows of scratch, and no time to speak of."""
MIN_TOKENS_PER_DOCUMENT = 32
MIN_ENTRIES, FEW_ENTRIES = 16, 64
"""Above FEW_ENTRIES documents shorter than MIN_TOKENS_PER_DOCUMENT on average get a mask: for each document the
backward kernel keeps 128 rows of gradients in fp32, which would outgrow everything else."""

_KNOWN: ContextVar[torch.Tensor | None] = ContextVar("borders of the micro-batch under way", default=None)


def borders_of(position_ids: torch.Tensor) -> torch.Tensor | None:
    """position_ids [B, T] on the CPU -> borders; None for documents so short that a mask serves better.

    A document begins at every row and wherever the position does not go up by one, as transformers sees it."""
    begins = torch.ones(position_ids.shape, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff(dim=-1) != 1
    starts = begins.flatten().nonzero().flatten()
    entries = num_entries(len(starts), begins.numel())
    if entries is None:
        return None
    borders = torch.full((entries,), begins.numel(), dtype=torch.int32)
    borders[: len(starts)] = starts
    return borders


def num_entries(documents: int, tokens: int) -> int | None:
    """Entries of the borders for this many documents: a power of two; None when the documents are too short."""
    entries = _power_of_two(max(documents + 1, tokens // TOKENS_PER_ENTRY, MIN_ENTRIES))
    return entries if entries <= max(FEW_ENTRIES, _power_of_two(tokens // MIN_TOKENS_PER_DOCUMENT)) else None


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def are_borders(mask: object) -> bool:
    """Whether what a layer got for a mask are borders."""
    return isinstance(mask, torch.Tensor) and mask.ndim == 1 and mask.dtype == torch.int32


@contextmanager
def borders_known(borders: torch.Tensor | None) -> Iterator[None]:
    """Within this context masks of packed rows are these borders (where the model's attention takes them)."""
    token = _KNOWN.set(borders)
    try:
        yield
    finally:
        _KNOWN.reset(token)


def known_borders() -> torch.Tensor | None:
    """Borders of the micro-batch under way; None where nobody said."""
    return _KNOWN.get()


def mask_of(borders: torch.Tensor, rows: int, length: int, window: int | None = None) -> torch.Tensor:
    """The boolean mask [B, 1, T, T] that borders stand for: causal, within documents and, if given, the window.

    `window`: a token sees itself and the window - 1 tokens before it. Costs B*T*T bytes; asks nothing of the device."""
    places = torch.arange(rows * length, dtype=torch.int32, device=borders.device)
    documents = torch.searchsorted(borders, places, right=True).view(rows, 1, length)
    index = torch.arange(length, device=borders.device)
    near = index[:, None] >= index[None, :]
    if window is not None:
        near = near & (index[None, :] > index[:, None] - window)
    return (documents[..., :, None] == documents[..., None, :]) & near

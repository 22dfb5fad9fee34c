"""Whether rows are packed is known on the host before a step: transformers need not ask the device for it.

Its mask code looks for restarts in `position_ids` on the device and waits for the answer, once per run of a decoder. A
wait drains the queue of work that keeps the GPU busy, at every micro-batch's embedding and head: 9 % of a step of a
1.2 B model (M). `packing_known` answers in its place, by the same rule, for as long as the context lasts; a version of
transformers without that function works as it did, with the waits.

Where documents begin is known on the host as well, and where attention takes their borders (`packed_rows`) it gets
these instead of masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from outcore.model.packed import borders_known, borders_of

QUESTION = "find_packed_sequence_indices"
"""In transformers.masking_utils: position_ids [B, T] -> documents' numbers [B, T], or None when not packed."""


class DeviceBatch(dict[str, torch.Tensor]):
    """A micro-batch on the device that knows from its host copy whether it is packed, and where documents begin."""

    def __init__(self, batch: Mapping[str, torch.Tensor], device: torch.device) -> None:
        positions = batch.get("position_ids")
        self.is_packed = positions is not None and bool((positions.diff(dim=-1) != 1).any())
        borders = borders_of(positions) if positions is not None and self.is_packed else None
        self.borders = None if borders is None else borders.to(device, non_blocking=True)
        """On the device; None when not packed, or when documents are so short that masks serve better."""
        super().__init__({name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()})


@contextmanager
def packing_known(is_packed: bool | None, borders: torch.Tensor | None = None) -> Iterator[None]:
    """Within this context transformers takes this for granted (None: it asks the device), and so does packed
    attention."""
    from transformers import masking_utils

    before = getattr(masking_utils, QUESTION, None)
    if is_packed is None or before is None:
        yield
        return
    setattr(masking_utils, QUESTION, document_numbers if is_packed else lambda position_ids: None)
    try:
        with borders_known(borders if is_packed else None):
            yield
    finally:
        setattr(masking_utils, QUESTION, before)


def document_numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """[B, T] -> [B, T], counting up where positions do not go on by one."""
    before_first = position_ids[:, :1] - 1
    return (torch.diff(position_ids, prepend=before_first, dim=-1) != 1).cumsum(-1)

"""Expanding a packed weight without a compiler takes memory for a chunk of values, however large the weight is."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outcore.common.quantities import MIB
from outcore.formats import PackedSpec, packed_format
from outcore.formats.packed import CHUNK_NUMEL

MOST_BYTES_PER_VALUE = 13
"""Of a chunk: codes as int32 and as fp32, their table's values, products, and what they are made of."""


class LiveBytes(TorchDispatchMode):
    """Bytes of tensors that were made inside and still live, at their most."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        found = func(*args, **(kwargs or {}))
        for made in tree_leaves(found):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in before:
                self._made(made.untyped_storage().nbytes(), made)
        return found

    def _made(self, n_bytes: int, tensor: torch.Tensor) -> None:
        self.now += n_bytes
        self.peak = max(self.peak, self.now)
        weakref.finalize(tensor, self._gone, n_bytes)

    def _gone(self, n_bytes: int) -> None:
        self.now -= n_bytes


@pytest.mark.parametrize("name", ["nf4", "int8", "mxfp4", "int4_128_fp16", "q4_k", "q6_k", "q8_0"])
def test_temporaries_do_not_grow_with_the_weight(name: str) -> None:
    peaks = []
    for chunks in (1, 3):
        spec = PackedSpec(packed_format(name), (chunks * CHUNK_NUMEL // 1024, 1024))
        data, out = torch.zeros(spec.size_bytes, dtype=torch.uint8), torch.empty(spec.shape, dtype=torch.bfloat16)
        with LiveBytes() as live:
            spec.expand(data, out)
        peaks.append(live.peak)
    assert peaks[1] <= peaks[0] + MIB and peaks[0] <= MOST_BYTES_PER_VALUE * CHUNK_NUMEL

"""torch's variable-length flash kernel, imitated on the CPU: the same operators, so that everything around them runs.

Documents one by one, as the operator's arguments say: borders over flattened tokens, causal, a window to the left.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from outcore.model.packed import attention as packed_attention


def _documents(query, key, value, borders, max_length, scale, left):
    """For each document (its tokens, q, k, v as [H, n, D] in fp64, scores [H, n, n])."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeat, 1) for x in (key, value))
    for start, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        assert 0 <= start <= end <= len(query) and end - start <= max_length
        q, k, v = (x[start:end].transpose(0, 1).double() for x in (query, key, value))
        places = torch.arange(end - start)
        seen = places[:, None] >= places[None, :]
        if left is not None:
            seen &= places[:, None] - places[None, :] <= left
        yield slice(start, end), q, k, v, (q @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf"))


def _forward(
    query, key, value, cum_q, cum_k, max_q, max_k, dropout, causal, debug, *, scale=None, window_size_left=None,
    window_size_right=None, **rest
):  # fmt: skip
    assert torch.equal(cum_q, cum_k) and cum_q.dtype == torch.int32 and int(cum_q[-1]) == len(query)
    assert max_q == max_k and causal and not dropout and not debug
    assert (window_size_left is None) == (window_size_right is None) and not window_size_right
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output = torch.full_like(query, float("nan"))
    sums = torch.empty(query.shape[1], len(query))
    for tokens, _, _, v, scores in _documents(query, key, value, cum_q, max_q, scale, window_size_left):
        output[tokens] = (scores.softmax(-1) @ v).transpose(0, 1).to(query.dtype)
        sums[:, tokens] = scores.logsumexp(-1).float()
    state = torch.zeros(2, dtype=torch.uint64)
    return output, sums, state, torch.zeros((), dtype=torch.uint64), torch.empty(0, dtype=query.dtype)


def _backward(
    grad, query, key, value, output, sums, cum_q, cum_k, max_q, max_k, dropout, causal, seed, unused, *, scale=None,
    window_size_left=None, window_size_right=None
):  # fmt: skip
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    grads = [torch.full_like(query, float("nan")) for _ in range(3)]  # of k and v for every head of q
    for tokens, q, k, v, scores in _documents(query, key, value, cum_q, max_q, scale, window_size_left):
        chances, above = scores.softmax(-1), grad[tokens].transpose(0, 1).double()
        of_chances = above @ v.transpose(1, 2)
        of_scores = chances * (of_chances - (of_chances * chances).sum(-1, keepdim=True)) * scale
        found = (of_scores @ k, of_scores.transpose(1, 2) @ q, chances.transpose(1, 2) @ above)
        for total, part in zip(grads, found, strict=True):
            total[tokens] = part.transpose(0, 1).to(total.dtype)
    groups = (len(query), key.shape[1], -1, key.shape[2])
    return grads[0], grads[1].view(groups).sum(2), grads[2].view(groups).sum(2)


@contextmanager
def imitated() -> Iterator[list[int]]:
    """Inside, the packed attention takes the operator on the CPU, in every type; the length of the borders of each call
    of its forward is noted."""
    calls: list[int] = []

    def forward(*args, **kwargs):
        calls.append(len(args[3]))
        return _forward(*args, **kwargs)

    library = torch.library.Library("aten", "IMPL")
    with pytest.MonkeyPatch.context() as patch:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", _backward, "CPU")
        patch.setattr(packed_attention, "has_kernel", lambda tensor: True)
        try:
            yield calls
        finally:
            library._destroy()

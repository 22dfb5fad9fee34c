"""From logits to tokens, all rows of a pass at once: a row's token depends on that row and its request alone.

Greedy rows take the first likeliest token. Others are cut by top-k, top-p and min-p, and drawn by the inverse of the
distribution function at a number that (seed, position) gives. A drafted token is right exactly when it is the one that
would have been drawn, so speculation changes no text, greedy or not. Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outcore.infer.requests.draws import uniform
from outcore.infer.requests.sampling import Sampling

DRAWN_AT_ONCE = 32
"""Rows sorted together: each takes about 44 bytes for every token of the vocabulary meanwhile."""


@dataclass(frozen=True)
class Row:
    """What a choice depends on, besides the logits."""

    sampling: Sampling
    seed: int
    position: int
    """Place of the token in its sequence, from 0 at the prompt's start: the generator's counter."""
    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()
    forbidden: Sequence[int] = ()
    """Tokens that may not come now: ends, while `min_tokens` is not reached."""
    mask: torch.Tensor | None = None
    """Bool [V]: tokens that a grammar allows; None: all."""


@dataclass(frozen=True)
class Chosen:
    """One token, and what was asked about its likelihood (natural logarithms of the model's own probabilities)."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def choose(logits_RV: torch.Tensor, rows: Sequence[Row]) -> list[Chosen]:
    """A token for every row. Logits may be of any float type; they are not changed."""
    adjusted = _adjusted(logits_RV, rows)
    greedy = [i for i, row in enumerate(rows) if row.sampling.is_greedy]
    drawn = [i for i, row in enumerate(rows) if not row.sampling.is_greedy]
    tokens = [0] * len(rows)
    if greedy:
        for i, token in zip(greedy, adjusted[_at(greedy, len(rows))].argmax(-1).tolist(), strict=True):
            tokens[i] = token
    for start in range(0, len(drawn), DRAWN_AT_ONCE):
        some = drawn[start : start + DRAWN_AT_ONCE]
        found = _draw(adjusted[_at(some, len(rows))].float(), [rows[i] for i in some])
        for i, token in zip(some, found, strict=True):
            tokens[i] = token
    return _with_logprobs(logits_RV, rows, tokens)


def _at(places: list[int], count: int) -> list[int] | slice:
    return slice(None) if len(places) == count else places


def _adjusted(logits_RV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Logits after biases, penalties and masks: the same tensor where no row has any."""
    touched = [i for i, r in enumerate(rows) if not r.sampling.is_plain or r.forbidden or r.mask is not None]
    if not touched:
        return logits_RV
    adjusted = logits_RV.float().clone()
    for i in touched:
        _adjust(adjusted[i], rows[i])
    return adjusted


def _adjust(logits_V: torch.Tensor, row: Row) -> None:
    sampling, device = row.sampling, logits_V.device
    if sampling.repetition_penalty != 1 and (row.prompt or row.answer):
        seen = torch.tensor(sorted({*row.prompt, *row.answer}), device=device)
        values = logits_V[seen]
        rate = sampling.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / rate, values * rate)
    if row.answer and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(row.answer)
        said = torch.tensor(list(counts), device=device)
        times = torch.tensor(list(counts.values()), dtype=torch.float32, device=device)
        logits_V[said] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=device)
        logits_V[ids] += torch.tensor(list(sampling.logit_bias.values()), device=device)
    if row.mask is not None:
        logits_V.masked_fill_(~row.mask.to(device), float("-inf"))
    if row.forbidden:
        logits_V[torch.tensor(list(row.forbidden), device=device)] = float("-inf")


def _draw(logits_RV: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    device, vocab = logits_RV.device, logits_RV.shape[-1]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    temperature = column([row.sampling.temperature for row in rows]).float()
    ordered, ids = torch.sort(logits_RV / temperature, dim=-1, descending=True, stable=True)
    weights = torch.softmax(ordered, dim=-1).double()
    rank = torch.arange(vocab, device=device)
    keep = rank < column([float(row.sampling.top_k or vocab) for row in rows])
    keep &= weights >= weights[:, :1] * column([row.sampling.min_p for row in rows])
    weights = weights * keep
    before = weights.cumsum(-1) - weights  # of likelier tokens, among those that top-k and min-p left
    keep &= before < weights.sum(-1, keepdim=True) * column([row.sampling.top_p for row in rows])
    keep[:, 0] = True
    total = (weights * keep).cumsum(-1)
    wanted = column([uniform(row.seed, row.position) for row in rows]) * total[:, -1:]
    place = torch.searchsorted(total, wanted, right=True).clamp_max(vocab - 1)
    place = torch.minimum(place, keep.sum(-1, keepdim=True) - 1)  # kept tokens come first
    return ids.gather(-1, place)[:, 0].tolist()


def _with_logprobs(logits_RV: torch.Tensor, rows: Sequence[Row], tokens: list[int]) -> list[Chosen]:
    asked = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    chosen = [Chosen(token) for token in tokens]
    if not asked:
        return chosen
    logprobs = torch.log_softmax(logits_RV[asked].float(), dim=-1)
    most = max(rows[i].sampling.logprobs or 0 for i in asked)
    values, ids = logprobs.topk(most, dim=-1) if most else (logprobs[:, :0], logprobs[:, :0].long())
    of_tokens = logprobs.gather(-1, torch.tensor([[tokens[i]] for i in asked], device=logits_RV.device))[:, 0]
    for i, own, top_ids, top in zip(asked, of_tokens.tolist(), ids.tolist(), values.tolist(), strict=True):
        wanted = rows[i].sampling.logprobs or 0
        chosen[i] = Chosen(tokens[i], own, tuple(zip(top_ids[:wanted], top[:wanted], strict=True)))
    return chosen

"""From logits to tokens, all rows of a pass at once: a row's token depends on that row and its request alone.

Greedy rows take the first likeliest token. Others are cut by top-k, top-p and min-p, and drawn by the inverse of the
distribution function at a number that (seed, position) gives. A drafted token is right exactly when it is the one that
would have been drawn, so speculation changes no text, greedy or not. Legend: R rows, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outcore.infer.requests.draws import uniform
from outcore.infer.requests.sampling import Sampling


@dataclass(frozen=True)
class Row:
    """Input of one token's choice, besides the logits."""

    sampling: Sampling
    seed: int
    position: int
    """Place of the token in its sequence, from 0 at the prompt's start: the generator's counter."""
    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()
    forbidden: Sequence[int] = ()
    """Tokens that may not come now: ends, while `min_tokens` is not reached."""
    mask: torch.Tensor | None = None
    """uint8 [V / 8]: a bit for each token that a grammar allows, the lowest first; tokens beyond are not. None: all."""


@dataclass(frozen=True)
class Chosen:
    """One token, and what was asked about its likelihood (natural logarithms of the model's own probabilities)."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


Send = Callable[[torch.Tensor], torch.Tensor]


def choose(logits_RV: torch.Tensor, rows: Sequence[Row], send: Send | None = None) -> list[Chosen]:
    """A token for every row. Logits may be of any float type; they are not changed. `send`: takes small tensors of the
    CPU's to where the logits are; None: by ordinary copies."""
    send = send or (lambda values: values.to(logits_RV.device))
    adjusted = _adjusted(logits_RV, rows, send)
    greedy = [i for i, row in enumerate(rows) if row.sampling.is_greedy]
    drawn = [i for i, row in enumerate(rows) if not row.sampling.is_greedy]
    tokens = [0] * len(rows)
    if greedy:
        for i, token in zip(greedy, _rows_at(adjusted, greedy, send).argmax(-1).tolist(), strict=True):
            tokens[i] = token
    if drawn:
        found = _draw(_rows_at(adjusted, drawn, send).float(), [rows[i] for i in drawn], send)
        for i, token in zip(drawn, found, strict=True):
            tokens[i] = token
    return _with_logprobs(logits_RV, rows, tokens, send)


def _rows_at(logits_RV: torch.Tensor, places: list[int], send: Send) -> torch.Tensor:
    return logits_RV if len(places) == len(logits_RV) else logits_RV[send(torch.tensor(places))]


def _adjusted(logits_RV: torch.Tensor, rows: Sequence[Row], send: Send) -> torch.Tensor:
    """Logits after biases, penalties and masks: the same tensor where no row has any."""
    touched = [i for i, r in enumerate(rows) if not r.sampling.is_plain or r.forbidden or r.mask is not None]
    if not touched:
        return logits_RV
    adjusted = logits_RV.float().clone()
    for i in touched:
        _adjust(adjusted[i], rows[i], send)
    return adjusted


def _adjust(logits_V: torch.Tensor, row: Row, send: Send) -> None:
    sampling = row.sampling
    if sampling.repetition_penalty != 1 and (row.prompt or row.answer):
        seen = send(torch.tensor(sorted({*row.prompt, *row.answer})))
        values = logits_V[seen]
        rate = sampling.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / rate, values * rate)
    if row.answer and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(row.answer)
        said = send(torch.tensor(list(counts)))
        times = send(torch.tensor(list(counts.values()), dtype=torch.float32))
        logits_V[said] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if sampling.logit_bias:
        ids = send(torch.tensor(list(sampling.logit_bias)))
        logits_V[ids] += send(torch.tensor(list(sampling.logit_bias.values())))
    if row.mask is not None:
        bits = send(row.mask)
        allowed = (bits[:, None] >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1).bool().flatten()
        allowed = allowed[: len(logits_V)]
        logits_V[: len(allowed)].masked_fill_(~allowed, float("-inf"))
        logits_V[len(allowed) :] = float("-inf")
    if row.forbidden:
        logits_V[send(torch.tensor(list(row.forbidden)))] = float("-inf")


def _draw(logits_RV: torch.Tensor, rows: Sequence[Row], send: Send) -> list[int]:
    vocab = logits_RV.shape[-1]
    asked = [
        (s.temperature, float(s.top_k or vocab), s.min_p, s.top_p, uniform(row.seed, row.position))
        for row in rows
        for s in (row.sampling,)
    ]
    temperature, top_k, min_p, top_p, place_in_sum = send(torch.tensor(asked, dtype=torch.float64)).split(1, dim=1)
    ordered, ids = torch.sort(logits_RV / temperature.float(), dim=-1, descending=True, stable=True)
    weights = torch.softmax(ordered, dim=-1).double()
    keep = torch.arange(vocab, device=logits_RV.device) < top_k
    keep &= weights >= weights[:, :1] * min_p
    weights = weights * keep
    before = weights.cumsum(-1) - weights  # of likelier tokens, among those that top-k and min-p left
    keep &= before < weights.sum(-1, keepdim=True) * top_p
    keep[:, 0] = True
    total = (weights * keep).cumsum(-1)
    wanted = place_in_sum * total[:, -1:]
    place = torch.searchsorted(total, wanted, right=True).clamp_max(vocab - 1)
    place = torch.minimum(place, keep.sum(-1, keepdim=True) - 1)  # kept tokens come first
    return ids.gather(-1, place)[:, 0].tolist()


def _with_logprobs(logits_RV: torch.Tensor, rows: Sequence[Row], tokens: list[int], send: Send) -> list[Chosen]:
    asked = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    chosen = [Chosen(token) for token in tokens]
    if not asked:
        return chosen
    logprobs = torch.log_softmax(_rows_at(logits_RV, asked, send).float(), dim=-1)
    most = max(rows[i].sampling.logprobs or 0 for i in asked)
    values, ids = logprobs.topk(most, dim=-1) if most else (logprobs[:, :0], logprobs[:, :0].long())
    of_tokens = logprobs.gather(-1, send(torch.tensor([[tokens[i]] for i in asked])))[:, 0]
    for i, own, top_ids, top in zip(asked, of_tokens.tolist(), ids.tolist(), values.tolist(), strict=True):
        wanted = rows[i].sampling.logprobs or 0
        chosen[i] = Chosen(tokens[i], own, tuple(zip(top_ids[:wanted], top[:wanted], strict=True)))
    return chosen

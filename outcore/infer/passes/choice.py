"""Tokens chosen from the logits of one pass: the likeliest of all places at once, others as each request asks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import torch

from outcore.infer.passes.runner import Found
from outcore.infer.passes.scores import NO_NUMBERS
from outcore.infer.requests import Chosen, Row, choose
from outcore.infer.schedule import Sequence as Running
from outcore.sizing.inference import PassSize


class TokenChoice:
    """Tokens that logits give, place by place: `found` has for each work a row for the token behind it, and one more
    behind each of its guesses. `to`: brings host tensors to the device."""

    NO_NUMBERS: ClassVar[str] = NO_NUMBERS
    """Why there is no token for a sequence of `lost`."""

    def __init__(self, found: Found, to: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._to = to
        self._likeliest = _likeliest(found)
        self.lost = _lost(found)
        """Sequences whose logits are not numbers."""

    def at(self, place: int, works: Found) -> list[Chosen]:
        """The tokens of this place."""
        known = [bool(self._likeliest) and work.sequence.takes_likeliest for work, _ in works]
        others = [pair for pair, is_known in zip(works, known, strict=True) if not is_known]
        drawn = iter(self._drawn(place, others))
        return [
            Chosen(self._likeliest[id(work)][place]) if is_known else next(drawn)
            for (work, _), is_known in zip(works, known, strict=True)
        ]

    def _drawn(self, place: int, works: Found) -> list[Chosen]:
        rows = (work.sequence.row(place) for work, _ in works)
        return choose_in_groups([logits[place] for _, logits in works], rows, self._to)


def choose_in_groups(
    logits_V: Sequence[torch.Tensor], rows: Iterable[Row], to: Callable[[torch.Tensor], torch.Tensor]
) -> list[Chosen]:
    """A token for every row of logits; so many are sorted at a time as the pass has memory for."""
    rows, chosen = iter(rows), []
    for some in _groups(logits_V, PassSize.DRAWN_ROWS):
        chosen += choose(torch.stack(some), list(itertools.islice(rows, len(some))), to)
    return chosen


def _groups(items: Sequence[Any], most: int) -> list[list[Any]]:
    """So many at a time: logits that are looked at together are copied for it."""
    return [list(items[at : at + most]) for at in range(0, len(items), most)]


def _likeliest(found: Found) -> dict[int, list[int]]:
    """For each work the likeliest token of every place, read from the device at once; {}: nobody takes it as it is."""
    if not any(work.sequence.takes_likeliest for work, _ in found):
        return {}
    groups = _groups([of_work for _, of_work in found], PassSize.LIKELIEST_ROWS)
    likeliest = [(some[0] if len(some) == 1 else torch.cat(some)).argmax(-1) for some in groups]
    tokens = iter((likeliest[0] if len(likeliest) == 1 else torch.cat(likeliest)).tolist())
    return {id(work): list(itertools.islice(tokens, len(of_work))) for work, of_work in found}


def _lost(found: Found) -> set[Running]:
    """Sequences whose first token has no likelihoods: looked at once an answer, so that writing does not wait."""
    first = [(work.sequence, logits[0]) for work, logits in found if not work.sequence.chosen]
    if not first:
        return set()
    groups = _groups([logits for _, logits in first], PassSize.LIKELIEST_ROWS)
    is_lost = torch.cat([torch.stack(some).isnan().any(-1) for some in groups]).tolist()
    return {sequence for (sequence, _), lost in zip(first, is_lost, strict=True) if lost}

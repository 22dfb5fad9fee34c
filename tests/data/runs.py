"""What bears loss, as text: the runs of tokens with loss, decoded."""

from collections.abc import Iterable
from typing import Any


def runs(tokenizer: Any, ids: Iterable[int], mask: Iterable[int]) -> list[str]:
    """The runs of tokens with loss, decoded."""
    found, run = [], []
    for token, has_loss in zip([*ids, 0], [*mask, 0]):
        if has_loss:
            run.append(token)
        elif run:
            found.append(tokenizer.decode(run))
            run = []
    return found

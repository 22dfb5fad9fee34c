"""The moment in which transformers makes a model of a config, with words for a config of which none can be made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from outcore.common.errors import line_of


@contextmanager
def made_of(config: Any) -> Iterator[None]:
    """A model is built inside. ValueError for a config of which its class makes none: unknown names, and sizes that do
    not go together, end in whatever comes first there."""
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError) as error:
        where = getattr(config, "_name_or_path", "") or "config.json"
        raise ValueError(f"{where}: no {config.model_type} model can be made of it: {line_of(error)}.") from error

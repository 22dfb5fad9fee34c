"""A call that must be refused in words."""

import copy
from collections.abc import Callable
from typing import Any

import pytest


def refused(error: type[BaseException] | tuple[type[BaseException], ...], words: str, call: Callable[[], Any]) -> None:
    """`words`: a pattern, as `pytest.raises` searches for it."""
    with pytest.raises(error, match=words):
        call()


def failing(error: BaseException) -> Callable[..., Any]:
    """A function that raises such an error, in the place of one that must not succeed."""

    def fail(*_: Any, **__: Any) -> Any:
        raise copy.copy(error)  # one that is kept would keep what the frames hold that it went through

    return fail

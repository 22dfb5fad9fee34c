"""A call that must be refused in words."""

from collections.abc import Callable
from typing import Any

import pytest


def refused(error: type[BaseException] | tuple[type[BaseException], ...], words: str, call: Callable[[], Any]) -> None:
    """`words`: a pattern, as `pytest.raises` searches for it."""
    with pytest.raises(error, match=words):
        call()

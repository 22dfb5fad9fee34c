"""What every panel does with the routes' answers: show them, and tell in their own words what was refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import gradio as gr

from outcore.ui.client import ClientError

Result = TypeVar("Result")


def telling(work: Callable[..., Result]) -> Callable[..., Result]:
    """An event's function whose ClientError becomes a message on the page."""

    @wraps(work)
    def told(*args: Any) -> Result:
        try:
            return work(*args)
        except ClientError as error:
            raise gr.Error(str(error), duration=30, title="Not done", print_exception=False) from error

    return told


QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
"""Of events that come by themselves."""
SHOWN: dict[str, Any] = {"show_progress": "minimal", "api_visibility": "private"}

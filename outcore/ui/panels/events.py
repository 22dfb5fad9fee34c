"""What every panel does with the routes' answers: show them, and tell in their own words what was refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import gradio as gr

from outcore.ui.client import ClientError
from outcore.ui.panels import draw

Result = TypeVar("Result")


def telling(work: Callable[..., Result]) -> Callable[..., Result]:
    """An event's function whose ClientError becomes a message on the page."""

    @wraps(work)
    def told(*args: Any) -> Result:
        try:
            return work(*args)
        except ClientError as error:
            raise gr.Error(draw.text(error), duration=30, title="Not done", print_exception=False) from error

    return told


def number_box(label: str, info: str = "", value: Any = None, **more: Any) -> gr.Textbox:
    """A field for a number that may be left empty (gr.Number makes 0 of that)."""
    text = "" if value is None else str(value)
    return gr.Textbox(text, label=label, info=info, max_lines=1, interactive=True, **more)


def number_in(name: str, text: str | None) -> float | int | None:
    """What such a field says; None for an empty one. ClientError for what is no number."""
    if text is None or not str(text).strip():
        return None
    try:
        found = float(text)
    except ValueError:
        raise ClientError(f"{name}: expected a number, got {text!r}.", param=name) from None
    return int(found) if found.is_integer() else found


COPIED: dict[str, Any] = {"interactive": False, "wrap_lines": True, "show_line_numbers": False, "buttons": ["copy"]}
QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
"""Options of events that come by themselves."""
SHOWN: dict[str, Any] = {"show_progress": "minimal", "api_visibility": "private"}

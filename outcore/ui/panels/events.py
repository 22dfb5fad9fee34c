"""Tools for panels' events: show the routes' answers, and tell in their own words what was refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from inspect import isgenerator
from typing import Any

import gradio as gr

from outcore.ui.client import ClientError
from outcore.ui.panels import draw
from outcore.ui.panels.script import DISMISS


class Notice:
    """The one place where a page says what was refused: until it is dismissed, or something else is done."""

    def __init__(self) -> None:
        self.shown = gr.HTML(js_on_load=DISMISS, elem_id="notice")

    def on(
        self,
        triggers: Any,
        work: Callable[..., Any],
        inputs: Any,
        outputs: list[Any],
        refused: tuple[Any, ...] = (),
        **options: Any,
    ) -> Any:
        """Do this work upon these events. It returns (or yields) a value for each output; ClientError is shown, with
        the outputs as `refused` has them, or as they were. (A value that is yielded just before it may get lost.)"""
        still = refused or (gr.skip(),) * len(outputs)

        @wraps(work)
        def told(*args: Any) -> Iterator[tuple[Any, ...]]:
            try:
                found = work(*args)
                shown: Any = found if isgenerator(found) else (found,)
                for values in shown:
                    yield "", *(values if len(outputs) > 1 else (values,))
            except ClientError as error:
                yield draw.refused(str(error)), *still

        return gr.on(triggers, told, inputs, [self.shown, *outputs], **{**SHOWN, **options})


def number_box(label: str, info: str = "", value: Any = None, **more: Any) -> gr.Textbox:
    """A field for a number that may be left empty (gr.Number makes 0 of that)."""
    text = "" if value is None else str(value)
    return gr.Textbox(text, label=label, info=info, max_lines=1, interactive=True, **more)


def number_in(name: str, text: str | None) -> float | int | None:
    """Read the number in a `number_box`; None for an empty one. ClientError for what is no number."""
    if text is None or not str(text).strip():
        return None
    try:
        found = float(text)
    except ValueError:
        raise ClientError(f"{name}: expected a number, got {text!r}.", param=name) from None
    return int(found) if found.is_integer() else found


QUIET: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private"}
"""Options of events that come by themselves."""
SHOWN: dict[str, Any] = {"show_progress": "minimal", "api_visibility": "private"}

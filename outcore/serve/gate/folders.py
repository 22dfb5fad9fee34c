"""Folders that a request may name: what a client has opened, or run, lies in one that the command allowed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

from outcore.serve.errors import ApiError

_OF_WINDOWS = re.compile(r"[A-Za-z]:|.*\\", re.DOTALL)
"""Spellings that rooms below translate into folders elsewhere."""


def check_folder(text: str, allowed: Iterable[Path], param: str) -> None:
    """ApiError for a file or folder, as it is typed, outside of those that are allowed. Links are followed; a hub id
    passes where the current folder is allowed."""
    try:
        path = Path(text).expanduser().resolve()
        is_inside = any(path.is_relative_to(folder.expanduser().resolve()) for folder in allowed)
    except (OSError, RuntimeError, ValueError):  # a loop of links, nobody's home, a NUL
        path, is_inside = Path("DIR"), False
    if not is_inside or _OF_WINDOWS.match(text):
        folder = shlex.quote(str(path.parent if path.suffix else path))  # by its name: what is there is not told
        raise ApiError(
            403, f"{param} {text!r} lies in no folder that requests may name here. Whoever starts this server allows "
            f"it with --allowed_folder {folder}.", param=param, code="folder_not_allowed",
        )  # fmt: skip

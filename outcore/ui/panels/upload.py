"""A button that sends a file of the browser's machine into `uploads/`, below the folder of the panels, where data may
be named; larger ones are put there by hand."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path

import gradio as gr

from outcore.ui.client import ClientError
from outcore.ui.panels.events import Notice

FOLDER = Path("uploads")
KINDS = (".jsonl", ".json", ".csv", ".parquet", ".txt", ".md", ".arrow")


def upload_button(notice: Notice, field: gr.Textbox, add: Callable[[str, str], str], name: str) -> None:
    """Draw it. `add`: what the field says then, from what it said and the file's path."""
    button = gr.UploadButton("Upload a file", size="sm", file_types=list(KINDS), elem_id=name)
    notice.on([button.upload], lambda sent, said: add(said or "", keep(sent)), [button, field], [field])


def keep(sent: str) -> str:
    """Path of a file that a browser sent, kept by its own name, or with a number where that name is another file's."""
    source = Path(sent)
    try:
        FOLDER.mkdir(0o700, exist_ok=True)
        for number in count(1):
            path = FOLDER / (source.name if number == 1 else f"{source.stem}-{number}{source.suffix}")
            if not path.exists():
                shutil.copyfile(source, path)
            if filecmp.cmp(source, path, shallow=False):
                return str(path)
    except OSError as error:
        raise ClientError(f"The file cannot be kept in {FOLDER}/: {error.strerror or error}.") from error
    raise AssertionError

"""The built-in text: the running interpreter's own standard library, real prose and code that needs no download.

Every .py file of the library in path order, tests and generated tables left out, up to about 12 MB; a file is a
document, so that the train/validation split is by file. About 0.1 s to read."""

from __future__ import annotations

import hashlib
import os
import sys
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outcore.common.quantities import MB
from outcore.data.basis import DataError
from outcore.data.sources.records import BadRow, Record, Where

MAX_TOTAL_BYTES = 12 * MB
MAX_FILE_BYTES = MB // 2
MIN_TOTAL_BYTES = MB
"""An interpreter with less source than this (frozen, zipped, stripped) has no text to train on."""

SKIPPED_FOLDERS = frozenset([
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "idlelib", "turtledemo",
    "config", "encodings", "pydoc_data", "ensurepip", "lib-dynload",
])  # fmt: skip
"""Tests, bundled wheels, character tables and old grammars: repetitive text, or text that changes between builds."""


class EmbeddedSource:
    """`records()` yields one file of the standard library after the other; `total_bytes` bounds their sum."""

    is_text = True
    name = "embedded (Python standard library source)"

    def __init__(self, root: Path | None = None, total_bytes: int = MAX_TOTAL_BYTES) -> None:
        """`root`: by default the running interpreter's library. DataError when it has hardly any source."""
        self.root = root or Path(sysconfig.get_paths()["stdlib"])
        self.files: list[Path] = []
        self.total_bytes = 0
        for path in _python_files(self.root):
            size_bytes = path.stat().st_size
            if size_bytes == 0 or size_bytes > MAX_FILE_BYTES:
                continue
            if self.total_bytes + size_bytes > total_bytes:
                break
            self.files.append(path)
            self.total_bytes += size_bytes
        if self.total_bytes < min(MIN_TOTAL_BYTES, total_bytes // 2):
            raise DataError(
                f"the built-in text is this Python's own source files, but {self.root} has only {self.total_bytes} "
                "bytes of them (a stripped or zipped interpreter). Give another data set: a .txt, .jsonl or .csv "
                "file, or a folder of text"
            )

    def identity(self) -> dict[str, Any]:
        digest = hashlib.blake2b(digest_size=16)
        for path in self.files:
            digest.update(path.relative_to(self.root).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
        return {"kind": "embedded", "files": len(self.files), "content": digest.hexdigest()}

    def records(self) -> Iterator[Record | BadRow]:
        for path in self.files:
            where = Where(path.relative_to(self.root).as_posix())
            try:
                with tokenize.open(path) as file:  # honours the file's coding line
                    text = file.read()
            except (SyntaxError, UnicodeDecodeError):
                continue  # deliberately undecodable samples of the library, not a fault of the reader's
            yield Record(where, {"text": text})

    def again(self, place: str) -> tuple[Iterator[Record | BadRow], bool]:
        return self.records(), True

    def notes(self) -> list[str]:
        version = ".".join(map(str, sys.version_info[:3]))
        return [f"built-in text: {len(self.files)} source files of Python {version}'s standard library"]


def _python_files(root: Path) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith((".", "config-"))
        )
        found += [
            Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())

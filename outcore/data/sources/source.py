"""From what the person wrote (`dataset`) to a `Source`: file, folder, saved data set, hub id, or the built-in text."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from outcore.common.quantities import MIB, format_gb
from outcore.common.words import nearest
from outcore.data.basis import EMBEDDED, DataError, DataSettings
from outcore.data.sources.embedded import EmbeddedSource
from outcore.data.sources.hub import HubSource, SavedDatasetSource
from outcore.data.sources.paths import (
    DATA_EXTENSIONS,
    is_windows_spelling,
    looks_like_hub_id,
    missing_file_error,
    translate,
)
from outcore.data.sources.readers import READERS, TABLES, read_text
from outcore.data.sources.records import BadRow, Record, Source
from outcore.data.sources.textfile import plain_suffix

HASHED_UP_TO_BYTES = 64 * MIB
"""Smaller data is identified by content (survives a copy or a checkout), larger by path, size, inode and both times:
a copy can set the time of modification back (cp -p, rsync -t), but never the time of the inode's change."""


def check_hub_settings(settings: DataSettings, names: Sequence[str]) -> None:
    """DataError for a choice within hub data sets where all sources, `names`, lie here and none would follow it."""
    if not all(name == EMBEDDED or os.path.exists(translate(name)) for name in names):
        return
    has_splits = any((translate(name) / "dataset_dict.json").is_file() for name in names)
    for field in ("dataset_config", "streaming", *(("dataset_split",) * (not has_splits))):
        if (value := getattr(settings, field)) not in (getattr(DataSettings, field), "off"):
            raise DataError(
                f"--{field} {value} is for hub data sets, and {', '.join(names)} lies on this machine, of which every "
                "row is read. Leave it out; part of the rows is a file of its own, or --max_train_samples"
            )


class FilesSource:
    """One file, or the files of a folder, in the order given."""

    def __init__(self, files: Sequence[Path], root: Path, is_text: bool, notes: Sequence[str] = ()) -> None:
        self.files, self.root, self.is_text = list(files), root, is_text
        self.name = str(root)
        self._notes = list(notes)

    def identity(self) -> dict[str, Any]:
        stats = [path.stat() for path in self.files]
        base = self.root if self.root.is_dir() else self.root.parent
        names = [path.relative_to(base).as_posix() for path in self.files]
        if sum(stat.st_size for stat in stats) <= HASHED_UP_TO_BYTES:
            digest = hashlib.blake2b(digest_size=16)
            for name, path, stat in zip(names, self.files, stats):
                digest.update(os.fsencode(f"{name}\0{stat.st_size}\0"))
                digest.update(path.read_bytes())
            return {"kind": "files", "files": len(self.files), "content": digest.hexdigest()}
        listing = [
            [str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
            for path, stat in zip(self.files, stats)
        ]
        digest = hashlib.blake2b(repr(listing).encode(), digest_size=16)
        return {"kind": "files", "files": len(self.files), "path_size_times": digest.hexdigest()}

    def records(self) -> Iterator[Record | BadRow]:
        for path in self.files:
            yield from (read_text if self.is_text else READERS[plain_suffix(path)])(path)

    def again(self, place: str) -> tuple[Iterator[Record | BadRow], bool]:
        path = Path(place) if Path(place) in self.files else Path(place.rpartition(" [")[0])  # an object's list of rows
        suffix = plain_suffix(path)
        return READERS[suffix](path), suffix in TABLES

    def notes(self) -> list[str]:
        return list(self._notes)


def open_source(settings: DataSettings, *, evaluation: bool = False) -> Source:
    """The training source, or with `evaluation` that of `eval_dataset` / `eval_split`.

    Raises DataError: nothing there (with the nearest name), unknown kind of file, empty folder, hub out of reach."""
    name = settings.eval_dataset if evaluation and settings.eval_dataset else settings.dataset
    split = settings.eval_split if evaluation and settings.eval_split else settings.dataset_split
    if name == EMBEDDED:
        return EmbeddedSource()
    path = translate(name)
    try:
        exists = path.exists()
    except OSError as error:  # e.g. a component of the path is longer than the file system allows, or not permitted
        raise DataError(f"{name!r} cannot be looked at: {error.strerror or error}") from error
    if exists and path.is_dir():
        return _folder_source(path, settings, split)
    if exists:
        return _file_source(path, settings)
    if looks_like_hub_id(name) and not is_windows_spelling(name):
        if nearest(name, [EMBEDDED], cutoff=0.8):
            raise DataError(f"no file or folder is called {name!r} (nearest: {EMBEDDED!r}, the built-in text)")
        return HubSource(name, settings.dataset_config, split, settings.streaming)
    raise missing_file_error(name, path)


def _file_source(path: Path, settings: DataSettings) -> Source:
    suffix = plain_suffix(path)
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty: there is nothing to read")
    if suffix in READERS:
        return FilesSource([path], path, is_text=False)
    if suffix in settings.text_extensions:
        return FilesSource([path], path, is_text=True)
    way = f"name its extension: --text_extensions .txt,{suffix}" if suffix else "rename it to end in .txt"
    raise DataError(
        f"{path}: files named {suffix or '(without extension)'} are not read. Read are {', '.join(DATA_EXTENSIONS)} "
        f"and text ({', '.join(settings.text_extensions)}); if this one is plain text, {way}"
    )


def _folder_source(path: Path, settings: DataSettings, split: str) -> Source:
    if (path / "dataset_dict.json").is_file() or (
        (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    ):
        return SavedDatasetSource(path, split)
    text, data, others = [], [], Counter()
    for file in _files_under(path):
        suffix = plain_suffix(file)
        if suffix in settings.text_extensions:
            text.append(file)
        elif suffix in READERS:
            data.append(file)
        else:
            others[suffix or "(none)"] += 1
    text, data = [file for file in text if file.stat().st_size], [file for file in data if file.stat().st_size]
    if not text and not data:
        seen = ", ".join(f"{count} x {suffix}" for suffix, count in others.most_common(8)) or "nothing"
        raise DataError(
            f"folder {path} has no non-empty {', '.join(settings.text_extensions)} or "
            f"{', '.join(DATA_EXTENSIONS)} file "
            f"(found: {seen}). To read other files as text, name their extensions: --text_extensions .txt,.py"
        )
    text_bytes, data_bytes = (sum(file.stat().st_size for file in files) for files in (text, data))
    chosen, is_text = (text, True) if text_bytes >= data_bytes else (data, False)
    notes = [f"{len(chosen)} {'text' if is_text else 'data'} files in {path}"]
    if text and data:
        left = data if is_text else text
        notes.append(
            f"left out: {len(left)} {'data' if is_text else 'text'} files "
            f"({format_gb(min(text_bytes, data_bytes))}) of the "
            f"same folder; a folder is read as text or as data, whichever is more"
        )
    return FilesSource(chosen, path, is_text, notes)


def _files_under(root: Path) -> list[Path]:
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())

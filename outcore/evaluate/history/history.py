"""The history of evaluations: a folder with a folder for each, of JSON files that are replaced whole.

`record.json` holds settings, status and scores, `samples.json` every document with its answers. Processes write at the
same time without locks, because each writes its own evaluation's folder."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from outcore.common.files import remove_tree, write_atomic

RECORD, SAMPLES = "record.json", "samples.json"
Record = dict[str, Any]


class HistoryError(ValueError):
    """The history cannot be read or written; the message says why and what to do."""


class History:
    """Evaluations kept in `folder`, one folder each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def folder_of(self, name: str) -> Path:
        """Folder in which an evaluation keeps its journal, its progress and its result."""
        return self.folder / name

    def check_writable(self) -> None:
        """HistoryError when nothing could be kept; to be asked before the work, not after it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder):
                pass
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def save(self, record: Mapping[str, Any]) -> None:
        """Keep an evaluation's record as it is now. HistoryError."""
        self._write(record["id"], RECORD, {"scores": [], **record})

    def finish(self, record: Mapping[str, Any], scores: Sequence[Record], samples: Sequence[Record]) -> None:
        """Keep a whole result. The documents go first: a record with scores always has them. HistoryError."""
        self._write(record["id"], SAMPLES, sorted(samples, key=lambda one: (one["task"], one["filter"], one["doc_id"])))
        self.save({**record, "scores": list(scores)})

    def get(self, name: str) -> Record:
        """A record with its scores; KeyError when there is none of that id (or beginning of one)."""
        names = [found for found in self._names() if found.startswith(name)]
        if name not in names and len(names) != 1:
            raise KeyError(name)
        try:
            return _read(self.folder_of(name if name in names else names[0]) / RECORD)
        except FileNotFoundError:  # removed since it was listed
            raise KeyError(name) from None

    def all(self) -> list[Record]:
        """Records with their scores, newest first."""
        records = []
        for name in self._names():
            with suppress(FileNotFoundError):  # removed since it was listed
                records.append(_read(self.folder_of(name) / RECORD))
        return sorted(records, key=lambda record: (-record["created_at"], record["id"]))

    def unfinished(self, key: str) -> list[Record]:
        """Records of this key that have no result yet, newest first."""
        return [record for record in self.all() if record["key"] == key and record["status"] != "completed"]

    def samples(self, name: str, task: str | None = None, offset: int = 0, limit: int | None = None) -> list[Record]:
        """Documents of an evaluation with their answers, in order."""
        path = self.folder_of(name) / SAMPLES
        found = [one for one in _read(path) if task in (None, one["task"])] if path.exists() else []
        return found[offset : None if limit is None else offset + limit]

    def remove(self, name: str) -> None:
        """Forget an evaluation: its record first, so that a kill in between leaves none that is half there."""
        (self.folder_of(name) / RECORD).unlink(missing_ok=True)
        remove_tree(self.folder_of(name))

    def _names(self) -> list[str]:
        return [path.parent.name for path in self.folder.glob(f"*/{RECORD}")]

    def _write(self, name: str, file: str, value: Any) -> None:
        path = self.folder_of(name) / file
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(value))
        except OSError as error:
            raise _unwritable(path, error) from error


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:
        raise HistoryError(f"{path} cannot be read ({error}). Move its folder away.") from error


def _unwritable(path: Path, error: OSError) -> HistoryError:
    return HistoryError(
        f"{path} cannot be written ({error.strerror}). Free space, give yourself the right to write there, or name "
        "another folder with --history."
    )

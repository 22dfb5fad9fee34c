"""The folders that the panels work in: those of the commands, below the folder in which the server was started."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.common import write_atomic


@dataclass(frozen=True)
class Place:
    """Folders where runs, logs and models lie."""

    checkpoints: Path = Path("checkpoints")
    logs: Path = Path("logs")
    exports: Path = Path("final_model")

    @property
    def own(self) -> Path:
        """Folder of what the panels keep themselves; hidden, so that it is not taken for a run."""
        return self.logs / ".ui"

    def of(self, name: str) -> Path:
        """A folder of the panels' own, made when it is missing; what lies in it is for this user alone."""
        folder = self.own / name
        folder.mkdir(parents=True, exist_ok=True)
        self.own.chmod(0o700)
        return folder


def write_json(path: Path, value: Any) -> None:
    """Replace a small file whole, which this user alone may read. OSError when the drive does not take it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(value, ensure_ascii=False, indent=1, default=str), for_us=True)


def tail_of(path: Path, num_bytes: int = 32 << 10) -> str:
    """The end of a text file; '' when there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            return file.read().decode("utf-8", errors="replace")
    except OSError:
        return ""

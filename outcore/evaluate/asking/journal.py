"""Answers as they come, by the content of their questions, so that a killed evaluation asks nothing twice.

A header names what the answers depend on; then a line for each answer, with a checksum, synced to the drive. What a
crash tore off is dropped when the journal is opened again.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from outcore.evaluate.settings import EvaluationError


class AnswerJournal:
    """Answers that survive the process. Held by one process at a time; `answers` has all that are known."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path = path
        self.answers: dict[str, Any] = {}
        self._header = json.dumps(dict(header), sort_keys=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = open(path, "a+b")  # noqa: SIM115
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise EvaluationError(f"{path} is in use: this evaluation runs already, in another process.") from None
        try:
            self._read()
        except BaseException:
            self._file.close()
            raise

    def add(self, answers: Mapping[str, Any]) -> None:
        """Note answers by their questions' keys; they are on the drive when this returns. OSError."""
        lines = []
        for key, answer in answers.items():
            body = json.dumps([key, answer])
            lines.append(f"{zlib.crc32(body.encode()):08x} {body}\n")
        self._file.write("".join(lines).encode())
        self._file.flush()
        os.fsync(self._file.fileno())
        self.answers.update(answers)

    def close(self) -> None:
        """Let the file go; what was added stays."""
        self._file.close()

    def remove(self) -> None:
        """Drop the journal: the answers are kept elsewhere."""
        self.path.unlink(missing_ok=True)
        self.close()

    def _read(self) -> None:
        self._file.seek(0)
        header = self._file.readline()
        if not header.endswith(b"\n"):  # new, or torn in its first line
            self._file.truncate(0)
            self._file.write((self._header + "\n").encode())
            self._file.flush()
            return
        if header.decode(errors="replace").strip() != self._header:
            raise EvaluationError(
                f"{self.path} belongs to another model, other settings or another placement. Give --new to begin "
                "anew, or the same flags as before to go on."
            )
        end = len(header)
        for line in self._file:
            entry = _entry_of(line)
            if entry is None:
                break  # torn by a crash: neither this line nor what follows was told as done
            self.answers[entry[0]] = entry[1]
            end += len(line)
        self._file.truncate(end)


def is_held(path: Path) -> bool:
    """Whether a process has this journal open."""
    try:
        with open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _entry_of(line: bytes) -> list[Any] | None:
    crc, _, body = line.partition(b" ")
    try:
        whole = line.endswith(b"\n") and int(crc, 16) == zlib.crc32(body.rstrip(b"\n"))
        return json.loads(body) if whole else None
    except ValueError:
        return None

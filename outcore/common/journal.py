"""Lines that survive a crash: a header that names what they belong to, then JSON values, each with a checksum.

Held by one process at a time. What a crash tore off is dropped when the file is opened again: neither that line nor
what follows it was ever told as done."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from outcore.common.files import fsync_folder, make_folder
from outcore.common.os_layer import lock_file

FORMAT = 2
"""Number of the format of the lines, in every header: files of other versions are not taken for torn ones."""

Place = tuple[int, int]
"""(offset, bytes) of a line in its file."""


class JournalHeld(RuntimeError):
    """Another process has the journal open."""


class JournalOfAnother(RuntimeError):
    """The journal belongs to something else. `differs`: names of the header's values that are others now."""

    def __init__(self, differs: list[str]) -> None:
        super().__init__(", ".join(differs))
        self.differs = differs


class LineJournal:
    """A journal on a drive. `take` gets the place and the value of each line that is there already."""

    def __init__(self, path: Path, header: Mapping[str, Any], take: Callable[[Place, Any], None]) -> None:
        self.path = path
        make_folder(path.parent)
        self._file: IO[bytes] = open(path, "a+b")  # noqa: SIM115
        try:
            lock_file(self._file.fileno())
            self._read(json.dumps({**header, "format": FORMAT}, sort_keys=True), take)
            # At each start: the one before may have been killed, or refused, before header and name were on the drive,
            # without which a power cut takes every line that is synced later.
            self.sync()
            fsync_folder(path.parent)
        except BlockingIOError:
            self._file.close()
            raise JournalHeld(f"{path} is in use") from None
        except BaseException:
            self._file.close()
            raise

    def append(self, values: Iterable[Any]) -> list[Place]:
        """Write a line for each value and return their places; they are on the drive after the next `sync`."""
        lines = [_line(value) for value in values]
        places, offset = [], self._file.seek(0, os.SEEK_END)
        for line in lines:
            places.append((offset, len(line)))
            offset += len(line)
        self._file.write(b"".join(lines))
        self._file.flush()
        return places

    def sync(self) -> None:
        """Have everything on the drive. OSError."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def value_at(self, place: Place) -> Any:
        """The value of one line."""
        self._file.seek(place[0])
        return json.loads(self._file.read(place[1]).partition(b" ")[2])

    def close(self) -> None:
        """Sync, and let the file go; without effect the second time."""
        if not self._file.closed:
            try:
                self.sync()
            finally:
                self._file.close()

    def remove(self) -> None:
        """Drop the journal: what it held is kept elsewhere."""
        self.path.unlink(missing_ok=True)
        self._file.close()

    def _read(self, header: str, take: Callable[[Place, Any], None]) -> None:
        self._file.seek(0)
        first = self._file.readline()
        if not first.endswith(b"\n"):  # new, or torn in its first line
            self._file.truncate(0)
            self._file.write((header + "\n").encode())
            return
        if first.decode(errors="replace").strip() != header:
            raise JournalOfAnother(_differences(first, header))
        end = len(first)
        for line in self._file:
            try:
                crc, _, body = line.partition(b" ")
                if not line.endswith(b"\n") or int(crc, 16) != zlib.crc32(body.rstrip(b"\n")):
                    break
                value = json.loads(body)
            except ValueError:
                break
            take((end, len(line)), value)
            end += len(line)
        self._file.truncate(end)


def is_held(path: Path) -> bool:
    """Whether a process has this journal open."""
    try:
        with open(path, "rb") as file:
            lock_file(file.fileno(), shared=True)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _line(value: Any) -> bytes:
    body = json.dumps(value, ensure_ascii=False).encode()
    return f"{zlib.crc32(body):08x} ".encode() + body + b"\n"


def _differences(first: bytes, header: str) -> list[str]:
    try:
        old, new = json.loads(first), json.loads(header)
        return sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    except (ValueError, AttributeError):
        return []

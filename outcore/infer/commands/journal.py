"""Results of a job as they come, so that a killed job goes on where it was: nothing twice, nothing lost, same bytes.

A journal lies beside the output: a header that names the job, then a line for each finished input line, with a
checksum, synced to the drive. What a crash tore off is dropped. When all lines are there the output is written aside in
the input's order and renamed, then the journal goes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import zlib
from pathlib import Path
from typing import IO, Any

SYNC_BYTES = 1 << 16


class JobError(ValueError):
    """The job cannot go on; the message says why and what to do."""


class Journal:
    """Finished requests of a job. `job`: what makes results what they are, JSON; a journal of another job is
    refused."""

    def __init__(self, output: Path, job: dict[str, Any]) -> None:
        self.output, self.path = output, output.with_name(f"{output.name}.journal")
        self.done: dict[int, tuple[int, int]] = {}
        """Line number of the input -> (offset, bytes) of its result in the journal."""
        self._job = json.dumps(job, sort_keys=True)
        output.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[bytes] = open(self.path, "a+b")  # noqa: SIM115
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise JobError(
                f"{self.path} is in use: another process writes {output}. Wait until it has ended."
            ) from None
        try:
            self._read()
        except JobError:
            self._file.close()
            raise
        self._unsynced = 0

    def add(self, number: int, result: dict[str, Any]) -> None:
        """Note the result of input line `number`; it is on the drive when the next `sync` returns."""
        body = json.dumps(result, ensure_ascii=False)
        line = json.dumps({"n": number, "crc": zlib.crc32(body.encode()), "result": body}, ensure_ascii=False) + "\n"
        data = line.encode()
        self._file.seek(0, os.SEEK_END)
        self.done[number] = (self._file.tell(), len(data))
        self._file.write(data)
        self._file.flush()
        self._unsynced += len(data)
        if self._unsynced >= SYNC_BYTES:
            self.sync()

    def sync(self) -> None:
        """Have everything on the drive."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._unsynced = 0

    def finish(self, count: int) -> None:
        """Write the output in the input's order and drop the journal."""
        missing = [n for n in range(count) if n not in self.done]
        assert not missing, f"line {missing[0]} has no result"
        aside = self.output.with_name(f".{self.output.name}.part")
        with open(aside, "wb") as file:
            for number in range(count):
                file.write(self._result(number) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self.output)
        _sync_folder(self.output.parent)
        self.path.unlink()
        self.close()

    def absorb(self, other: Journal) -> None:
        """Take over the results of a journal of the same job, whose file then goes."""
        for number in other.done:
            if number not in self.done:
                self.add(number, json.loads(other._result(number)))
        self.sync()
        other.path.unlink()
        other.close()

    def close(self) -> None:
        """Let the file go; what was added stays."""
        if not self._file.closed:
            self.sync()
            self._file.close()

    def _result(self, number: int) -> bytes:
        offset, size = self.done[number]
        self._file.seek(offset)
        return json.loads(self._file.read(size))["result"].encode()

    def _read(self) -> None:
        self._file.seek(0)
        header = self._file.readline()
        if not header.endswith(b"\n"):  # new, or torn in its first line
            self._file.truncate(0)
            self._file.write((self._job + "\n").encode())
            self.sync()
            return
        if header.decode().strip() != self._job:
            raise JobError(
                f"{self.path} belongs to a job with another input, model or settings{_difference(header, self._job)}. "
                "Give the same command again, or another --output, or remove the journal to begin anew."
            )
        offset = len(header)
        for line in self._file:
            number = _number_of(line)
            if number is None:
                break  # torn by a crash: this line and what follows were never told as done
            self.done[number] = (offset, len(line))
            offset += len(line)
        self._file.truncate(offset)


def _number_of(line: bytes) -> int | None:
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
        whole = zlib.crc32(entry["result"].encode()) == entry["crc"]
        return int(entry["n"]) if whole else None
    except (ValueError, KeyError, TypeError):
        return None


def _difference(header: bytes, job: str) -> str:
    try:
        old, new = json.loads(header), json.loads(job)
        names = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
        return f" ({', '.join(names)} differs)" if names else ""
    except (ValueError, AttributeError):
        return ""


def digest_of(path: Path) -> str:
    """Name of a file's bytes."""
    found = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

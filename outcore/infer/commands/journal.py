"""Results of a job as they come, so that a killed job goes on where it was: nothing twice, nothing lost.

When all lines are there the output is written aside in the input's order and renamed, then the journal beside it goes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outcore.common import file_errors
from outcore.common.files import replacing
from outcore.common.journal import JournalHeld, JournalOfAnother, LineJournal, Place

SYNC_BYTES = 1 << 16


class JobError(ValueError):
    """The job cannot go on; the message says why and what to do."""


class Journal:
    """Finished requests of a job. `job`: what makes results what they are, JSON; a journal of another job is
    refused."""

    def __init__(self, output: Path, job: dict[str, Any]) -> None:
        self.output, path = output, output.with_name(f"{output.name}.journal")
        self._phase = f"writing the answers of {output} (the same command goes on where it stopped)"
        self.done: dict[int, Place] = {}
        """Line number of the input -> place of its result in the journal."""
        self.failed: set[int] = set()
        """Numbers of lines whose result is an error, whichever process noted it."""
        self.why = ""
        """Row and error of the first failed line that was noted; '' while there is none."""
        try:
            with file_errors(self._phase, path):
                self._lines = LineJournal(path, job, lambda at, entry: self._note(at, entry[0], json.loads(entry[1])))
        except JournalHeld as error:
            raise JobError(f"{error}: another process writes {output}. Wait until it has ended.") from None
        except JournalOfAnother as error:
            differs = f" ({error} differs)" if error.differs else ""
            raise JobError(
                f"{path} belongs to a job with another input, model or settings{differs}. "
                "Give the same command again, or another --output, or remove the journal to begin anew."
            ) from None
        self._unsynced = 0

    def close(self) -> None:
        """Have what was noted on the drive, and let the file go."""
        with file_errors(self._phase, self._lines.path):
            self._lines.close()

    def add(self, number: int, result: dict[str, Any]) -> None:
        """Note the result of input line `number`; a kill loses nothing, a power cut at most the last 64 KiB."""
        body = json.dumps(result, ensure_ascii=False)
        with file_errors(self._phase, self._lines.path):
            [place] = self._lines.append([[number, body]])
            self._note(place, number, result)
            self._unsynced += place[1]
            if self._unsynced >= SYNC_BYTES:
                self._lines.sync()
                self._unsynced = 0

    def _note(self, place: Place, number: int, result: dict[str, Any]) -> None:
        self.done[number] = place
        if result.get("error") is not None:
            self.failed.add(number)
            self.why = self.why or f"row {number + 1}: {why_failed(result)}"

    def finish(self, count: int) -> None:
        """Write the output in the input's order and drop the journal."""
        with file_errors(self._phase), replacing(self.output) as file:
            file.writelines(self.results(count))
        self.drop()

    def results(self, count: int) -> Iterator[bytes]:
        """The output's lines, in the input's order."""
        missing = [n for n in range(count) if n not in self.done]
        assert not missing, f"line {missing[0]} has no result"
        for number in range(count):
            yield self._lines.value_at(self.done[number])[1].encode() + b"\n"

    def drop(self) -> None:
        """Remove the journal: its results are kept elsewhere."""
        self._lines.remove()

    def absorb(self, other: Journal) -> None:
        """Take over the results of a journal of the same job, whose file then goes."""
        for number, place in other.done.items():
            if number not in self.done:
                self.add(number, json.loads(other._lines.value_at(place)[1]))
        self._lines.sync()
        other._lines.remove()


def why_failed(result: dict[str, Any]) -> str:
    """The words of a line's error; '' where it was answered."""
    error = result.get("error") or ""
    return error if isinstance(error, str) else error["message"]


def digest_of(path: Path) -> str:
    """Name of a file's bytes."""
    found = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()

"""Answers as they come, by the content of their questions, so that a killed evaluation asks nothing twice."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outcore.common.journal import JournalHeld, JournalOfAnother, LineJournal
from outcore.evaluate.settings import EvaluationError


class AnswerJournal:
    """Answers that survive the process. `header`: what they depend on; `answers` has all that are known."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.answers: dict[str, Any] = {}
        try:
            self._lines = LineJournal(path, header, lambda place, entry: self.answers.update([entry]))
        except JournalHeld as error:
            raise EvaluationError(f"{error}: this evaluation runs already, in another process.") from None
        except JournalOfAnother:
            raise EvaluationError(
                f"{path} belongs to another model, placement, settings or version of outcore. Give --new to begin "
                "anew, or the same flags as before to go on."
            ) from None
        self.close, self.remove = self._lines.close, self._lines.remove

    def add(self, answers: Mapping[str, Any]) -> None:
        """Note answers by their questions' keys; they are on the drive when this returns. OSError."""
        self._lines.append(answers.items())
        self._lines.sync()
        self.answers.update(answers)

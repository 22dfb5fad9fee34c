"""The builder's diary: every default with its reason, every changed user value, every fallback."""

from __future__ import annotations

from typing import Any


class Notes:
    """Collects lines; `warnings` are those that must be shown even when the rest is not."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.warnings: list[str] = []

    def chose(self, key: str, value: Any, reason: str) -> None:
        """A default was taken."""
        self.lines.append(f"{key} = {value}: {reason}")

    def changed(self, key: str, old: Any, new: Any, reason: str) -> None:
        """A value the user gave was replaced."""
        self.warn(f"{key} changed from {old} to {new}: {reason}")

    def dropped(self, key: str, reason: str) -> None:
        """A value the user gave has no effect and was left out."""
        self.warn(f"{key} left out: {reason}")

    def warn(self, text: str) -> None:
        """A line that must be seen."""
        self.lines.append(text)
        self.warnings.append(text)

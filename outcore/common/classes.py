"""Helpers of classes: an end that a `with` block brings, and fields of the same name and meaning."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self


def same_named(kind: Any, source: object, *but: str) -> dict[str, Any]:
    """The fields of the dataclass `kind` but those named, with what `source` has under the same name. AttributeError
    where it has not: a field that is renamed on one side would be lost in silence."""
    return {field.name: getattr(source, field.name) for field in fields(kind) if field.name not in but}


class Closing:
    """Adds `with` to a class that has `close`."""

    def close(self) -> object:
        """Give back what is held. Safe to call twice."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

"""What classes have in common: an end that a `with` block brings, and fields of the same name and meaning."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self


def same_named(kind: Any, source: object) -> dict[str, Any]:
    """The fields of the dataclass `kind` that `source` has under the same name, with the values there."""
    return {field.name: getattr(source, field.name) for field in fields(kind) if hasattr(source, field.name)}


class Closing:
    """Adds `with` to a class that has `close`."""

    def close(self) -> object:
        """Give back what is held. Safe to call twice."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

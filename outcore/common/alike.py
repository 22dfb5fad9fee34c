"""From one record to another that has fields of the same name and meaning."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def same_named(kind: Any, source: object) -> dict[str, Any]:
    """The fields of the dataclass `kind` that `source` has under the same name, with the values there."""
    return {field.name: getattr(source, field.name) for field in fields(kind) if hasattr(source, field.name)}

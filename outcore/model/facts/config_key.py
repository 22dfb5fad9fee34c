"""Questions whose answer follows from a model's config alone, asked by several parts of one start."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ConfigKey:
    """A config as a key of `functools.lru_cache`: two of one class with equal fields and attention are one."""

    config: Any = field(compare=False)
    kind: type
    fields: str
    attention: str | None

    @classmethod
    def about(cls, config: Any) -> ConfigKey:
        """Read the key off a transformers config as it is now; what changes it later changes no answer given."""
        attention = getattr(config, "_attn_implementation", None)
        return cls(config, type(config), config.to_json_string(use_diff=False), attention)

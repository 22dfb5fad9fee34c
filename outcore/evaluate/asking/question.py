"""One thing a task wants to know of a model: how likely a continuation is, or what it writes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ScoreQuestion:
    """How likely `continuation` is after `context`; the answer is [log-probability, whether each token is the
    likeliest]."""

    context: tuple[int, ...]
    continuation: tuple[int, ...]

    @property
    def key(self) -> str:
        return _key("score", [self.context, self.continuation])

    @property
    def num_tokens(self) -> int:
        return len(self.context) + len(self.continuation)


@dataclass(frozen=True)
class WriteQuestion:
    """What the model writes after `prompt`; the answer is the text."""

    prompt: tuple[int, ...]
    sampling: Mapping[str, Any] = field(hash=False)
    """Fields of `Sampling`."""
    repeat: int = 0
    """Which of several answers to the same prompt; they are drawn with different seeds."""

    @property
    def key(self) -> str:
        return _key("write", [self.prompt, dict(self.sampling), self.repeat])

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + int(self.sampling["max_tokens"])


Question = ScoreQuestion | WriteQuestion


def _key(kind: str, content: list[Any]) -> str:
    return hashlib.blake2b(json.dumps([kind, *content]).encode(), digest_size=16).hexdigest()

"""Requests that are being answered, by the ids that their clients see."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from outcore.infer import Answer, Piece, Request
from outcore.serve.errors import ApiError


@dataclass(eq=False)
class Told:
    """One request, and how far it is."""

    id: str
    endpoint: str
    request: Request
    cancel: Callable[[str], None]
    """Ends the answers of a request by its name."""
    began_s: float = field(default_factory=time.time)
    answer_tokens: int = 0

    def hear(self, item: Piece | Answer) -> None:
        """Count what was written."""
        self.answer_tokens += len(item.tokens) if isinstance(item, Piece) else 0


@dataclass(eq=False)
class Places:
    """Places of one engine that are taken, under all of its names, and whether none is given any more."""

    taken: int = 0
    is_closed: bool = False


class UnderWay:
    """All of a server. Lives on its event loop."""

    def __init__(self) -> None:
        self._told: dict[str, Told] = {}

    @contextmanager
    def listed(
        self, request: Request, endpoint: str, shown: str | None, cancel: Callable[[str], None]
    ) -> Iterator[Told]:
        """List a request while it is answered, under the id that is shown, or else its own name."""
        told = self._told[request.name] = Told(shown or request.name, endpoint, request, cancel)
        try:
            yield told
        finally:
            del self._told[request.name]

    def all(self) -> list[dict[str, Any]]:
        """Describe every request, oldest first."""
        ids = dict.fromkeys(told.id for told in sorted(self._told.values(), key=lambda told: told.began_s))
        return [self.get(name) for name in ids]

    def get(self, name: str) -> dict[str, Any]:
        """Describe the request of this id, all its prompts together; 404 when none is under way."""
        parts = self._parts(name)
        written = sum(told.answer_tokens for told in parts)
        return {
            "id": name,
            "object": "request",
            "endpoint": parts[0].endpoint,
            "created_at": int(min(told.began_s for told in parts)),
            "status": "in_progress" if written else "queued",
            "prompt_tokens": sum(len(told.request.prompt) for told in parts),
            "completion_tokens": written,
        }

    def cancel(self, name: str) -> dict[str, Any]:
        """End the request of this id within a pass; 404 when none is under way."""
        found = self.get(name)
        for told in self._parts(name):
            told.cancel(told.request.name)
        return found | {"status": "cancelling"}

    def _parts(self, name: str) -> list[Told]:
        parts = [told for told in self._told.values() if told.id == name]
        if not parts:
            raise ApiError(404, f"No request {name!r} is under way.", param="request_id")
        return parts

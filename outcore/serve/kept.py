"""Conversations that clients go on from by `previous_response_id`: the last ones, in memory, within a limit."""

from __future__ import annotations

import json
import threading
import uuid
from collections import OrderedDict
from typing import Any

from outcore.common.quantities import MIB
from outcore.serve.errors import bad

MOST, MOST_BYTES, MOST_ONE_BYTES = 1024, 64 * MIB, 8 * MIB
"""Conversations, bytes of all and of one at most: each request that goes on reads all of its conversation again."""
ITEM_BYTES = 41
"""Bytes of an item besides its letters: Python's own part of it, and its place in the list."""


class KeptResponses:
    """Items of conversations by the id of their last response. Ids are not to be guessed by whoever has no key; with a
    key, `/v1/requests` tells those of requests under way."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most, self._most_bytes, self._most_one_bytes = most, most_bytes, min(most_bytes, MOST_ONE_BYTES)
        self._kept: OrderedDict[str, list[bytes]] = OrderedDict()
        self._size_bytes = 0
        self._lock = threading.Lock()  # requests are understood on several threads

    def new_name(self) -> str:
        """An id for a response."""
        return f"resp_{uuid.uuid4().hex}"

    def put(self, name: str, items: list[bytes]) -> None:
        """Keep a conversation, each item `packed`; the oldest ones go. One that is too long is not kept."""
        size_bytes = _size_of(items)
        if size_bytes > self._most_one_bytes:
            return
        with self._lock:
            self._kept[name], self._size_bytes = items, self._size_bytes + size_bytes
            while len(self._kept) > self._most or self._size_bytes > self._most_bytes:
                _, gone = self._kept.popitem(last=False)
                self._size_bytes -= _size_of(gone)

    def get(self, name: Any) -> list[Any]:
        """Items up to that response, which was used just now. ApiError for one that is not kept."""
        with self._lock:
            found = self._kept.get(name) if isinstance(name, str) else None
            if found is None:
                raise bad(
                    f"Previous response {name!r} is not here. This server keeps the last {self._most} in memory, until "
                    "it stops: send the whole conversation as input.",
                    "previous_response_id", "previous_response_not_found",
                )  # fmt: skip
            self._kept.move_to_end(name)
        return [json.loads(item) for item in found]


def packed(items: list[Any]) -> list[bytes]:
    """Items as they are kept. One by one, so that whoever else needs Python meanwhile has it in between."""
    return [json.dumps(item).encode() for item in items]


def _size_of(items: list[bytes]) -> int:
    return sum(map(len, items)) + ITEM_BYTES * len(items)

"""Events, for whoever looks later: a line of JSON for each event in `events.jsonl`, with the rank where several
processes write. A drive that fails costs events, never the work that they tell of."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
NAME = "events.jsonl"


class DiagnosticLog:
    """Appends to `folder/events.jsonl`; safe from several threads and processes, since each line is one write."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._lock, self._is_broken = threading.Lock(), False

    def note(self, event: str, **facts: Any) -> None:
        """Write one event, with the time and this process's number."""
        entry: dict[str, Any] = {"time": time.time(), "event": event, "pid": os.getpid()}
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            entry["rank"] = int(os.environ.get("RANK", "0"))
        with self._lock:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with open(self.path, "a", encoding="utf-8") as file:
                    file.write(json.dumps(entry | facts) + "\n")
            except OSError as error:
                if not self._is_broken:
                    logger.warning("no more events in %s: %s", self.path, error)
                self._is_broken = True

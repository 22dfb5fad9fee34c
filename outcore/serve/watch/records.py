"""A line for each answered request: exact settings, seed, model, placement, timings by tier; texts only when asked."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from outcore.common.files import opener_for_us
from outcore.infer import Answer, Request
from outcore.infer.opening import OpenedModel, model_hash
from outcore.infer.requests import derived_seed, seed_of

logger = logging.getLogger(__name__)


class Records:
    """`logs/serve/requests-<start>.jsonl`; a drive that is full costs records, never answers."""

    def __init__(self, folder: Path, header: Mapping[str, Any], *, with_text: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("requests-*.jsonl"):
            with suppress(OSError):  # another user's, who alone may shut it, or one that is removed just now
                if not old.is_symlink():  # of a file elsewhere
                    old.chmod(0o600)
        # to the nanosecond: several models may be opened in one second
        self.path = folder / f"requests-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**9:09}.jsonl"
        self._file = open(self.path, "x", encoding="utf-8", opener=opener_for_us)  # noqa: SIM115
        self._lock, self.with_text, self._is_broken = threading.Lock(), with_text, False
        self.model_hash, self._kv_home = str(header["model_hash"]), header.get("kv_home", "")
        self.write({"header": True, **header})

    def add(self, request: Request, answer: Answer, endpoint: str) -> None:
        """Note one answer."""
        seed = request.sampling.seed if request.sampling.seed is not None else seed_of(request.name)
        entry: dict[str, Any] = {
            "time": time.time(),
            "request": request.name,
            "endpoint": endpoint,
            "choice": answer.choice,
            "sampling": _settings(request),
            "seed": derived_seed(seed, answer.choice),
            "prompt_tokens": len(request.prompt),
            "answer_tokens": len(answer.tokens),
            "finish": answer.finish,
            "error": answer.error,
            "timings": dataclasses.asdict(answer.timings) | {"pages": {self._kv_home: answer.timings.pages}},
        }
        if self.with_text:
            entry |= {"prompt": list(request.prompt), "answer": [c.token for c in answer.tokens], "text": answer.text}
        self.write(entry)

    def close(self) -> None:
        """Let the file go."""
        with self._lock:
            self._file.close()

    def write(self, entry: Mapping[str, Any]) -> None:
        """Append one entry."""
        with self._lock:
            try:
                self._file.write(json.dumps(entry) + "\n")
                self._file.flush()
            except (OSError, ValueError) as error:
                if not self._is_broken:
                    logger.warning("no more records of requests: %s", error)
                self._is_broken = True


def header_of(opened: OpenedModel, name: str) -> dict[str, Any]:
    """Make the header of records: what is the same for all answers of one of our engines."""
    return {
        "model": name,
        "found": opened.found.words,
        "model_hash": model_hash(opened.found.folders),
        "placement": opened.placement.lines(),
        "kv_home": opened.placement.kv_home,
        "way": opened.way,
        "device": str(opened.device),
    }


def _settings(request: Request) -> dict[str, Any]:
    sampling = request.sampling
    names = [field.name for field in dataclasses.fields(sampling) if field.name != "logit_bias"]
    found = {name: getattr(sampling, name) for name in names}
    return found | {"logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()}}

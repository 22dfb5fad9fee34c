"""A line for each answered request: exact settings, seed, model, placement, timings; texts only when asked for."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

from outcore.infer import Answer, Request
from outcore.infer.opening import OpenedModel, model_hash
from outcore.infer.requests import derived_seed, seed_of

logger = logging.getLogger(__name__)


class Records:
    """`logs/serve/requests-<start>.jsonl`; a drive that is full costs records, never answers."""

    def __init__(self, folder: Path, opened: OpenedModel, name: str, *, with_text: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S")
        self.path = folder / f"requests-{stamp}.jsonl"
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        self._lock, self._with_text, self._is_broken = threading.Lock(), with_text, False
        self.model_hash = model_hash(opened.found.folders)
        self._write(
            {
                "header": True,
                "model": name,
                "found": opened.found.words,
                "model_hash": self.model_hash,
                "placement": opened.placement.lines(),
                "way": opened.way,
                "device": str(opened.device),
            }
        )

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
            "timings": dataclasses.asdict(answer.timings),
        }
        if self._with_text:
            entry |= {"prompt": list(request.prompt), "answer": [c.token for c in answer.tokens], "text": answer.text}
        self._write(entry)

    def close(self) -> None:
        """Let the file go."""
        with self._lock:
            self._file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        with self._lock:
            try:
                self._file.write(json.dumps(entry) + "\n")
                self._file.flush()
            except (OSError, ValueError) as error:
                if not self._is_broken:
                    logger.warning("no more records of requests: %s", error)
                self._is_broken = True


def _settings(request: Request) -> dict[str, Any]:
    sampling = request.sampling
    names = [field.name for field in dataclasses.fields(sampling) if field.name != "logit_bias"]
    found = {name: getattr(sampling, name) for name in names}
    return found | {"logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()}}

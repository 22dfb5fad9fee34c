"""An evaluation that a running server does with the model it has loaded: created, watched and fetched over HTTP."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from outcore.evaluate.settings import EvaluationError, EvaluationSettings

TIMEOUT_S, LOOK_EVERY_S = 60.0, 0.5
MOST_FAILURES = 3
UNFINISHED = ("queued", "running")
Record = dict[str, Any]


def evaluate_remotely(
    url: str, key: str, settings: EvaluationSettings, *, resume: bool, listener: Callable[[Record], None]
) -> Record:
    """The record in the end. EvaluationError in the server's words, RuntimeError when it cannot be reached."""
    base = url.rstrip("/").removesuffix("/v1") + "/v1/evaluations"
    given = {name: value for name, value in settings.as_json().items() if value not in (None, {})}
    record = _asked(base, key, given | {"resume": resume})
    mine = f"{base}/{record['id']}"
    record = _watched(mine, key, listener)
    if record["status"] == "failed":
        raise EvaluationError(f"the server says: {record['error']}")
    return record


def _open(url: str, key: str, body: Record | None = None) -> Any:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        try:
            words = json.loads(error.read())["error"]["message"]
        except (ValueError, KeyError, TypeError):
            words = str(error)
        hint = " Give --api_key_file." if error.code == 401 else ""
        raise EvaluationError(f"{url} says {error.code}: {words}{hint}") from error
    except (OSError, ValueError) as error:
        raise RuntimeError(
            f"{url} cannot be reached ({error}). Start `outcore serve MODEL`, or check the address."
        ) from error


def _asked(url: str, key: str, body: Record | None = None) -> Record:
    with _open(url, key, body) as reply:
        return json.loads(reply.read())


def _watched(url: str, key: str, listener: Callable[[Record], None]) -> Record:
    """The record once the evaluation has ended; the listener hears of each change before."""
    told, failures = None, 0
    while True:
        try:
            record = _asked(url, key)
        except RuntimeError as error:
            failures += 1
            if failures > MOST_FAILURES:
                raise RuntimeError(f"{error} The evaluation goes on when the server is back.") from error
        else:
            failures = 0
            if record["progress"] != told:
                told = record["progress"]
                listener({"time": time.time(), "event": "progress", **told})
            if record["status"] not in UNFINISHED:
                listener({"time": time.time(), "event": record["status"], **record["progress"]})
                return record
        time.sleep(LOOK_EVERY_S)

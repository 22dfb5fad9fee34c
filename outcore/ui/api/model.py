"""The model that chat and evaluations talk with: `outcore serve` in a process of its own, loaded and ended on demand.

The panels pass requests on to it. It outlives panels that are killed, and those that start next find it again."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import shlex
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from outcore.common import read_object, write_atomic
from outcore.common.os_layer import ask_to_stop
from outcore.common.ports import free_port
from outcore.infer.opening import InferSettings
from outcore.machine import detect_machine
from outcore.machine.topology import detect_topology, lay_out
from outcore.serve.additions import ApiError, bad, check_folder
from outcore.serve.handover import refuse_ours
from outcore.ui.api.children import Child, complaint_of, lines_of
from outcore.ui.api.place import Place, write_json
from outcore.ui.settings import ONE_READER

FIELDS = (
    "preset", "device", "precision", "adapter", "context", "max_sequences", "pass_tokens", "chunk_tokens",
    "page_tokens", "kv_format", "kv_home", "kv_gib", "vram_gib", "ram_gib", "nvme_path", "pin_gib", "num_layer_buffers",
    "compile", "cpu_tokens", "draft_tokens",
)  # fmt: skip
OPENED = ("model", "adapter", "nvme_path")
"""Settings that name folders."""
DEGREES = ("tensor_parallel", "pipeline_parallel")
LOOK_EVERY_S, ANSWER_S = 0.3, 30.0
OWNERS = ("outcore", "vllm")
"""Engines that answer, as /v1/models names them."""
_METRIC = re.compile(r"^(?:outcore_|vllm:)(\w+?)(?:_total)?(?:\{([^}]*)\})? ([-+.\deE]+)$")


class StillLoading(ApiError):
    """The model is not there yet; it is worth waiting for."""


class ModelHost:
    """Model that is loaded on demand. States: none, loading, ready, failed, stopped."""

    def __init__(self, place: Place, allowed: Sequence[Path] = ()) -> None:
        self.place, self._allowed = place, allowed
        self._child: Child | None = None
        self._note: dict[str, Any] = {"state": "none"}
        self._lock = threading.Lock()
        self._adopt()

    # --- for routes

    def state(self) -> dict[str, Any]:
        """Describe the model that is loaded or being loaded: state, model, settings, lines that it said, seconds."""
        note = self._note.copy()  # at once: whoever waits for the model adds to it
        note = {key: value for key, value in note.items() if key not in ("port", "key", "pid")}
        lines = lines_of(self._log) if note["state"] != "none" else []
        began_s = note.get("began_at")
        seconds = (note.get("ready_at") or time.time()) - began_s if began_s else None
        return note | {"lines": lines[-30:], "seconds": seconds}

    def load(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Begin to load a model, in place of another one. ApiError: 400 for settings that cannot be, 409 while one is
        being loaded."""
        model, settings = _asked(body)
        for name, value in {"model": model, **settings}.items():
            if name in OPENED:
                for folder in value if isinstance(value, list) else [value]:
                    check_folder(folder, (Path(), *self._allowed), name)
        with self._lock:
            if self._note["state"] == "loading":
                raise ApiError(
                    409, f"{self._note['model']} is being loaded. Stop that first, or wait for it.", code="loading"
                )
            self._end()
            write_json(self._last, {"model": model})
            port, key = free_port(), secrets.token_urlsafe(24)
            keys = self.place.of("model") / "key"
            write_atomic(keys, key, for_us=True)
            ours = {"port": port, "api_key_file": keys, "log_dir": self.place.logs / "serve"}
            ours["allowed_folder"] = [folder.absolute() for folder in self._allowed]
            self._child = Child(["serve", *_flags(ours | settings), "--", model], self._log)
            self._note = {
                "state": "loading",
                "model": model,
                "settings": settings,
                "command": shlex.join(["outcore", "serve", model, *_flags(settings)]),
                "began_at": time.time(),
                "port": port,
                "key": key,
                "pid": self._child.pid,
                "message": "",
            }
            args = (self._child, self._note)
            threading.Thread(target=self._await, args=args, name="model's start", daemon=True).start()
        return self.state()

    def unload(self) -> dict[str, Any]:
        """Let the model go, also in the middle of loading."""
        with self._lock:
            if self._note["state"] in ("none", "stopped"):
                raise ApiError(409, "No model is loaded.", code="no_model")
            self._end()
            self._note |= {"state": "stopped", "message": ""}
        return self.state()

    def address(self) -> tuple[str, dict[str, str]]:
        """(base address, headers) of the model's server. ApiError with what to do while there is none."""
        note = self._note
        if note["state"] == "ready" and not self._is_alive():
            self._failed(note, self._end_of(self._child, note))
        if note["state"] == "ready":
            return f"http://127.0.0.1:{note['port']}", {"Authorization": f"Bearer {note['key']}"}
        if note["state"] == "loading":
            raise StillLoading(503, f"{note['model']} is still being loaded.", code="loading", retry_s=2)
        why = f" {note['model']} is gone: {note['message']}" if note["state"] == "failed" else ""
        raise ApiError(409, f"No model is loaded: load one first.{why}", code="no_model")

    def metrics(self) -> dict[str, Any]:
        """Figures of the model's server: name -> value, or label values -> value."""
        self.address()
        try:
            page = _get(self._note, "/metrics").text
        except httpx.HTTPError as error:
            raise ApiError(503, f"The model's server does not answer: {error}", code="no_answer") from error
        return parse_metrics(page)

    def residency(self) -> dict[str, Any]:
        """Tell where weights live and how full the pages of keys and values are; {} while no server says so."""
        try:
            found = self.metrics()
        except ApiError:
            return {}
        pages: dict[str, float] = found.get("kv_pages") or {}
        used = sum(count for label, count in pages.items() if label.endswith("used"))
        return {
            "weight_bytes": found.get("weight_bytes") or {},
            "travelling_bytes": found.get("travelling_bytes"),
            "kv_bytes": found.get("kv_bytes"),
            "kv_used_share": used / sum(pages.values()) if sum(pages.values()) else None,
            "prefix_pages": found.get("prefix_pages"),
        }

    def close(self) -> None:
        """The panels end: the model with them."""
        with self._lock:
            self._end()

    # --- parts

    @property
    def _log(self) -> Path:
        return self.place.own / "model" / "serve.log"

    @property
    def _file(self) -> Path:
        return self.place.own / "model" / "loaded.json"

    @property
    def _last(self) -> Path:
        return self.place.own / "model" / "last.json"

    def _adopt(self) -> None:
        note = read_object(self._file)
        if note and _answers(note):
            self._note = note
        elif last := read_object(self._last).get("model"):
            self._note = {"state": "none", "model": last}

    def _await(self, child: Child, note: dict[str, Any]) -> None:
        while child.exit_code is None and self._note is note:
            if _answers(note):
                ready = {"state": "ready", "ready_at": time.time(), "launch": _launch(note)}
                with self._lock:
                    if self._note is not note:  # let go meanwhile: nobody is to find it
                        return
                    with contextlib.suppress(OSError):  # then panels that start next do not find it
                        write_json(self._file, note | ready)
                    note |= ready
                break
            time.sleep(LOOK_EVERY_S)
        while child.exit_code is None and self._note is note:
            time.sleep(LOOK_EVERY_S)
        if self._note is note and note["state"] in ("loading", "ready"):
            self._failed(note, self._end_of(child, note))

    def _end_of(self, child: Child | None, note: Mapping[str, Any]) -> str:
        """Why a model's process ended."""
        if child is None:  # adopted: its end is nobody's to read
            return "the model's process was ended from outside"
        code = child.exit_code or 0
        was = "while it was loaded" if note["state"] == "loading" else "while it served"
        return f"killed by {signal.Signals(-code).name} {was}" if code < 0 else complaint_of(self._log)

    def _failed(self, note: dict[str, Any], words: str) -> None:
        note |= {"state": "failed", "message": words}
        self._file.unlink(missing_ok=True)

    def _is_alive(self) -> bool:
        if self._child is not None:
            return self._child.exit_code is None
        return _answers(self._note)

    def _end(self) -> None:
        note, child = self._note, self._child
        self._note, self._child = {**note, "state": "none" if note["state"] == "none" else "stopped"}, None
        self._file.unlink(missing_ok=True)
        if child is not None:
            child.end()
        elif note["state"] == "ready" and _answers(note):  # adopted: it is ours, its key says so
            with contextlib.suppress(ProcessLookupError):
                ask_to_stop(note["pid"], signal.SIGTERM)


def _asked(body: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    model = body.get("model")
    if not isinstance(model, str) or not (model := model.strip()):
        raise bad("model must name a folder, a run in final_model/, a checkpoint or a hub id.", "model")
    settings = {name: body[name] for name in FIELDS if body.get(name) not in (None, "", [])}
    if isinstance(settings.get("nvme_path"), str):
        settings["nvme_path"] = [settings["nvme_path"]]
    for name, value in {"model": model, **settings}.items():
        for one in value if name == "nvme_path" and isinstance(value, list) else [value]:
            if isinstance(one, (list, dict, bool)) or (name in OPENED and not isinstance(one, str)):
                raise bad(f"{name}: expected one value, got {json.dumps(value)}.", name)
            if isinstance(one, str) and (one.startswith("-") or "\0" in one):
                raise bad(f"{name} is {one!r}, which is a flag, not a value.", name)
    degrees = {name: body[name] for name in DEGREES if body.get(name) not in (None, 1)}
    unknown = sorted(set(body) - {"model", *FIELDS, *DEGREES})
    if unknown:
        raise bad(f"{unknown[0]} is no setting of a model.", unknown[0])
    try:
        InferSettings(**{**settings, "nvme_path": tuple(settings.get("nvme_path", ()))})
    except (ValueError, TypeError) as error:
        word = str(error).split(" ", 1)[0]
        raise bad(str(error), word if word in FIELDS else None) from error
    return model, _over_gpus(settings, degrees) if degrees else settings


def _over_gpus(settings: dict[str, Any], degrees: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as vLLM is handed them. ApiError where these GPUs have no such groups, or it lacks a setting."""
    for name, value in degrees.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise bad(f"{name} must be a whole number, got {value!r}.", name)
    if settings.get("preset") == ONE_READER:
        settings = {name: value for name, value in settings.items() if name != "preset"}
    try:
        refuse_ours(settings)
        lay_out(detect_topology(detect_machine().gpus), *(degrees.get(name, 1) for name in DEGREES))
    except ValueError as error:
        word = str(error).split(" ", 1)[0]
        raise bad(str(error), word if word in (*FIELDS, *DEGREES) else None) from error
    return {"engine": "vllm", **settings, **degrees}


def _flags(settings: Mapping[str, Any]) -> list[str]:
    """Each value in one word with its name: none is taken for a flag."""
    return [f"--{n}={one}" for n, value in settings.items() for one in (value if isinstance(value, list) else [value])]


def _answers(note: Mapping[str, Any]) -> bool:
    """Whether the server of this key is there (a stranger on its port does not know the key)."""
    try:
        return _get(note, "/v1/models").json()["data"][0]["owned_by"] in OWNERS
    except (httpx.HTTPError, LookupError, ValueError):
        return False


def _get(note: Mapping[str, Any], path: str) -> httpx.Response:
    """A page of this model's server. httpx.HTTPError where there is none."""
    headers = {"Authorization": f"Bearer {note['key']}"}
    return httpx.get(
        f"http://127.0.0.1:{note['port']}{path}", headers=headers, timeout=ANSWER_S, trust_env=False
    ).raise_for_status()


def _launch(note: Mapping[str, Any]) -> dict[str, Any]:
    """Ask the model's server how it laid the model out: degrees, ZeRO's terms, homes, precision."""
    try:
        return _get(note, "/v1/launch").json()
    except (httpx.HTTPError, ValueError) as error:
        return {"problem": f"the server does not say: {error}"}


def parse_metrics(page: str) -> dict[str, Any]:
    """Prometheus' text as numbers: name -> value, with labels name -> {label values: value}."""
    found: dict[str, Any] = {}
    for line in page.splitlines():
        if match := _METRIC.match(line):
            name, labels, value = match[1], match[2], float(match[3])
            if name.endswith(("_bucket", "_created")):
                continue
            if labels:
                key = " ".join(re.findall(r'="([^"]*)"', labels))
                found.setdefault(name, {})[key] = value
            else:
                found[name] = value
    return found

"""Training as child processes: start, stop as Ctrl-C does, resume; a run outlives the panels that started it."""

from __future__ import annotations

import platform
import signal
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from outcore.common import read_object
from outcore.common.os_layer import ask_to_stop, stop_signals
from outcore.config import FIELDS, ConfigError
from outcore.monitor import read_metrics
from outcore.runs import folder_of, holder_of, list_runs, lock_path, next_name
from outcore.serve.additions import ApiError, bad
from outcore.ui.api.children import Child, complaint_of
from outcore.ui.api.form import COMMAND_LINE, HIDDEN, argv_of, checked, command_of, said
from outcore.ui.api.place import Place, write_json

STOPPED = [code for n in stop_signals() for code in (128 + n, -n)]
"""Exit codes of a run that was told to stop; negative ones where it did not listen to signals yet."""
NOT_OF_THE_RUN = frozenset({"resume_from_checkpoint", "continue_with_changes", "trace"})
"""Said of one start, not of the run: a resumed run is not told again."""


class Training:
    """Run started from the panels. One run at a time is started from here: two share one GPU badly."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._children: dict[str, Child] = {}
        self._starting, self._noting = threading.Lock(), threading.Lock()

    def start(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Begin a run. ApiError: 400 for settings that cannot be, 409 while another run trains."""
        settings = said(fields)
        config = checked(settings)
        if not self._starting.acquire(blocking=False):
            raise ApiError(409, "A run is being started already.", code="training")
        try:
            self._check_idle()
            name = next_name(config)
            try:
                folder_of(config, name).lock().release()
            except ConfigError as error:  # RunInUse is a ValueError too, but nobody trains: `_check_idle`
                raise bad(str(error)) from error
            settings = settings | {"run_name": name}
            argv = argv_of(settings)
            with self._noting:
                self._children[name] = Child(["train", *argv], self.log_of(name))
                note = {"run": name, "settings": settings, "started_at": time.time(), "exit_code": None}
                write_json(self._note(name), note)
        except OSError as error:
            raise ApiError(507, f"The run cannot be started: {error.strerror or error}.", code="start") from error
        finally:
            self._starting.release()
        return self.job(name) | {"command": command_of(settings)}

    def resume(self, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Go on with a run from its newest whole checkpoint. `fields`: what is to be otherwise."""
        settings = self.settings_of(name) | said(fields)
        return self.start(settings | {"run_name": name, "resume_from_checkpoint": "auto"})

    def settings_of(self, name: str) -> dict[str, Any]:
        """Read the settings of a run that differ from the defaults. 404 when it left nothing."""
        noted = read_object(self._note(name)).get("settings")
        if noted is None:
            try:
                config = read_metrics(self.place.logs / name / "metrics.jsonl").header.get("config") or {}
            except FileNotFoundError:
                raise ApiError(404, f"There is no run {name!r}, or it has not begun a step.", param="name") from None
            noted = {key: value for key, value in config.items() if key in FIELDS and key not in HIDDEN}
        return {key: value for key, value in said(noted).items() if key not in NOT_OF_THE_RUN | COMMAND_LINE}

    def stop(self, name: str, *, at_once: bool = False) -> dict[str, Any]:
        """Stop as Ctrl-C does: the run finishes its step, saves and ends; `at_once`: as a second Ctrl-C."""
        pid = self._pid(name)
        if pid is None:
            raise ApiError(409, f"Run {name} is not running on this machine.", param="name", code="not_running")
        with suppress(ProcessLookupError):  # it has just ended
            ask_to_stop(pid)
            if at_once:
                time.sleep(0.2)
                if self._pid(name) == pid:
                    ask_to_stop(pid)
        return self.job(name)

    def job(self, name: str) -> dict[str, Any]:
        """State of a start from here is: state, exit code, why it failed."""
        with self._noting:
            pid, child = self._pid(name), self._children.get(name)  # before the code: where nobody runs there is one
            note = read_object(self._note(name))
            if not note:
                return {"run": name, "state": "running" if pid else "none", "message": ""}
            code = child.exit_code if child else note.get("exit_code")
            if child is not None and code is not None and note.get("exit_code") is None:
                note["exit_code"] = code
                write_json(self._note(name), note)
        is_running = code is None and pid is not None
        state, message = ("running", "") if is_running else self._end_of(name, code)
        return {"run": name, "state": state, "message": message, "started_at": note["started_at"], "exit_code": code}

    def log_of(self, name: str) -> Any:
        """The file with what the run printed."""
        return self.place.of("console") / f"{name}.log"

    def forget(self, name: str) -> None:
        """Remove what was noted of a run that is deleted."""
        self._children.pop(name, None)
        for path in (self._note(name), self.log_of(name)):
            path.unlink(missing_ok=True)

    def started(self) -> list[str]:
        """Names of all runs that were started from here since the panels began, or that train now."""
        return list(dict.fromkeys([*self._children, *self.running()]))

    def running(self) -> list[str]:
        """Names of all runs that train now in these folders, whoever started them."""
        own = [name for name, child in self._children.items() if child.exit_code is None]
        runs = list_runs(self.place.checkpoints, self.place.logs, self.place.exports)
        return list(dict.fromkeys([*own, *(r.folder.name for r in runs if r.state.startswith("running"))]))

    def _end_of(self, name: str, code: int | None) -> tuple[str, str]:
        if code == 0:
            return "finished", ""
        if code in STOPPED:
            return "stopped", ""
        words = complaint_of(self.log_of(name))
        if code is None:
            return "ended", "The run ended while no panel watched; its log says how."
        if code < 0:
            return "failed", f"Killed by {signal.Signals(-code).name}. Resume goes on from the last checkpoint."
        return "refused" if code == 2 else "failed", words

    def _check_idle(self) -> None:
        if names := self.running():
            raise ApiError(
                409,
                f"Run {names[0]} is training, and two runs at once would share this machine's memory and links. Stop "
                "it first (it saves), or wait for its end.",
                code="training",
            )

    def _pid(self, name: str) -> int | None:
        child = self._children.get(name)
        if child is not None and child.exit_code is None:
            return child.pid
        holder = holder_of(lock_path(self.place.checkpoints, name)) or {}
        pid = holder.get("pid")
        return pid if isinstance(pid, int) and holder.get("host") == platform.node() else None

    def _note(self, name: str) -> Any:
        return self.place.of("runs") / f"{name}.json"

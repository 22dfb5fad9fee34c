"""The start's parts: every second in one of them, none in two; and what a person is told before it can say anything."""

import itertools
import sys
import threading
from typing import Any

import pytest

from outcore import cli
from outcore.monitor.metrics import StartupClock, log
from outcore.train import command


def test_parts_add_up(monkeypatch: pytest.MonkeyPatch):
    times = itertools.chain([10.0, 13.0, 21.0, 21.5, 22.5])
    monkeypatch.setattr(log.time, "perf_counter", lambda: next(times))
    clock = StartupClock(began_s=8.0)
    clock.mark("settings")
    clock.mark("engine_init", of_it={"model_load": 2.0})
    clock.mark("logs")
    assert clock.parts_s == {"imports": 2.0, "settings": 3.0, "model_load": 2.0, "engine_init": 6.0, "logs": 0.5}
    assert clock.words() == (
        "start: 13.5 s (engine init 6.0 s, settings 3.0 s, imports 2.0 s, model load 2.0 s, logs 500 ms)"
    )
    clock.mark("plan", of_it={"model_load": 5.0})  # known parts are never more than what passed
    assert clock.parts_s["plan"] == 0.0 and clock.parts_s["model_load"] == 1.0
    monkeypatch.setattr(log, "compile_s", lambda: 4.0)
    assert clock.of_first_step(9.0) == {**clock.parts_s, "first_step": 9.0, "compile": 4.0}
    assert clock.of_first_step(3.0)["compile"] == 3.0
    assert "first_step" not in clock.parts_s


class Interrupted(Exception):
    """Ends an import: nothing is imported anew."""


@pytest.mark.parametrize(("is_terminal", "is_slow"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("main", "room", "argv"), [
    (cli.main, "outcore.data.main", ["data", "rows.jsonl"]),
    (command.main, "outcore.train.run", ["--dataset", "rows.jsonl"]),
])  # fmt: skip
def test_a_person_at_a_terminal_is_told_that_imports_take_seconds(
    main: Any, room: str, argv: list[str], is_terminal: bool, is_slow: bool, monkeypatch, capsys
) -> None:
    """`train` imports what it needs once its flags are right, other commands their room."""
    timers: list[threading.Timer] = []

    class Timer(threading.Timer):
        """Fires at once where imports are slow, and long after them where they are not."""

        def __init__(self, seconds: float, *args: Any) -> None:
            super().__init__(0 if is_slow else 3600, *args)
            timers.append(self)

    class Imports:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == room:
                if is_terminal and is_slow:
                    timers[0].join(60)
                raise Interrupted

    monkeypatch.setattr(threading, "Timer", Timer)
    monkeypatch.delitem(sys.modules, room, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Imports(), *sys.meta_path])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with pytest.raises(Interrupted):
        main(argv)
    assert ("starting: torch and transformers are imported" in capsys.readouterr().err) == (is_terminal and is_slow)
    (timer,) = timers
    assert timer.finished.is_set()

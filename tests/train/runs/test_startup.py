"""The start's parts: every second in one of them, none in two."""

import itertools

import pytest

from outcore.monitor.metrics import StartupClock, log


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

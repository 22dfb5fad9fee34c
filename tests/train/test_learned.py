"""Forecasts learn: how long a finished run's steps took is kept by kind of run and machine, and said the next time."""

import json
from dataclasses import replace

import pytest

from outcore.plan import RunRequest, choose
from outcore.plan.learned import LEAST_STEPS, kind_of, last_time, remember
from outcore.plan.main import main
from outcore.plan.run import Forecast
from tests.plan.fakes import prototype_shape, server

HERE = server(identity="a GPU; a CPU; 64 GiB")


@pytest.fixture
def plan():
    return choose(prototype_shape(), RunRequest(seq_length=1024, micro_batch=4, accumulation=1), HERE).plan


def test_a_step_that_took_longer_is_said_with_the_next_forecast_of_its_kind(tmp_path, plan):
    path, step_s = tmp_path / "forecasts.json", plan.time.step_s
    assert last_time(plan, HERE, path) == ""
    said = remember(plan, 1.3 * step_s, "first", HERE, path)
    assert "1.3 times the forecast" in said
    longer = replace(plan, time=replace(plan.time, compute_s=2 * plan.time.compute_s))
    words = last_time(longer, HERE, path)
    assert words.startswith("this machine took 1.3 times the forecast last time (run first: ")
    assert last_time(replace(plan, lora_r=16), HERE, path) == ""
    assert last_time(plan, replace(HERE, identity="another"), path) == ""
    assert remember(plan, 1.1 * step_s, "second", HERE, path) == "" == last_time(plan, HERE, path)
    assert json.loads(path.read_text())["ratios"][kind_of(plan)]["run"] == "second"
    remember(plan, 0.5 * step_s, "third", replace(HERE, identity="another"), path)
    assert last_time(plan, HERE, path) == ""


@pytest.mark.parametrize("text", ["", "[]", "{", '{"ratios": 3}', '{"machine": "m", "ratios": {"a": {}}}'])
def test_a_damaged_file_is_written_anew(tmp_path, plan, text):
    path = tmp_path / "forecasts.json"
    path.write_text(text)
    assert last_time(plan, HERE, path) == ""
    remember(plan, 2 * plan.time.step_s, "run", HERE, path)
    assert "2.0 times" in last_time(plan, HERE, path)


def test_a_run_teaches_only_by_enough_steps_and_where_the_forecast_was_whole(tmp_path, plan, monkeypatch):
    monkeypatch.chdir(tmp_path)
    slow = [9.0, *[2 * plan.time.step_s] * LEAST_STEPS]
    assert "2.0 times" in Forecast(plan, HERE).learn(slow, "run")
    whole = replace(plan, time_whole=replace(plan.time, step_s=2 * plan.time.step_s))
    assert Forecast(whole, HERE).learn(slow, "run", is_ahead=True) == ""
    assert "2.0 times" in Forecast(whole, HERE).learn(slow, "run")
    assert Forecast(plan, HERE).learn(slow[:-1], "run") == "" == Forecast(None, None, "none").learn(slow, "run")
    assert Forecast(replace(plan, compute_known=False), HERE).learn(slow, "run") == ""


def test_the_plan_command_says_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    told: list = []
    monkeypatch.setattr("outcore.plan.main.last_time", lambda plan, hardware: told.append(hardware) or "1.7 times")
    main(["--model", "llama-1b", "--machine", "rtx4070-laptop", "--json"])
    assert "1.7 times" in json.loads(capsys.readouterr().out)["notes"] and "RTX 4070" in told[0].identity

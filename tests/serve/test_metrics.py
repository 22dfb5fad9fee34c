"""What a server tells of itself: metrics, records, events, and its forecast."""

from __future__ import annotations

import json
import re
import socket
from contextlib import closing

import pytest
import yaml

from outcore.infer import Request, Sampling
from outcore.infer.opening import InferSettings, open_engine
from tests.forked import ROOT
from tests.infer.models import MIXTURE, SCARCE, save_tiny_model
from tests.serve.running import get, held, send
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("one_thread")


def test_metrics_and_records(server):
    status, reply = send(server, "/v1/completions", {"prompt": "The", "max_tokens": 3, "ignore_eos": True})
    assert status == 200
    page = get(server, "/metrics")
    assert 'outcore_answers_total{reason="length"}' in page
    for name in (
        "time_to_first_token_seconds_bucket", "pass_seconds_count", "kv_pages", "weight_bytes", "draft_tokens",
    ):  # fmt: skip
        assert f"outcore_{name}" in page
    lines = [json.loads(line) for line in server.service.records.path.read_text().splitlines()]
    assert lines[0]["model_hash"] and lines[0]["placement"]
    (last,) = [line for line in lines if line.get("request", "").startswith(json.loads(reply)["id"])]
    assert last["endpoint"] == "/v1/completions" and last["answer_tokens"] == 3 and "text" not in last
    times = last["timings"]
    assert isinstance(last["seed"], int) and times["total_s"] > 0 and set(times["waited_s"]) == {"pcie", "nvme"}
    assert times["pages"] == {"ram": 1} and 1 <= times["passes"] <= 3 and times["read_tokens"] == 0


def test_answers_whose_client_went_away_count(server):
    records, counted = server.service.records.path, server.service.metrics.finished.labels("cancelled")._value.get
    before = counted()
    body = json.dumps({"prompt": "The", "max_tokens": 60, "ignore_eos": True, "stream": True, "n": 2}).encode()
    with held(server.service.opened.engine), socket.create_connection(("127.0.0.1", server.port)) as begun:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        begun.sendall(head.encode() + body)
        assert begun.recv(12) == b"HTTP/1.1 200"
    until(lambda: counted() == before + 2)
    told = ["cancelled"] * 2
    until(lambda: [json.loads(line)["finish"] for line in records.read_text().splitlines()[-2:]] == told)


def test_board_and_alerts_name_metrics_that_exist(server):
    page = get(server, "/metrics")
    board = json.loads((ROOT / "examples/serving/grafana_board.json").read_text())
    rules = yaml.safe_load((ROOT / "examples/serving/alerts.yml").read_text())["groups"][0]["rules"]
    asked = [target["expr"] for panel in board["panels"] for target in panel["targets"]] + [r["expr"] for r in rules]
    names = {name for text in asked for name in re.findall(r"outcore_\w+", text)}
    known = set(re.findall(r"^(?:# TYPE )?(outcore_\w+)", page, re.M))
    assert len(names) > 15 and names <= known, names - known


def test_a_measured_machine_has_a_forecast(server, monkeypatch):
    from outcore.infer.opening import forecast
    from outcore.plan import load_hardware
    from outcore.serve.watch import ServeMetrics

    monkeypatch.setattr(forecast, "load_hardware", lambda: load_hardware("rtx4070-laptop"))
    opened = server.service.opened
    monkeypatch.setattr(opened.engine, "observers", [])
    made = ServeMetrics(opened)
    assert len(opened.engine.observers) == 2  # its own and the forecast's
    made.against_plan.last_forecast_s = 0.25
    page = made.page().decode()
    assert "outcore_forecast_pass_seconds 0.25" in page and not made.against_plan.why_not
    assert re.search(r'^outcore_kv_pages{group="all",home="ram",state="free"} [1-9]', page, re.M)


def test_metrics_tell_how_often_experts_were_there(tmp_path):
    from outcore.serve.watch import ServeMetrics

    save_tiny_model(tmp_path / "model", family="qwen3_moe", **MIXTURE)
    room = {"ram_gib": 0.0036, "expert_cache_gib": 0.001, **SCARCE}
    settings = InferSettings(device="cpu", context=128, nvme_path=(tmp_path,), **room)
    with closing(open_engine(str(tmp_path / "model"), settings)) as opened:
        made, counts = ServeMetrics(opened), opened.weights.experts.counts
        assert type(counts)().hit_rate is None, "nothing was asked for"
        sampling = Sampling(temperature=0, max_tokens=4, ignore_eos=True)
        list(opened.engine.generate([Request("one", (5, 6, 7), sampling)]))
        page = made.page().decode()
        told = {name: float(value) for name, value in re.findall(r"^outcore_(\w+) ([\d.e+]+)$", page, re.M)}
        assert told["experts_asked"] == counts.asked > told["expert_hits"] == counts.hits > 0
        assert told["expert_hit_rate"] == pytest.approx(counts.hit_rate)
        assert told["drive_bytes"] >= told["expert_read_bytes"] == counts.read_bytes > 0


def test_events_tell_failures_and_the_forecast(start, monkeypatch, tmp_path):
    from outcore.infer.opening import AgainstPlan
    from outcore.serve.watch import metrics

    class Plan:
        def pass_time(self, rows, kv_tokens, answers, seen, hit_rate):
            assert seen >= rows > 0
            return type("Time", (), {"seconds": 0.5})

    monkeypatch.setattr(metrics, "against_plan", lambda opened: AgainstPlan(opened, Plan()))
    server = start(max_sequences=2)
    asked = {"prompt": "The", "max_tokens": 5, "ignore_eos": True}
    assert send(server, "/v1/completions", asked)[0] == 200
    with monkeypatch.context() as patch:
        runner = server.service.opened.engine.runner
        patch.setattr(runner, "run", lambda works: 1 / 0)
        assert send(server, "/v1/completions", asked)[0] == 500
    facts = server.service.metrics.against_plan.facts()
    assert facts["passes"] >= 2 and facts["forecast_s"] == 0.5 * facts["passes"]
    assert facts["measured_over_forecast"] == facts["measured_s"] / facts["forecast_s"]
    path = server.service.events.path
    until(lambda: "pass failed" in path.read_text())  # noted when the client has been told
    server.service.events.note("serve ended", **facts)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    mine = [line for line in lines if line["event"] == "pass failed"]
    assert (
        "ZeroDivisionError" in mine[-1]["error"] and lines[-1]["forecast_tokens_per_s"] > 0 and "rank" not in mine[-1]
    )
    assert any(line["event"] == "serve started" and line["placement"] for line in lines)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    server.service.events.note("serve ended")
    assert json.loads(server.service.events.path.read_text().splitlines()[-1])["rank"] == 1

"""Who may come in, route by route: a new route enters the table of its application, and every rule is tried on it."""

import http.client
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("lm_eval")

from starlette.routing import Mount
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from outcore.evaluate.http import with_evaluations
from outcore.serve import ServeSettings
from outcore.serve.watch import RequestMetrics
from outcore.ui.api import PanelsApi, Place
from outcore.ui.app import create_app as create_panels
from outcore.ui.settings import UiSettings
from tests.refused import refused
from tests.serve.running import Running
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("one_thread")
KEY = "a-long-enough-key"
BEARER = {"Authorization": f"Bearer {KEY}"}
READS, ACTS, FORM, OPEN = "reads", "acts", "takes a form", "is open"
OF_THE_MODEL = {
    "GET /openapi.json": READS, "HEAD /openapi.json": READS, "GET /health": OPEN, "HEAD /health": OPEN,
    "GET /metrics": READS,
    "GET /v1/models": READS, "POST /tokenize": ACTS, "POST /detokenize": ACTS, "POST /v1/chat/completions": ACTS,
    "POST /v1/completions": ACTS, "POST /v1/responses": ACTS, "POST /v1/embeddings": ACTS,
    "GET /v1/launch": READS, "POST /v1/evaluations": ACTS,
}  # fmt: skip
EVALUATIONS = {
    "GET /v1/launch": READS, "GET /v1/evaluations": READS, "GET /v1/evaluations/{name}": READS,
    "GET /v1/evaluations/{name}/samples": READS, "GET /v1/evaluations/{name}/export": READS,
    "GET /v1/evaluations/{a}/diff/{b}": READS,
    "GET /v1/evaluation_tasks": READS, "POST /v1/evaluations": ACTS, "POST /v1/evaluations/{name}/cancel": ACTS,
    "POST /v1/evaluations/{name}/resume": ACTS, "DELETE /v1/evaluations/{name}": ACTS,
}  # fmt: skip
TABLE = {
    "proxy": OF_THE_MODEL,
    "serve": OF_THE_MODEL | EVALUATIONS | {
        "POST /v1/messages": ACTS, "POST /v1/messages/count_tokens": ACTS,
        "GET /v1/models/{name:path}": READS, "POST /v1/files": FORM, "GET /v1/files": READS,
        "GET /v1/files/{name}": READS, "GET /v1/files/{name}/content": READS, "DELETE /v1/files/{name}": ACTS,
        "POST /v1/batches": ACTS, "GET /v1/batches": READS, "GET /v1/batches/{name}": READS,
        "POST /v1/batches/{name}/cancel": ACTS, "GET /v1/requests": READS, "GET /v1/requests/{name}": READS,
        "POST /v1/requests/{name}/cancel": ACTS, "POST /classify": ACTS, "POST /rerank": ACTS,
        "POST /v1/rerank": ACTS,
    },
    "panels": EVALUATIONS | {
        "GET /openapi.json": READS, "HEAD /openapi.json": READS, "GET /health": OPEN, "GET /v1/fields": READS,
        "GET /v1/paths/folders": READS, "POST /v1/paths/check": ACTS, "GET /v1/machine": READS,
        "GET /v1/machine/live": READS, "GET /v1/machine/thresholds": READS, "PUT /v1/machine/thresholds": ACTS,
        "GET /v1/runs": READS, "GET /v1/run_comparison": READS, "GET /v1/runs/{name}": READS,
        "GET /v1/runs/{name}/series": READS, "GET /v1/runs/{name}/log": READS, "GET /v1/runs/{name}/settings": READS,
        "POST /v1/runs": ACTS, "POST /v1/runs/{name}/stop": ACTS, "POST /v1/runs/{name}/resume": ACTS,
        "POST /v1/runs/{name}/export": ACTS, "DELETE /v1/runs/{name}": ACTS, "POST /v1/estimate": ACTS,
        "POST /v1/data/preview": ACTS, "GET /v1/model": READS, "GET /v1/model/live": READS,
        "GET /v1/model/metrics": READS, "POST /v1/model": ACTS, "DELETE /v1/model": ACTS,
        "GET /v1/conversations": READS, "POST /v1/conversations": ACTS, "GET /v1/conversations/{name}": READS,
        "PATCH /v1/conversations/{name}": ACTS, "DELETE /v1/conversations/{name}": ACTS,
        "GET /v1/conversations/{name}/export": READS, "POST /v1/conversations/{name}/answer": ACTS,
        "GET /v1/conversations/{name}/answer": READS, "DELETE /v1/conversations/{name}/answer": ACTS,
        # passed on to the model's server, which has them in its own table
        "POST /v1/files": FORM, "POST /v1/completions": ACTS, "GET /v1/models": READS,
    },
}  # fmt: skip
PASSED_ON = {"POST /v1/files", "POST /v1/completions", "GET /v1/models"}


@pytest.fixture(scope="module")
def serve(tiny_folder, tmp_path_factory):
    """Our own server, with evaluations and a key."""
    logs = tmp_path_factory.mktemp("gate") / "serve"
    running = Running(tiny_folder[0], ServeSettings(logs=logs, name="tiny", api_keys=(KEY,)), with_evaluations)
    yield running
    running.stop()


def proxied():
    from outcore.serve.handover.proxy import Forwarder, create_proxy

    process = SimpleNamespace(url="http://127.0.0.1:1", state="failed", restarts=0, why="", stop=lambda: None)
    records = SimpleNamespace(close=lambda: None)
    settings = ServeSettings(api_keys=(KEY,))
    return create_proxy(Forwarder(process, "k", settings, RequestMetrics(), records), {})


@pytest.fixture(params=list(TABLE))
def guarded(request, tmp_path, monkeypatch):
    """(name, application, client)."""
    monkeypatch.chdir(tmp_path)
    if request.param == "serve":
        app = request.getfixturevalue("serve").app
    else:
        app = proxied() if request.param == "proxy" else create_panels(
            UiSettings(tokens=(KEY,)), PanelsApi(Place()), with_panels=False
        )  # fmt: skip
    return request.param, app, TestClient(app, base_url="http://127.0.0.1:8000", raise_server_exceptions=False)


def routes_of(app) -> set[str]:
    return {
        f"{method} {route.path}" for route in app.routes if not isinstance(route, Mount) for method in route.methods
    }


def ask(client, row: str, **headers: str):
    method, _, path = row.partition(" ")
    return client.request(method, path.replace("{name:path}", "x"), headers={**BEARER, **headers})


def test_every_route_stands_in_the_table_and_only_reading_is_a_get(guarded):
    name, app, _ = guarded
    assert routes_of(app) == set(TABLE[name]) - (PASSED_ON if name == "panels" else set())
    for row, kind in TABLE[name].items():
        assert (kind in (READS, OPEN)) == row.startswith(("GET ", "HEAD ")), row


@pytest.mark.parametrize("headers", [
    {"Host": "rebound.example"}, {"Host": "127.0.0.1.rebound.example:8000"}, {"Host": "0.0.0.0:8000"}, {"Host": "["},
    {"Host": ""}, {"Host": "10.0.0.1"}, {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://["},
    {"Origin": "http://127.0.0.1:3000"}, {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"},
])  # fmt: skip
def test_other_names_and_other_sites_are_turned_away_everywhere(guarded, headers):
    name, _, client = guarded
    for row in TABLE[name]:
        answer = ask(client, row, **headers)
        assert answer.status_code == 403, (row, answer.status_code)
        assert row.startswith("HEAD") or answer.json()["error"]["type"] == "permission_error"


def test_no_other_protocol_comes_past_the_guard(guarded):
    with pytest.raises(WebSocketDisconnect) as closed, guarded[2].websocket_connect("/v1/models"):
        pass
    assert closed.value.code == 1008


def test_a_body_is_of_the_kind_that_its_route_reads(guarded):
    name, _, client = guarded
    for row, kind in TABLE[name].items():
        method, _, path = row.partition(" ")
        for sent in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            if kind != FORM or not sent.startswith("multipart"):
                headers = BEARER | {"Content-Type": sent}
                for body in (b"{}", iter([b"{", b"}"])):  # as a whole, and in chunks
                    answer = client.request(method, path, content=body, headers=headers)
                    assert answer.status_code == 415, (row, sent, answer.status_code)
        if kind == FORM:
            assert client.request(method, path, json={}, headers=BEARER).status_code == 415
    twice = [*BEARER.items(), ("Content-Type", "application/json"), ("Content-Type", "text/plain")]
    assert client.post("/v1/completions", content=b"{}", headers=twice).status_code == 415


def test_no_body_is_longer_than_one_may_be(guarded):
    name, _, client = guarded
    others = {"POST /gradio_api/queue/join": ACTS, "POST /gradio_api/upload": FORM} if name == "panels" else {}
    for row, kind in (TABLE[name] | others).items():
        method, _, path = row.partition(" ")
        sent = {"Content-Type": "multipart/form-data; boundary=x" if kind == FORM else "application/json"}
        answer = client.request(method, path, content=b"{}", headers=BEARER | sent | {"Content-Length": "16777217"})
        assert answer.status_code == 413, (row, answer.status_code)


def test_a_key_is_asked_for_everywhere_but_at_the_health(guarded):
    name, _, client = guarded
    for row, kind in TABLE[name].items():
        assert (ask(client, row, Authorization="").status_code == 401) == (kind != OPEN), row
    row = "GET /openapi.json"
    assert ask(client, row, Authorization=f"bEARER {KEY}").status_code == 200
    assert [ask(client, row, Authorization=value).status_code for value in (KEY, f"Basic {KEY}")] == [401, 401]
    given = [client.get("/openapi.json", headers={"X-Api-Key": key}).status_code for key in (KEY, "another", "")]
    assert given == [200, 401, 401], "as Anthropic's clients send it"


@pytest.mark.parametrize(("listens", "host", "status"), [
    ("127.0.0.1", "127.0.0.1:8000", 200), ("127.0.0.1", "localhost:9000", 200), ("127.0.0.1", "LocalHost", 200),
    ("::1", "[::1]:8000", 200), ("::1", "localhost", 200), ("::ffff:10.0.0.5", "10.0.0.5:8000", 200),
    ("10.0.0.5", "10.0.0.5", 200), ("10.0.0.5", "localhost", 403), ("10.0.0.5", "10.0.0.6", 403),
    ("10.0.0.5", "models.example", 200), ("10.0.0.5", "Models.Example:443", 200), ("10.0.0.5", "example", 403),
    ("10.0.0.5", "models.example.evil", 403), ("10.0.0.5", "models.example:80:80", 403),
    ("127.0.0.1", "0.0.0.0:8000", 403),
])  # fmt: skip
def test_the_host_is_the_address_that_was_reached_or_a_name_that_is_allowed(tmp_path, listens, host, status):
    settings = UiSettings("0.0.0.0", tokens=(KEY,), allowed_hosts=("models.example",))
    app = create_panels(settings, PanelsApi(Place(logs=tmp_path)), with_panels=False)

    async def reached(scope, receive, send):
        await app(scope | {"server": (listens, 8000)}, receive, send)

    assert TestClient(reached).get("/health", headers={"Host": host}).status_code == status


def test_an_allowed_host_is_a_name():
    for host in ("http://a.example", "a.example:80", "A.example", ""):
        refused(ValueError, "must be a name alone", lambda host=host: ServeSettings(allowed_hosts=(host,)))


def raw(server, method: str, path: str, body: bytes, headers: dict[str, str]):
    asked = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    asked.request(method, path, body, headers)
    answer = asked.getresponse()
    return answer.status, json.loads(answer.read())


def task_in(folder: Path) -> Path:
    """A folder of the harness with a task whose file runs Python that leaves a mark; the mark."""
    folder.mkdir()
    mark = folder / "ran"
    (folder / "code.py").write_text(f"open({str(mark)!r}, 'w')\ndef prompt(doc):\n    return ''\n")
    (folder / "t.yaml").write_text("task: evil_t\ndataset_path: json\ndoc_to_text: !function code.prompt\n")
    return mark


def test_a_page_runs_no_task_file(serve, tmp_path):
    mark = task_in(tmp_path / "evil")
    body = json.dumps({"tasks": ["evil_t"], "include_path": str(tmp_path / "evil"), "limit": 1}).encode()
    page = {"Host": "rebound.example", "Origin": "http://evil.example", "Content-Type": "text/plain"}
    right = {"Host": f"127.0.0.1:{serve.port}", "Content-Type": "application/json"}
    assert raw(serve, "POST", "/v1/evaluations", body, page)[0] == 403
    assert raw(serve, "POST", "/v1/evaluations", body, right)[0] == 401
    status, said = raw(serve, "POST", "/v1/evaluations", body, right | BEARER)
    assert status == 403 and "--allowed_folder" in said["error"]["message"], "nor does who has a key"
    kept = raw(serve, "GET", "/v1/evaluations", b"", right | BEARER)[1]["data"]
    assert not [one for one in kept if "evil_t" in one["settings"]["tasks"]], "a later start would go on with it"
    for number in ("NaN", "Infinity"):
        sent = b'{"tasks": ["outcore_endings"], "limit": ' + number.encode() + b"}"
        assert raw(serve, "POST", "/v1/evaluations", sent, right | BEARER)[0] == 400
    assert not mark.exists() and not serve.service.metrics.refused.labels("500")._value.get()


def test_a_folder_that_was_allowed_has_its_tasks(serve, tmp_path, monkeypatch):
    allowed = replace(serve.service.settings, allowed_folders=(tmp_path,))
    monkeypatch.setattr(serve.service, "settings", allowed)
    monkeypatch.chdir(tmp_path)  # where C:\\tmp would be a file's name
    mark = task_in(tmp_path / "mine")
    (tmp_path / "out").symlink_to("/")
    body = {"tasks": ["evil_t"], "include_path": str(tmp_path / "mine"), "limit": 1}
    headers = BEARER | {"Content-Type": "application/json"}
    for outside in (tmp_path / "out/tmp", tmp_path / "..", "~", "C:\\tmp"):
        asked = json.dumps(body | {"include_path": str(outside)}).encode()
        assert raw(serve, "POST", "/v1/evaluations", asked, headers)[0] == 403
    status, record = raw(serve, "POST", "/v1/evaluations", json.dumps(body).encode(), headers)
    assert status == 200
    until(mark.exists)
    path = f"/v1/evaluations/{record['id']}"
    until(lambda: raw(serve, "GET", path, b"", headers)[1]["status"] not in ("queued", "running"))

"""What people do wrong, and what happens to them: clear words, nothing lost."""

import errno
import json
import os
import signal
import socket
import stat
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import get_origin

import httpx
import pytest

pytest.importorskip("fastapi")

from starlette.testclient import TestClient

from outcore.common import read_object
from outcore.config import FIELDS
from outcore.machine.topology import PlacedGpu, Topology
from outcore.serve.gate import keys as keys_module
from outcore.ui.api import PanelsApi, Place
from outcore.ui.api import children as children_module
from outcore.ui.api import conversations as conversations_module
from outcore.ui.api import model as model_module
from outcore.ui.api.form import OPENED
from outcore.ui.app import create_app
from outcore.ui.command import main
from outcore.ui.settings import UiSettings
from tests.serve.running import until

pytestmark = pytest.mark.skipif(find_spec("gradio") is None, reason="the panels' packages are not installed")
"""Whoever collects does not import it: it takes seconds."""
PRETENDER = Path(__file__).with_name("pretender.py")
LOCAL = "http://127.0.0.1:7860"
TOKEN = "a-long-enough-token"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(children_module, "PROGRAM", (sys.executable, str(PRETENDER)))
    return Place()


@pytest.fixture
def api(place):
    api = PanelsApi(place)
    yield api
    for child in api.training._children.values():
        child.end()


@pytest.fixture
def client(api):
    with TestClient(create_app(UiSettings(), api, with_panels=False), base_url=LOCAL) as client:
        yield client


@pytest.fixture
def served(api, tmp_path):
    """The routes on a real port, for streams that break off."""
    from outcore.serve.additions import Server

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = Server(create_app(UiSettings(), api, with_panels=False), log_level="error")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    until(lambda: server.started)
    api.ends_server = lambda: setattr(server, "should_exit", True)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(60)


def words_of(answer, status: int) -> str:
    assert answer.status_code == status, answer.text
    return answer.json()["error"]["message"]


def loaded(ask, model: str = "quick", **settings) -> None:
    ask("POST", "/v1/model", json={"model": model, **settings})
    until(lambda: ask("GET", "/v1/model").json()["state"] == "ready")


def test_no_such_path(client, tmp_path):
    (tmp_path / "file").touch()
    found = client.post("/v1/paths/check", json={"path": "file/here"}).json()
    assert not found["is_good"] and f"{tmp_path}/file/here cannot be used for offloading" in found["words"]
    words = words_of(client.post("/v1/data/preview", json={"fields": {"dataset": ["no/such/file.jsonl"]}}), 400)
    assert "no/such/file.jsonl" in words


def test_values_of_another_kind_start_nothing(client):
    for rows in ("x", None, [2], 2.5):
        assert "rows must be from" in words_of(client.post("/v1/data/preview", json={"fields": {}, "rows": rows}), 400)
    for value in (True, [2, 3], {"steps": 2}):
        odd = {"fields": {"preset": "tiny", "max_steps": value}}
        assert "max_steps: expected one value" in words_of(client.post("/v1/runs", json=odd), 400)


def test_a_path_that_is_typed_makes_nothing(client, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    assert client.post("/v1/paths/check", json={"path": str(tmp_path / "new")}).json()["is_good"]
    after = [path for path in sorted(tmp_path.rglob("*")) if ".ui" not in path.parts and path.name != "logs"]
    assert after == [path for path in before if ".ui" not in path.parts and path.name != "logs"]


def test_full_disk_loses_no_conversation(client, monkeypatch):
    one = client.post("/v1/conversations", json={"title": "kept"}).json()

    def full(path, value):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patched:
        patched.setattr("outcore.ui.api.conversations.write_json", full)
        answer = client.patch(f"/v1/conversations/{one['id']}", json={"title": "other"})
        assert "No space left on device" in words_of(answer, 507)
    assert client.get(f"/v1/conversations/{one['id']}").json()["title"] == "kept"


def test_port_taken(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == 1
    said = capsys.readouterr().err
    assert f"127.0.0.1:{port} cannot be opened" in said and "choose another --port" in said


def test_model_missing(client):
    client.post("/v1/model", json={"model": "missing"})
    state = until(lambda: (s := client.get("/v1/model").json())["state"] == "failed" and s)
    assert state["message"] == "missing is not a folder here and no hub id either."
    words = words_of(client.post("/v1/chat/completions", json={"messages": []}), 409)
    assert "load one first" in words and "missing is not a folder here" in words


def test_stop_in_mid_load(client, api):
    client.post("/v1/model", json={"model": "slow"})
    assert "still being loaded" in words_of(client.get("/v1/models"), 503)
    assert "is being loaded" in words_of(client.post("/v1/model", json={"model": "quick"}), 409)
    pid = api.host._note["pid"]
    assert client.delete("/v1/model").json()["state"] == "stopped"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert "No model is loaded" in words_of(client.delete("/v1/model"), 409)


def test_two_starts_at_once(client, api):
    answers = []

    def start():
        answers.append(client.post("/v1/runs", json={"fields": {"preset": "tiny", "max_steps": 5}}))

    threads = [threading.Thread(target=start) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(answer.status_code for answer in answers) == [200, 409, 409, 409]
    refused = next(words_of(answer, 409) for answer in answers if answer.status_code == 409)
    assert "is training" in refused or "started already" in refused
    assert len(api.training._children) == 1
    name = next(answer for answer in answers if answer.status_code == 200).json()["run"]
    until(lambda: "training" in client.get(f"/v1/runs/{name}/log").json()["lines"])
    (log,) = (path for path in Path().rglob("*.log") if name in path.parts or name in path.name)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert "stop it first" in words_of(client.delete(f"/v1/runs/{name}"), 409)
    client.post(f"/v1/runs/{name}/stop")
    until(lambda: client.get(f"/v1/runs/{name}").json()["job"]["state"] == "stopped")


def test_a_run_that_nobody_names_gets_a_name_that_no_other_has(client, tmp_path):
    (tmp_path / "logs" / "tiny-embedded").mkdir(parents=True)
    (tmp_path / "logs" / "tiny-embedded" / "metrics.jsonl").write_text("")
    assert client.post("/v1/runs", json={"fields": {"preset": "tiny"}}).json()["run"] == "tiny-embedded-2"


def test_a_run_stopped_before_it_listens_is_stopped(client, monkeypatch):
    program = "import os, signal; signal.signal(2, signal.SIG_DFL); os.kill(os.getpid(), 2)"
    monkeypatch.setattr(children_module, "PROGRAM", (sys.executable, "-c", program))
    name = client.post("/v1/runs", json={"fields": {"preset": "tiny"}}).json()["run"]
    job = until(lambda: (found := client.get(f"/v1/runs/{name}").json()["job"])["state"] != "running" and found)
    assert (job["state"], job["exit_code"]) == ("stopped", -2)
    assert client.delete(f"/v1/runs/{name}").json()["deleted"], "though it has left no folder"
    assert client.get(f"/v1/runs/{name}").status_code == 404 and not client.get("/v1/runs").json()["data"]


def test_a_run_that_was_refused_says_why_and_is_resumed_with_what_is_otherwise_now(client, monkeypatch):
    program = "print('step 1\\noutcore train: error: it cannot be.\\nTake another.'); raise SystemExit(2)"
    monkeypatch.setattr(children_module, "PROGRAM", (sys.executable, "-c", program))
    name = client.post("/v1/runs", json={"fields": {"preset": "tiny", "max_steps": 5}}).json()["run"]
    job = until(lambda: (found := client.get(f"/v1/runs/{name}").json()["job"])["state"] != "running" and found)
    assert (job["state"], job["message"]) == ("refused", "it cannot be. Take another.")
    listed = client.get("/v1/runs").json()["data"]
    assert [(row["name"], row["state"]) for row in listed] == [(name, "refused")], "it was gone, another in its place"
    resumed = client.post(f"/v1/runs/{name}/resume", json={"fields": {"max_steps": 9}}).json()
    assert resumed["run"] == name and "--preset tiny --max_steps 9" in resumed["command"]
    assert "--resume_from_checkpoint auto" in resumed["command"]


def test_an_answer_goes_on_without_its_page_until_it_is_stopped(served, monkeypatch):
    with httpx.Client(base_url=served, timeout=120) as http:
        loaded(http.request)
        one = http.post("/v1/conversations", json={"sampling": {"max_tokens": 200}}).json()
        path = f"/v1/conversations/{one['id']}"
        with http.stream("POST", f"{path}/answer", json={"text": "go on"}) as stream:
            lines = stream.iter_lines()
            assert sum(next(lines).startswith("data: ") for _ in range(10)) == 5
            assert "being written" in words_of(http.post(f"{path}/answer", json={"text": "and this"}), 409)
            http.patch(path, json={"title": "changed meanwhile"})
        watched = http.get(path).json()
        assert watched["is_under_way"], "who asked went away, and the answer goes on"
        with http.stream("GET", f"{path}/answer") as stream:
            lines = (line for line in stream.iter_lines() if line.startswith("data: "))
            seen = [json.loads(next(lines).removeprefix("data: "))["content"] for _ in range(5)]
            assert seen[-1].startswith("word0 ") and len(seen[-1]) > len(seen[0])
            slow = lambda file: (read_object(file), time.sleep(0.3))[0]  # noqa: E731
            monkeypatch.setattr(conversations_module, "read_object", slow)
            assert http.delete(f"{path}/answer").json()["stopped"]
            assert json.loads(list(lines)[-1].removeprefix("data: "))["message"]["finish"] == "cancelled"
        assert not http.delete(f"{path}/answer").json()["stopped"]
        assert "No answer is being written" in words_of(http.get(f"{path}/answer"), 404)
        kept = until(lambda: not (found := http.get(path).json())["is_under_way"] and found)
        asked, answered = kept["messages"]
        assert kept["title"] == "changed meanwhile" and asked["content"] == "go on"
        assert answered["content"].startswith("word0 ")
        assert answered["finish"] == "cancelled" and answered["reasoning"] == "I think."
        monkeypatch.setattr(conversations_module, "read_object", read_object)
        http.patch(path, json={"sampling": {"max_tokens": 2}})
        again = http.post(f"{path}/answer", json={"regenerate": True}).text
        done = json.loads(again.strip().splitlines()[-1].removeprefix("data: "))
        assert done["message"]["finish"] == "stop" and done["message"]["content"] == "word0 word1 "
        assert done["message"]["timings"]["hit_rate"] == 0.5 and len(http.get(path).json()["messages"]) == 2


def test_who_asks_while_the_model_loads_is_answered_when_it_is_there(served, monkeypatch):
    monkeypatch.setenv("PRETENDER_LOADS_S", "2")
    with httpx.Client(base_url=served, timeout=120) as http:
        http.post("/v1/model", json={"model": "quick"})
        one = http.post("/v1/conversations", json={}).json()
        said = http.post(f"/v1/conversations/{one['id']}/answer", json={"text": "go on"}).text
        events = [json.loads(line.removeprefix("data: ")) for line in said.splitlines() if line.startswith("data: ")]
        assert "quick is still being loaded" in next(e for e in events if e["event"] == "waiting")["message"]
        assert events[-1]["message"]["content"] == "word0 word1 word2 "
        assert events[-1]["message"]["timings"]["prefill_s"] < 2, "the model's loading is no part of it"


def test_conversations_are_searched(client):
    for title in ("Cats", "Dogs"):
        client.post("/v1/conversations", json={"title": title})
    found = client.get("/v1/conversations", params={"search": "cAt"}).json()["data"]
    assert [one["title"] for one in found] == ["Cats"]


def test_the_last_model_is_remembered(client, place):
    client.post("/v1/model", json={"model": "missing"})
    until(lambda: client.get("/v1/model").json()["state"] == "failed")
    state = PanelsApi(place).host.state()
    assert (state["state"], state["model"]) == ("none", "missing")


def test_conversation_removed_in_mid_stream_stays_removed(served):
    with httpx.Client(base_url=served, timeout=120) as http:
        loaded(http.request)
        one = http.post("/v1/conversations", json={"sampling": {"max_tokens": 200}}).json()
        path = f"/v1/conversations/{one['id']}"
        with http.stream("POST", f"{path}/answer", json={"text": "go on"}) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            http.delete(path)
            assert '"cancelled"' in [line for line in lines if line][-1]
        assert http.get(path).status_code == 404


def test_who_waits_for_the_model_is_told_that_the_panels_stop(served, api):
    with httpx.Client(base_url=served, timeout=120) as http:
        loaded(http.request)
        one = http.post("/v1/conversations", json={"sampling": {"max_tokens": 200}}).json()
        with http.stream("POST", f"/v1/conversations/{one['id']}/answer", json={"text": "go on"}) as answer:
            lines = answer.iter_lines()
            next(lines)
            api.ends_server()
            rest = [line for line in lines if line]
    assert json.loads(rest[-1].removeprefix("data: ")) == {"event": "error", "message": "The server stops."}


def test_server_killed_in_mid_stream(served, api):
    with httpx.Client(base_url=served, timeout=120) as http:
        loaded(http.request)
        one = http.post("/v1/conversations", json={"sampling": {"max_tokens": 200}}).json()
        path, events = f"/v1/conversations/{one['id']}", []
        with http.stream("POST", f"{path}/answer", json={"text": "go on"}) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == 3:
                    os.kill(api.host._note["pid"], signal.SIGKILL)
        assert events[-1] == {"event": "error", "message": "The model's server broke off; what it wrote is kept."}
        kept = http.get(path).json()["messages"]
        assert kept[0]["content"] == "go on" and kept[1]["content"].startswith("word0") and kept[1]["finish"] == "error"
        state = until(lambda: (s := http.get("/v1/model").json())["state"] == "failed" and s)
        assert state["message"] == "killed by SIGKILL while it served"
        assert "killed by SIGKILL" in words_of(http.post(f"{path}/answer", json={"text": "again"}), 409)


def test_a_model_let_go_while_it_becomes_ready_is_found_by_nobody(client, api, place, monkeypatch):
    monkeypatch.setattr(model_module, "_launch", lambda note: (api.host.unload(), {})[1])
    client.post("/v1/model", json={"model": "quick"})
    until(lambda: client.get("/v1/model").json()["state"] == "stopped")
    [thread.join() for thread in threading.enumerate() if thread.name == "model's start"]
    assert not (place.own / "model" / "loaded.json").exists()


def test_panels_that_start_next_find_the_model_again(api, place, client):
    loaded(client.request)
    other = PanelsApi(place)
    assert other.host.state()["state"] == "ready"
    assert other.host.residency()["weight_bytes"] == {"ram": 12} and other.host.residency()["kv_used_share"] == 0.25
    assert client.get("/v1/launch").json() == other.host.state()["launch"] == {"world_size": 1}
    other.host.unload()
    until(lambda: api.host._child.exit_code is not None)


def test_wrong_token(api):
    app = create_app(UiSettings("0.0.0.0", 7860, (TOKEN,)), api, with_panels=False)
    with TestClient(app, base_url="http://10.0.0.5:7860") as client:
        assert "token is missing or wrong" in words_of(client.get("/v1/runs"), 401)
        assert "wrong" in words_of(client.get("/v1/runs", headers={"Authorization": "Bearer nearly"}), 401)
        assert client.get("/v1/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        page = client.get("/", headers={"Accept": "text/html"})
        assert page.status_code == 401 and "<form" in page.text
        assert "The token is wrong" in client.post("/sign_in", data={"token": "nearly"}).text
        signed_in = client.post("/sign_in", data={"token": TOKEN}, follow_redirects=False)
        assert signed_in.status_code == 303 and "HttpOnly" in signed_in.headers["set-cookie"]
        assert "SameSite=strict" in signed_in.headers["set-cookie"]
        assert client.get("/v1/runs").status_code == 200  # by the cookie
        assert TOKEN not in str(client.cookies)


def test_a_guessed_cookie_is_a_guess(api, monkeypatch):
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(keys_module, "asyncio", SimpleNamespace(sleep=sleep))
    app = create_app(UiSettings("0.0.0.0", 7860, (TOKEN,)), api, with_panels=False)
    with TestClient(app, base_url="http://10.0.0.5:7860") as client:
        asked = [client.get("/v1/runs", headers={"Cookie": f"outcore_ui=guess{n}"}).status_code for n in range(30)]
        assert client.post("/sign_in", data={"token": "guess"}).status_code == 429, "and so is the form's"
    assert max(waits) > 5 and asked[0] == 401 and asked[-1] == 429


def test_a_run_that_is_resumed_from_here_loads_no_code_of_others(client, tmp_path):
    folder = tmp_path / "logs" / "mine"
    folder.mkdir(parents=True)
    config = {"model_name_or_path": "base", "trust_remote_code": True, "max_steps": 3}
    (folder / "metrics.jsonl").write_text(json.dumps({"event": "header", "run": "mine", "config": config}) + "\n")
    found = client.get("/v1/runs/mine/settings").json()
    assert found["fields"]["max_steps"] == 3 and "trust_remote_code" not in found["fields"]
    assert "trust_remote_code" not in found["command"]


def test_other_addresses_need_a_token_and_other_sites_are_turned_away(client, capsys):
    assert main(["--host", "0.0.0.0"]) == 2 and "--token_file" in capsys.readouterr().err
    assert "another site" in words_of(client.post("/v1/runs", json={}, headers={"Origin": "http://evil.example"}), 403)
    assert "evil.example" in words_of(client.get("/v1/runs", headers={"Host": "evil.example"}), 403)


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/v1/runs", {"fields": {"trust_remote_code": True}}, "trust_remote_code"),
    ("/v1/estimate", {"fields": {"model_name_or_path": "x", "trust_remote_code": "true"}}, "trust_remote_code"),
    ("/v1/runs", {"fields": {"reward_function": "own.py:judge"}}, "reward_function"),
    ("/v1/estimate", {"fields": {"model_module": "own.py:build"}}, "model_module"),
    ("/v1/runs", {"fields": {"dataset": ["a.txt", "/etc"]}}, "dataset"),
    ("/v1/data/preview", {"fields": {"dataset": ["..:0.3"]}}, "dataset"),
    ("/v1/data/preview", {"fields": {"dataset": ["~"]}}, "dataset"),
    ("/v1/runs", {"fields": {"nvme_offload_path": "here,/tmp"}}, "nvme_offload_path"),
    ("/v1/runs", {"fields": {"export_dir": "out"}}, "export_dir"),
    ("/v1/runs/x/resume", {"fields": {"checkpoint_dir": "/tmp"}}, "checkpoint_dir"),
    ("/v1/paths/check", {"path": "/tmp"}, "nvme_offload_path"), ("/v1/model", {"model": "/etc"}, "model"),
    ("/v1/model", {"model": "m", "adapter": "../x"}, "adapter"),
    ("/v1/model", {"model": "m", "nvme_path": ["here", "/tmp"]}, "nvme_path"),
])  # fmt: skip
def test_code_and_folders_elsewhere_are_for_the_command_line(client, api, tmp_path, path, body, param):
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    (tmp_path / "out").symlink_to("/tmp")
    answer = client.post(path, json=body)
    words_of(answer, 403)
    assert answer.json()["error"]["param"] == param
    assert not api.training._children and client.get("/v1/model").json()["state"] == "none"
    assert client.get("/v1/paths/folders", params={"path": "/etc"}).status_code == 403


def test_a_body_in_pieces_is_read_as_one_that_is_whole(client, api):
    pieces = (piece for piece in (b'{"fields": {"max_st', b'eps": 0}}'))
    answer = client.post("/v1/runs", content=pieces, headers={"Content-Type": "application/json"})
    assert "max_steps" in words_of(answer, 400) and not api.training._children


@pytest.mark.parametrize("path", ["/v1/models/..%2f..%2fmetrics", "/v1/files/%2e%2e%2f%2e%2e%2fhealth"])
def test_a_path_that_leads_back_is_not_passed_on(served, path):
    with httpx.Client(base_url=served, timeout=120) as http:
        loaded(http.request)
        assert http.get(path).status_code == 404


def test_what_cannot_be_looked_into_is_left_out_of_a_listing(client, tmp_path, monkeypatch):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "locked").mkdir()
    for number in range(201):
        (tmp_path / f"{number:03d}.gguf").touch()
    open(os.fsencode(tmp_path) + b"/\xff.gguf", "w").close()
    is_file = Path.is_file

    def refused(path: Path) -> bool:
        if path.parent.name == "locked":  # as root every folder opens
            raise PermissionError(13, "Permission denied")
        return is_file(path)

    monkeypatch.setattr(Path, "is_file", refused)
    found = client.get("/v1/paths/folders", params={"path": str(tmp_path)}).json()
    assert "locked" in found["folders"] and "loop" not in found["folders"]
    assert found["models"] == [f"{number:03d}.gguf" for number in range(200)]


def test_a_nul_is_no_name(client):
    for method, path in (
        ("GET", "/v1/runs/a%00b"),
        ("POST", "/v1/runs/a%00b/stop"),
        ("GET", "/v1/paths/folders?path=%00"),
    ):
        assert "NUL" in words_of(client.request(method, path), 400)
    for path, body in (("/v1/runs", {"fields": {"run_name": "a\0b"}}), ("/v1/model", {"model": "a\0"})):
        assert words_of(client.post(path, json=body), 400)
    words_of(client.post("/v1/paths/check", json={"path": "a\0b"}), 403)


@pytest.mark.parametrize(("body", "words"), [
    ({"model": " --help"}, "is a flag"), ({"model": "m", "adapter": "--insecure"}, "is a flag"),
    ({"model": "m", "precision": ["bf16"]}, "expected one value"), ({"model": "m", "nvme_path": {"a": 1}}, "one value"),
    ({"model": "m", "nvme_path": [["a"]]}, "one value"), ({"model": "m\0"}, "is a flag"),
])  # fmt: skip
def test_values_that_are_none_never_reach_a_command_line(client, body, words):
    assert words in words_of(client.post("/v1/model", json=body), 400)
    assert client.get("/v1/model").json()["state"] == "none"


def test_each_value_is_one_word_of_the_command_line(client, api, place):
    loaded(client.request, nvme_path=["a", "b c"], context=512)
    argv = api.host._child.argv
    assert argv[-2:] == ["--", "quick"] and all(word.startswith("--") and "=" in word for word in argv[1:-2])
    assert "--nvme_path=a --nvme_path=b c" in " ".join(argv)
    one = client.post("/v1/conversations", json={}).json()
    kept = [
        place.of("conversations") / f"{one['id']}.json",
        place.of("model") / "loaded.json",
        place.of("model") / "key",
    ]
    assert [stat.S_IMODE(path.stat().st_mode) for path in kept] == [0o600] * 3
    place.own.chmod(0o755)  # as it was made before; older files in it keep what they have
    client.get("/v1/conversations")
    assert stat.S_IMODE(place.own.stat().st_mode) == 0o700
    run = client.post("/v1/runs", json={"fields": {"preset": "tiny", "run_name": " --help"}}).json()["run"]
    assert api.training._children[run].argv == ["train", "--preset=tiny", "--run_name= --help"]


def test_folders_that_are_allowed_may_be_named(place, tmp_path):
    (tmp_path.parent / "beside").mkdir(exist_ok=True)
    api = PanelsApi(place, allowed=(tmp_path.parent / "beside",))
    with TestClient(create_app(UiSettings(), api, with_panels=False), base_url=LOCAL) as client:
        beside = "../beside"
        assert client.post("/v1/paths/check", json={"path": beside}).json()["is_good"]
        run = client.post("/v1/runs", json={"fields": {"model_module": f"{beside}/own.py:build"}}).json()
        assert run["state"] == "running" and f"--model_module {beside}/own.py:build" in run["command"]
        loaded(client.request, adapter=beside)
        assert f"--allowed_folder={tmp_path.parent / 'beside'}" in api.host._child.argv


def test_every_text_setting_is_known_to_name_a_folder_or_none():
    texts = {name for name, field in FIELDS.items() if field.kind is str or get_origin(field.kind) is tuple}
    plain = {
        "config_overrides", "attn_implementation", "dataset_config", "dataset_split", "text_extensions", "text_column",
        "prompt_column", "completion_column", "messages_column", "lora_target_modules", "lora_modules_to_save",
        "preset", "run_name", "sample_prompt", "report_to", "push_to_hub",
    }  # fmt: skip
    assert texts == OPENED | plain | {"model_module", "reward_function"}  # the last one is refused as a whole


def test_huge_input(client):
    loaded(client.request)
    one = client.post("/v1/conversations", json={}).json()
    path = f"/v1/conversations/{one['id']}/answer"
    answer = client.post(path, json={"text": "x" * 100_000}).text
    assert "The prompt has too many tokens" in answer
    assert "longer than 4194304 bytes" in words_of(client.post(path, json={"text": "x" * (5 << 20)}), 413)
    kept = client.get(f"/v1/conversations/{one['id']}").json()
    assert kept["messages"] == [] and len(kept["draft"]) == 100_000, "refused questions piled up"
    assert client.post(path, json={"text": "short"}).text.count("piece") > 1
    kept = client.get(f"/v1/conversations/{one['id']}").json()
    assert len(kept["messages"]) == 2 and "draft" not in kept
    client.post(path, json={"text": "x" * 100_000, "at": 0})
    assert client.get(f"/v1/conversations/{one['id']}").json()["messages"] == kept["messages"], "the tail was lost"


def test_a_conversation_longer_than_the_context_goes_on_without_its_oldest_messages(client):
    """Every question after it was refused, and there was no way on."""
    loaded(client.request)
    one = client.post("/v1/conversations", json={"system": "Be kind.", "sampling": {"max_tokens": 100}}).json()
    path, left_out = f"/v1/conversations/{one['id']}", []
    for number in range(12):
        said = client.post(f"{path}/answer", json={"text": f"say {number} " + "x" * 180}).text
        done = json.loads(said.strip().splitlines()[-1].removeprefix("data: "))
        assert done["event"] == "done" and done["message"]["content"].startswith(f"{number} "), said
        left_out.append(done["message"]["left_out"])
    assert left_out[:4] == [0] * 4 and 0 < left_out[-1] % 2 + left_out[-1] < 24
    assert len(set(left_out)) < 5, "half of the context is freed at a time, so that prompts begin alike"
    assert len(client.get(path).json()["messages"]) == 24, "all stay in view"


@pytest.mark.parametrize(("fields", "param", "words"), [
    ({"max_steps": 0}, "max_steps", "must be above 0"),
    ({"learning_rate": "fast"}, "learning_rate", "expected a number"),
    ({"nothing": 1}, "nothing", "no setting of a run"),
    ({"preset": "tiny", "model_name_or_path": "x"}, None, "contradict each other"),
    ({"zero_stage": "none", "offload_optimizer": "nvme"}, "zero_stage", "contradict"),
])  # fmt: skip
def test_settings_that_cannot_be_start_nothing(client, api, fields, param, words):
    for path in ("/v1/runs", "/v1/estimate"):
        answer = client.post(path, json={"fields": fields})
        assert words in words_of(answer, 400)
        assert param is None or answer.json()["error"]["param"] == param
    assert not api.training._children


def test_no_run_no_conversation_no_threshold(client):
    assert "no run 'x'" in words_of(client.get("/v1/runs/x"), 404)
    assert "no run 'x'" in words_of(client.delete("/v1/runs/x"), 404)
    assert "not running" in words_of(client.post("/v1/runs/x/stop"), 409)
    assert "no conversation" in words_of(client.get("/v1/conversations/chat-0"), 404)
    assert "no threshold" in words_of(client.put("/v1/machine/thresholds", json={"wind": 1}), 400)


@pytest.mark.parametrize(("more", "words"), [
    ({"tensor_parallel": 64}, "needs 64 GPUs, and there are"), ({"pipeline_parallel": 0}, "must be at least 1"),
    ({"tensor_parallel": "two"}, "must be a whole number"),
    ({"tensor_parallel": 2, "kv_home": "ram"}, "kv_home belongs to our own engine"),
    ({"tensor_parallel": 2, "preset": "throughput"}, "preset belongs to our own engine"),
])  # fmt: skip
def test_degrees_that_cannot_be_load_nothing(client, more, words):
    assert words in words_of(client.post("/v1/model", json={"model": "m", **more}), 400)
    assert client.get("/v1/model").json()["state"] == "none"


def test_degrees_are_handed_over_and_their_launch_is_kept(client, api, place, monkeypatch):
    islands = tuple(tuple(PlacedGpu("here", index) for index in pair) for pair in ((0, 1), (2, 3)))
    monkeypatch.setattr(model_module, "detect_topology", lambda found: Topology(islands, "this test"))
    loaded(client.request, tensor_parallel=2, pipeline_parallel=2, preset="latency", context=512)
    state = client.get("/v1/model").json()
    degrees = "--tensor_parallel=2 --pipeline_parallel=2"
    assert state["command"] == f"outcore serve quick --engine=vllm --context=512 {degrees}"
    assert state["launch"] == {"engine": "vllm", "world_size": 4, "tensor_parallel": 2, "pipeline_parallel": 2}
    kept = json.loads((place.own / "model" / "loaded.json").read_text())
    assert kept["launch"] == state["launch"]
    api.serving.look()
    api.serving.look()
    live = client.get("/v1/model/live").json()
    assert live["launch"]["pipeline_parallel"] == 2 and live["samples"][-1]["kv_used_share"] == 0.25

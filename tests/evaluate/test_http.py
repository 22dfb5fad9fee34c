"""Evaluations by a running server, as programs and `outcore evaluate URL` use them; its end loses nothing."""

import json
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import replace

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("fastapi")
from outcore.evaluate.http import with_evaluations
from outcore.evaluate.jobs import Job
from outcore.evaluate.tasks import harness_version
from outcore.serve import ServeSettings
from tests.serve.running import Running

pytestmark = pytest.mark.usefixtures("one_thread")
PATH = "/v1/evaluations"
LONG = {"tasks": "outcore_endings", "limit": 40, "note_tokens": 50}


@pytest.fixture
def held(monkeypatch):
    """A context: in it a job that has answered something goes on only to its end by a cancellation."""
    check = Job._check

    def waits(job):
        if job.progress.figures["requests_done"]:
            assert job._cancelled.wait(120)
        check(job)

    @contextmanager
    def holding():
        with monkeypatch.context() as patched:
            patched.setattr(Job, "_check", waits)
            yield

    return holding


def start(tiny, logs) -> Running:
    names = logs / "evaluations" / "task_names.json"  # indexing the harness's takes half a minute
    names.parent.mkdir(exist_ok=True)
    names.write_text(json.dumps({"version": harness_version(), "names": []}))
    settings = replace(ServeSettings(), logs=logs / "serve", name="tiny")
    return Running(tiny, settings, with_evaluations, deterministic=True, device="cpu", precision="fp32")


@pytest.fixture(scope="module")
def server(tiny, tmp_path_factory):
    running = start(tiny, tmp_path_factory.mktemp("logs"))
    yield running
    running.stop()


def ask(server, path, body=None, method=None):
    """(status, JSON or text)."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            status, text = reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read().decode()
    return status, json.loads(text) if text.startswith("{") else text


def wait_for(server, name, *statuses):
    for _ in range(3000):
        record = ask(server, f"{PATH}/{name}")[1]
        if record["status"] in statuses:
            return record
        time.sleep(0.02)
    raise AssertionError(f"still {record['status']}")


def test_the_launch_descriptor_is_what_an_evaluation_keeps(server):
    status, launch = ask(server, "/v1/launch")
    assert status == 200 and (launch["tensor_parallel"], launch["pipeline_parallel"]) == (1, 1)
    record = ask(server, PATH, {"tasks": "outcore_endings", "limit": 1})[1]
    assert record["launch"] == {k: v for k, v in launch.items() if k not in ("model_hash", "placement")}
    assert (record["model_hash"], record["placement"]) == (launch["model_hash"], launch["placement"])
    wait_for(server, record["id"], "completed")


def test_the_command_against_a_server_gives_what_it_gives_here(server, evaluation):
    here, _ = evaluation.run("outcore_endings,outcore_sums", limit=3)
    argv = ["evaluate", server.url, "--tasks", "outcore_endings,outcore_sums", "--limit", "3", "--json"]
    *events, record = [json.loads(line) for line in evaluation.call(argv).splitlines()]
    assert record["status"] == "completed" and record["scores"] == here["scores"]
    assert record["model_hash"] == here["model_hash"]
    assert events[-1]["event"] == "completed"
    evaluation.call(["evaluate", f"{server.url}/elsewhere", "--tasks", "outcore_sums"], 2)
    assert "says 404" in evaluation.said


def test_cancelled_resumed_compared_and_exported(server, held):
    with held():
        name = ask(server, PATH, LONG)[1]["id"]
        assert ask(server, f"{PATH}/{name}", method="DELETE")[0] == 409
        while not ask(server, f"{PATH}/{name}")[1]["progress"]["requests_done"]:
            time.sleep(0.01)
        ask(server, f"{PATH}/{name}/cancel", {})
        wait_for(server, name, "cancelled")
    assert ask(server, f"{PATH}/{name}/cancel", {})[0] == 409
    assert ask(server, PATH, LONG)[1]["id"] == name  # gone on with, as nobody finished it
    record = wait_for(server, name, "completed")
    assert record["scores"][0]["documents"] == 40
    assert ask(server, f"{PATH}/{name}/resume", {})[0] == 409
    other = ask(server, PATH, LONG)[1]["id"]
    assert other != name and wait_for(server, other, "completed")["scores"] == record["scores"]
    diff = ask(server, f"{PATH}/{name}/diff/{other}")[1]
    assert diff["settings"] == {} and all(one["changed"] == 0 for one in diff["tasks"])
    assert len(ask(server, f"{PATH}/{name}/export")[1]["samples"]) == 40
    assert ask(server, f"{PATH}/{name}/export?format=csv")[1].count("\n") == 3
    samples = ask(server, f"{PATH}/{name}/samples?offset=38")[1]
    assert samples["total"] == 40 and [one["doc_id"] for one in samples["data"]] == [38, 39]
    assert ask(server, f"{PATH}/{other}", method="DELETE")[1]["deleted"]
    assert [one["id"] for one in ask(server, PATH)[1]["data"]].count(other) == 0


def test_answers_to_others_come_in_between(server):
    name = ask(server, PATH, LONG | {"seed": 5})[1]["id"]
    status, said = ask(server, "/v1/completions", {"model": "tiny", "prompt": "The", "max_tokens": 3})
    assert status == 200 and said["choices"]
    assert ask(server, f"{PATH}/{name}")[1]["status"] in ("queued", "running", "completed")
    wait_for(server, name, "completed")


@pytest.mark.more
def test_a_server_that_ends_goes_on_with_its_next_start(tiny, tmp_path, held):
    first = start(tiny, tmp_path)
    with held():
        name = ask(first, PATH, LONG)[1]["id"]
        while not ask(first, f"{PATH}/{name}")[1]["progress"]["requests_done"]:
            time.sleep(0.01)
        first.stop()
    second = start(tiny, tmp_path)
    try:
        record = wait_for(second, name, "completed")
        assert record["scores"][0]["documents"] == 40
    finally:
        second.stop()


BAD = [
    ("POST", PATH, {}, 400, "tasks"),
    ("POST", PATH, {"tasks": "outcore_sums", "shots": 1}, 400, "shots"),
    ("POST", PATH, {"tasks": "outcore_sums", "model": "other"}, 404, "other"),
    ("POST", PATH, {"tasks": "x" * (1 << 20)}, 413, ""),
    ("GET", f"{PATH}/eval-none", None, 404, "eval-none"),
    ("POST", f"{PATH}/eval-none/resume", {}, 404, "eval-none"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "words"), BAD)
def test_bad_requests(server, method, path, body, status, words):
    found, said = ask(server, path, body, method)
    assert found == status and words in said["error"]["message"], said


def test_names_of_tasks(server):
    found = ask(server, "/v1/evaluation_tasks?query=outcore")[1]
    assert {"outcore_endings", "outcore_stdlib", "outcore_sums"} <= {one["name"] for one in found["data"]}

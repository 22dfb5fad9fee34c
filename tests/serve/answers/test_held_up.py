"""Requests that would take the server seconds: refused within limits, and others are answered meanwhile."""

import json
import random
import threading
import time
import urllib.error
import urllib.request

import pytest

from outcore.serve import ServeSettings
from outcore.serve import app as app_module
from outcore.serve.jobs import Files
from tests.serve.running import get, send

pytestmark = pytest.mark.usefixtures("one_thread")
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def open_server(start):
    """One that takes long bodies, and whose processes that read requests have begun, which takes seconds."""
    found = start(ServeSettings(max_answer_tokens=64), max_sequences=4)
    for text in ("Hi", "The quick brown fox. " * 5000):
        send(found, "/tokenize", {"prompt": text})
    return found


def refusal(server, path, body):
    status, reply = send(server, path, body)
    return status, json.loads(reply)["error"]["message"]


def words(count):
    draw = random.Random(1)
    return ["".join(draw.choices("abcdefghij", k=12)) for _ in range(count)]


def test_others_are_answered_while_a_form_of_sixty_thousand_alternatives_is_tried(open_server):
    pytest.importorskip("llguidance")
    form = {"type": "grammar", "grammar": "start: " + " | ".join(map(json.dumps, words(60_000)))}
    found, took_s = [], []
    body = {"messages": HI, "response_format": form, "max_tokens": 2}
    asking = threading.Thread(target=lambda: found.append(send(open_server, CHAT, body)[0]))
    asking.start()
    while asking.is_alive():
        began_s = time.monotonic()
        assert send(open_server, CHAT, {"messages": HI, "max_tokens": 2})[0] == 200
        took_s.append(time.monotonic() - began_s)
    assert found[0] in (200, 400), "a fast machine has tried it in time"
    assert len(took_s) > 3 and max(took_s) < sum(took_s) / 2, "compiling took 13 s, on the engine's thread too"


def test_a_form_that_would_end_the_process_is_refused(open_server):
    pytest.importorskip("llguidance")
    names = words(3000)
    rules = [f'r{i}: "{name}" r{(i + 1) % len(names)}?' for i, name in enumerate(names)]
    form = {"type": "grammar", "grammar": "\n".join(["start: r0", *rules])}
    status, why = refusal(open_server, CHAT, {"messages": HI, "response_format": form})
    assert status == 400 and "nested too deeply" in why


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [[] for _ in range(400_001)]},
        {"messages": [{"role": "user", "content": "Hi"}] * 300_000},
        {"prompt": [1] * 1_000_002},
    ],
)
def test_bodies_of_more_parts_than_are_read_in_a_moment_are_refused(open_server, body):
    status, why = refusal(open_server, CHAT if "messages" in body else "/v1/completions", body)
    assert status == 400 and "holds more than" in why


def test_tokens_of_a_long_text_are_made_beside_others_answers(open_server):
    found = []
    text = "The quick brown fox. " * 30_000
    asking = threading.Thread(target=lambda: found.append(send(open_server, "/tokenize", {"prompt": text})))
    asking.start()
    took_s = []
    while asking.is_alive():
        began_s = time.monotonic()
        assert send(open_server, CHAT, {"messages": HI, "max_tokens": 2})[0] == 200
        took_s.append(time.monotonic() - began_s)
    assert max(took_s) < sum(took_s) / 2, "one of them waited for all of the text"
    assert found[0][0] == 200 and json.loads(found[0][1])["count"] > 120_000


def test_bodies_and_files_are_read_and_written_beside_the_loop(open_server, monkeypatch):
    threads = []

    def noted(work):
        return lambda *args: (threads.append(threading.current_thread().name), work(*args))[1]

    monkeypatch.setattr(app_module, "object_of", noted(app_module.object_of))
    monkeypatch.setattr(Files, "add", noted(Files.add))
    assert send(open_server, CHAT, {"messages": HI, "max_tokens": 1})[0] == 200
    parts = [(b'name="purpose"', b"batch"), (b'name="file"; filename="a.jsonl"', b"{}")]
    form = b"".join(b"--x\r\nContent-Disposition: form-data; %s\r\n\r\n%s\r\n" % part for part in parts) + b"--x--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    urllib.request.urlopen(urllib.request.Request(f"{open_server.url}/v1/files", form, headers), timeout=120).close()
    assert [name.split("_")[0] for name in threads] == ["asyncio", "reading-slow"]


def test_what_may_take_seconds_waits_for_its_like_only(open_server, monkeypatch):
    pytest.importorskip("llguidance")
    prompts, threads = open_server.service.prompts, []
    ask = prompts.ask
    monkeypatch.setattr(prompts, "ask", lambda *a: (threads.append(threading.current_thread().name), ask(*a))[1])
    form = {"response_format": {"type": "json_object"}}
    for path, body in (("/tokenize", {}), ("/tokenize", {"user": "x" * (1 << 16)}), (CHAT, form)):
        assert send(open_server, path, {"messages": HI, "max_tokens": 1, **body})[0] == 200
    assert [name.split("_")[0] for name in threads] == ["reading-quick", "reading-slow", "reading-slow"]


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize"])
def test_a_text_that_is_far_too_long_is_refused_before_all_of_it_is_read(open_server, path):
    """15 MB of one letter held a reader for the 20 s that a request may take."""
    text, began_s = "a" * 15_000_000, time.monotonic()
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    status, reply = send(open_server, path, body)
    error = json.loads(reply)["error"]
    assert status == 400 and error["code"] == "context_length_exceeded" and "more than is read" in error["message"]
    assert time.monotonic() - began_s < 10


def test_a_form_of_many_parts_is_read_beside_others_answers(open_server):
    part = '--x\r\nContent-Disposition: form-data; name="a%d"\r\n\r\nb\r\n'
    data = "".join(part % number for number in range(100_000)) + "--x--\r\n"
    headers, found = {"Content-Type": "multipart/form-data; boundary=x"}, []
    asked = urllib.request.Request(f"{open_server.url}/v1/files", data.encode(), headers)

    def ask():
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(asked, timeout=120)
        found.append(error.value.code)

    asking = threading.Thread(target=ask)
    asking.start()
    took_s = []
    while asking.is_alive():
        began_s = time.monotonic()
        get(open_server, "/health")
        took_s.append(time.monotonic() - began_s)
    assert found == [400], "it has no file"
    assert max(took_s) < sum(took_s) / 2, "reading the form took nearly all of the time, on the loop"


@pytest.mark.parametrize(
    "form",
    [
        {"properties": {f"p{number}": {"type": "string"} for number in range(500)}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ],
)
def test_a_schema_that_no_answer_can_follow_is_refused_and_no_broken_answer_stops(open_server, form):
    pytest.importorskip("llguidance")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", **form}}}
    status, why = refusal(open_server, CHAT, {"messages": HI, "response_format": schema})
    assert status == 400 and why.startswith("response_format: ")


def test_either_of_two_schemas_fits_where_one_of_them_must(open_server):
    pytest.importorskip("llguidance")
    both = {"type": "object", "properties": {name: {"type": "boolean"} for name in "ab"}, "additionalProperties": False}
    kinds = [both | {"required": [name]} for name in "ab"]  # one answer may fit either, so neither can be told apart
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"oneOf": kinds}}}
    status, reply = send(open_server, CHAT, {"messages": HI, "response_format": schema, "max_tokens": 60})
    (choice,) = json.loads(reply)["choices"]
    assert status == 200 and choice["finish_reason"] == "stop"
    assert set(json.loads(choice["message"]["content"])) in ({"a"}, {"b"}, {"a", "b"})

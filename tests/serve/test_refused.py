"""Bad requests: each is a 4xx in OpenAI's shape that names the field, and the server goes on."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request

import pytest

from outcore.serve.settings import ServeSettings, is_loopback, read_keys
from tests.refused import refused
from tests.waiting import until

pytest.importorskip("fastapi")
pytestmark = pytest.mark.usefixtures("one_thread")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
TALK = "/v1/messages"
FREE = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "yacc"}}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "3"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
USE, GIVEN = {"type": "tool_use", "id": "c", "name": "f", "input": {}}, {"type": "tool_result", "tool_use_id": "c"}


def post(server, path, body, raw=None):
    """(status, headers, JSON)."""
    data = raw if raw is not None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"}, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.status, reply.headers, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, error.headers, json.loads(error.read())


BAD = [
    (CHAT, {}, 400, "messages"), (CHAT, {"messages": []}, 400, "messages"), (CHAT, {"messages": "Hi"}, 400, "messages"),
    (CHAT, {"messages": [{"content": "Hi"}]}, 400, "role"), (CHAT, {"messages": [3]}, 400, "role"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, 400, "content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "image_url"),
    (CHAT, {"messages": HI, "model": "another"}, 404, "another"), (CHAT, {"messages": HI, "n": 0}, 400, "n is 0"),
    (CHAT, {"messages": HI, "n": 1000}, 400, "n is 1000"), (CHAT, {"messages": HI, "n": True}, 400, "n is True"),
    (CHAT, {"messages": HI, "temperature": "hot"}, 400, "temperature"),
    (CHAT, {"messages": HI, "temperature": -0.1}, 400, "temperature"),
    (CHAT, {"messages": HI, "top_p": 2}, 400, "top_p"), (CHAT, {"messages": HI, "top_p": True}, 400, "top_p"),
    (CHAT, {"messages": HI, "max_tokens": 0}, 400, "max_tokens"),
    (CHAT, {"messages": HI, "max_tokens": 1.5}, 400, "max_tokens"),
    (CHAT, {"messages": HI, "max_completion_tokens": 100000}, 400, "max_completion_tokens is 100000"),
    (CHAT, {"messages": HI, "max_completion_tokens": 0}, 400, "max_completion_tokens is 0"),
    (CHAT, {"messages": HI, "max_completion_tokens": 5, "max_tokens": 7}, 400, "mean the same"),
    (CHAT, {"messages": HI, "stop": [1]}, 400, "stop"), (CHAT, {"messages": HI, "stop": [""]}, 400, "stop"),
    (CHAT, {"messages": HI, "logit_bias": [1]}, 400, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": {"a": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HI, "logit_bias": {"99999": 1}}, 400, "logit_bias"),
    (CHAT, {"messages": HI, "seed": -5}, 400, "seed"), (CHAT, {"messages": HI, "top_logprobs": 3}, 400, "logprobs"),
    (CHAT, {"messages": HI, "logprobs": True, "top_logprobs": 50}, 400, "logprobs"),
    (CHAT, {"messages": HI, "logprobs": 3}, 400, "true or false"),
    (TEXT, {"prompt": "Hi", "logprobs": True}, 400, "for chats"),
    (TEXT, {"prompt": "Hi", "logprobs": 1, "top_logprobs": 2}, 400, "top_logprobs"),
    ("/v1/responses", {"input": "Hi", "top_logprobs": 2}, 400, "top_logprobs is not supported"),
    (CHAT, {"messages": HI, "presence_penalty": 9}, 400, "presence_penalty"),
    (CHAT, {"messages": HI, "stream": "yes"}, 400, "stream"),
    (CHAT, {"messages": HI, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    (CHAT, {"messages": HI, "response_format": "json"}, 400, "response_format"),
    (CHAT, {"messages": HI, "response_format": {"type": "xml"}}, 400, "response_format"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_schema"}}, 400, "json_schema"),
    (CHAT, {"messages": HI, "response_format": {"type": "regex", "pattern": "(("}}, 400, "response_format"),
    (CHAT, {"messages": HI, "audio": {"voice": "x"}}, 400, "audio"),
    (CHAT, {"messages": HI, "functions": [{}]}, 400, "functions"),
    (CHAT, {"messages": HI, "tools": "none"}, 400, "tools"),
    (CHAT, {"messages": HI, "chat_template_kwargs": {"chat_template": "x"}}, 400, "own template"),
    (CHAT, {"messages": HI, "tool_choice": "required"}, 400, "tool_choice"), (TEXT, {}, 400, "prompt"),
    (TEXT, {"prompt": 3}, 400, "prompt"), (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": [["a"]]}, 400, "prompt"), (TEXT, {"prompt": [999999]}, 400, "vocabulary"),
    (TEXT, {"prompt": "half \ud83d"}, 400, "half of a letter"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud83d"}]}, 400, "half of a letter"),
    (TEXT, {"prompt": "x" * 5000}, 400, "context"), (TEXT, {"prompt": "Hi", "best_of": 3}, 400, "best_of"),
    (TEXT, {"prompt": "Hi", "suffix": "end"}, 400, "suffix"), (TEXT, {"prompt": "Hi", "max_tokens": 0}, 400, "echo"),
    (TEXT, {"prompt": "Hi", "echo": True, "stream": True}, 400, "echo"),
    (TEXT, {"prompt": ["Hi"] * 41}, 400, "41 prompts"), ("/tokenize", {}, 400, "prompt"),
    ("/tokenize", {"prompt": 1}, 400, "prompt"), ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/v1/embeddings", {}, 400, "input"), ("/v1/embeddings", {"input": [[]]}, 400, "input"),
    ("/v1/embeddings", {"input": "Hi", "dimensions": 3}, 400, "dimensions"),
    ("/v1/embeddings", {"input": "Hi", "encoding_format": "hex"}, 400, "encoding_format"),
    ("/v1/embeddings", {"input": "x" * 5000}, 400, "more than the"), ("/v1/responses", {}, 400, "input"),
    ("/v1/responses", {"input": [{"type": "image"}]}, 400, "image"),
    ("/v1/responses", {"input": "Hi", "previous_response_id": "r"}, 400, "is not here"),
    ("/v1/responses", {"input": "Hi", "background": True}, 400, "background"),
    ("/v1/responses", {"input": "Hi", "instructions": ["be brief"]}, 400, "instructions"),
    ("/v1/responses", {"input": "Hi", "tools": [{"type": "function"}]}, 400, "needs a name"),
    ("/v1/responses", {"input": "Hi", "tools": [FREE]}, 400, "lark or regex"),
    ("/v1/responses", {"input": [RESULT]}, 400, "no call before"),
    (CHAT, {"messages": [*HI, {"role": "tool", "tool_call_id": "c", "content": "3"}]}, 400, "no call before"),
    (CHAT, {"messages": [*HI, CALLED, *HI]}, 400, "no tool result behind"),
    (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, 400,
     "must be a JSON schema"),
    (TALK, {"messages": HI}, 400, "max_tokens"), (TALK, {"max_tokens": 5}, 400, "messages"),
    (TALK, {"max_tokens": 0, "messages": HI}, 400, "max_tokens"),
    (TALK, {"max_tokens": 5, "messages": HI, "model": "another"}, 404, "another"),
    (TALK, {"max_tokens": 5, "messages": [{"role": "system", "content": "Hi"}]}, 400, "messages.0.role"),
    (TALK, {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image"}]}]}, 400, "reads text only"),
    (TALK, {"max_tokens": 5, "messages": [*HI, {"role": "assistant", "content": [USE]}, *HI]}, 400, "no tool result"),
    (TALK, {"max_tokens": 5, "messages": [{"role": "user", "content": [GIVEN]}]}, 400, "no call before"),
    (TALK, {"max_tokens": 5, "messages": [{"role": "assistant", "content": [USE | {"input": 3}]}]}, 400, "an object"),
    (TALK, {"max_tokens": 5, "messages": HI, "system": 3}, 400, "system"),
    (TALK, {"max_tokens": 5, "messages": HI, "thinking": {"type": "hard"}}, 400, "thinking.type"),
    (TALK, {"max_tokens": 5, "messages": HI, "tools": [{"name": "f"}]}, 400, "input_schema"),
    (TALK, {"max_tokens": 5, "messages": HI, "tool_choice": {"type": "tool", "name": "f"}}, 400, "no such function"),
    (TALK, {"max_tokens": 5, "messages": HI, "stop_sequences": "x" * 3, "stream": 1}, 400, "stream"),
    (TALK, {"max_tokens": 5, "messages": [{"role": "user", "content": "x" * 3000}]}, 400, "prompt is too long"),
    (f"{TALK}/count_tokens", {"messages": []}, 400, "messages"),
    ("/v1/requests/chatcmpl-0/cancel", {}, 404, "under way"), ("/v1/nothing", {"input": "Hi"}, 404, "/v1/nothing"),
]  # fmt: skip


@pytest.mark.parametrize("path, body, status, word", BAD)
def test_bad_requests(server, path, body, status, word):
    found, _, reply = post(server, path, body)
    assert found == status and word in reply["error"]["message"]
    assert set(reply["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("form", ["json", {"type": "xml"}, {"type": "regex", "pattern": "(("}])
def test_an_error_about_the_form_names_its_field(server, form):
    error = post(server, CHAT, {"messages": HI, "response_format": form})[2]["error"]
    assert error["param"] == "response_format" and error["code"] is None


UTF16 = '{"prompt": "\ud83d"}'.encode("utf-16", "surrogatepass")
HALVES = [b'{"prompt": "\xed\xa0\x80"}', b'{"prompt": "\\ud83d"}', UTF16]
"""Half of a letter as bytes, as an escape, and in another encoding."""


@pytest.mark.parametrize(
    "raw, status",
    [(b"", 400), (b"{", 400), (b"[]", 400), (b"{" + b" " * 200_000 + b"}", 413), *((half, 400) for half in HALVES)],
)
def test_bodies_that_are_no_request(server, raw, status):
    assert post(server, CHAT, None, raw)[0] == status


NUMBERS = [b"NaN", b"-Infinity", b"1e400", b"-1" + b"0" * 400, b"1" + b"0" * 400 + b".5", b"1" * 5000]
"""What is no number in JSON, or none that 64 bits hold."""
HOLD_NUMBERS = {
    CHAT: [b'"temperature": %s', b'"logit_bias": {"5": %s}', b'"stop_token_ids": [%s]', b'"unknown": [{"a": %s}]'],
    TEXT: [b'"top_p": %s', b'"prompt": [%s]'],
    "/v1/responses": [b'"tools": [{"type": "custom", "name": "x", "more": %s}]', b'"reasoning": %s'],
    TALK: [b'"presence_penalty": %s', b'"tools": [{"name": "f", "input_schema": {"minimum": %s}}]'],
    "/v1/embeddings": [b'"dimensions": %s'], "/tokenize": [b'"chat_template_kwargs": {"a": %s}'],
    "/v1/batches": [b'"metadata": {"a": %s}'],
}  # fmt: skip


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:9].decode())
@pytest.mark.parametrize("path", HOLD_NUMBERS)
def test_numbers_that_are_none_are_refused_wherever_they_stand(server, path, number):
    """Each was a status 500, and behind a stream JSON that no client reads."""
    usual = {"messages": HI, "prompt": "Hi", "input": "Hi", "max_tokens": 2}
    usual = json.dumps({name: usual[name] for name in usual if path != "/tokenize" or name == "messages"}).encode()
    for field in HOLD_NUMBERS[path]:
        status, _, reply = post(server, path, None, usual[:-1] + b", " + field % number + b"}")
        assert status == 400 and "is not valid JSON" in reply["error"]["message"], field


def test_a_client_that_breaks_off_in_its_body_is_no_failure(server, caplog):
    gone, failed = (server.service.metrics.refused.labels(status)._value.get for status in ("499", "500"))
    before = gone(), failed()
    with socket.create_connection(("127.0.0.1", server.port)) as begun:
        begun.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n")
        begun.sendall(b"Content-Length: 100\r\n\r\n{")
    until(lambda: gone() + failed() > sum(before))
    assert (gone(), failed()) == (before[0] + 1, before[1]) and "a request failed" not in caplog.text


def test_unknown_fields_are_ignored_and_told(server):
    status, headers, _ = post(server, CHAT, {"messages": HI, "max_tokens": 2, "tempreature": 1, "xyz": 2, "user": "me"})
    assert status == 200 and headers["X-Outcore-Ignored-Fields"] == "tempreature, xyz"


def test_other_addresses_need_a_key(tmp_path):
    refused(ValueError, "--insecure", lambda: ServeSettings(host="0.0.0.0"))
    assert ServeSettings(host="0.0.0.0", insecure=True).host and ServeSettings(host="0.0.0.0", api_keys=("longenough",))
    assert is_loopback("127.0.0.9") and is_loopback("::1") and not is_loopback("10.0.0.1")
    refused(ValueError, "fewer than 8", lambda: ServeSettings(api_keys=("short")))
    (tmp_path / "keys").write_text("\n")
    refused(ValueError, "holds no keys", lambda: read_keys(tmp_path / "keys"))


def test_an_answer_that_takes_too_long_is_given_up(start):
    slow = start(ServeSettings(request_timeout_s=0.0001), max_sequences=2)
    status, _, reply = post(slow, TEXT, {"prompt": "Hi", "max_tokens": 200, "ignore_eos": True})
    assert status == 408 and reply["error"]["code"] == "timeout"


@pytest.mark.parametrize("stream", [True, False])
def test_names_of_unknown_fields_that_no_header_holds_cost_no_place(server, stream):
    for odd in ("\u4e2d", "a\r\nSet-Cookie: b=c", " ", "x" * 50_000):
        body = json.dumps({"messages": HI, "max_tokens": 2, "stream": stream, odd: 1}).encode()
        asked = urllib.request.Request(server.url + CHAT, body, {"Content-Type": "application/json"}, method="POST")
        with urllib.request.urlopen(asked, timeout=120) as reply:
            told = reply.headers["X-Outcore-Ignored-Fields"]
            assert reply.status == 200 and told.isascii() and len(told) <= 4096 and "Set-Cookie" not in reply.headers
            reply.read()
    until(lambda: server.service.num_under_way == 0)

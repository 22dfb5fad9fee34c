"""What libraries over OpenAI's client count on: forced calls, answers that go on, usage on the way, request ids."""

import json
import urllib.error
import urllib.request

import pytest
from pydantic import BaseModel

from outcore.serve import ServeSettings
from outcore.serve.additions import ApiError
from tests.infer.models import save_tiny_model
from tests.serve.running import Running, send

pytestmark = pytest.mark.usefixtures("one_thread")
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "Hi"}]
TOWN = {"type": "object", "properties": {"town": {"enum": ["Oslo", "Bern"]}}, "required": ["town"]}
TOWN |= {"additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": TOWN}},
    {"type": "function", "function": {"name": "time", "parameters": TOWN}},
]


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """One whose context holds tools and calls."""
    folder = tmp_path_factory.mktemp("wide")
    save_tiny_model(folder / "tiny", positions=2048)
    settings = ServeSettings(max_answer_tokens=300, logs=folder / "logs", name="tiny")
    running = Running(folder / "tiny", settings, context=2048, max_sequences=4)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def wide_client(openai, wide):
    return openai.OpenAI(base_url=f"{wide.url}/v1", api_key="unused", max_retries=0, timeout=120)


def posted(server, path, body):
    status, reply = send(server, path, body)
    return status, json.loads(reply)


@pytest.mark.parametrize(
    ("choice", "parallel", "names"),
    [
        ({"type": "function", "function": {"name": "time"}}, True, {"time"}),
        ("required", False, {"time", "weather"}),
        ("required", True, {"time", "weather"}),
    ],
)
def test_a_call_that_must_be_made_is_made(wide_client, choice, parallel, names):
    asked = {"model": "tiny", "messages": HI, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
    asked |= {"max_tokens": 200, "seed": 3}
    whole = wide_client.chat.completions.create(**asked).choices[0]
    first = whole.message.tool_calls[0]
    assert whole.finish_reason == "tool_calls" or (parallel and whole.finish_reason == "length")
    assert len(whole.message.tool_calls) == 1 or (parallel and choice == "required")
    assert {call.function.name for call in whole.message.tool_calls} <= names
    assert json.loads(first.function.arguments)["town"] in ("Oslo", "Bern")
    pieces = [p.choices[0].delta for p in wide_client.chat.completions.create(**asked, stream=True) if p.choices]
    told = [call for piece in pieces for call in piece.tool_calls or ()]
    joined = ["".join(c.function.arguments for c in told if c.index == i) for i in range(len(whole.message.tool_calls))]
    assert joined == [call.function.arguments for call in whole.message.tool_calls] and len(told) > 2 * len(joined)
    assert not any(piece.content for piece in pieces if parallel is False)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_has_the_arguments_of_its_function_also_beside_a_form_of_answers(wide_client, choice):
    """As instructor and LangChain ask: a schema that is not closed, and a form that is for answers without a call."""
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"properties": TOWN["properties"]}}}
    asked = {"model": "tiny", "messages": HI, "tools": [tool], "max_tokens": 200, "seed": 3}
    asked |= {"tool_choice": choice, "parallel_tool_calls": False, "response_format": {"type": "json_object"}}
    found = wide_client.chat.completions.create(**asked).choices[0]
    assert found.finish_reason == "tool_calls"
    assert json.loads(found.message.tool_calls[0].function.arguments).keys() <= {"town"}


def test_a_named_call_through_responses(wide_client):
    tool = {"type": "function", "name": "weather", "parameters": TOWN, "strict": True}
    asked = {"model": "tiny", "input": "Hi", "tools": [tool], "max_output_tokens": 200}
    found = wide_client.responses.create(**asked, tool_choice={"type": "function", "name": "weather"})
    assert [item.type for item in found.output] == ["function_call"] and found.output[0].name == "weather"


def test_a_schema_of_pydantics_is_found_by_its_references(openai, wide_client):
    class Town(BaseModel):
        name: bool

    class Trip(BaseModel):
        towns: dict[str, Town] | None
        first: Town

    tool = openai.pydantic_function_tool(Trip)
    asked = {"model": "tiny", "messages": HI, "tools": [tool], "max_tokens": 200, "seed": 1}
    found = wide_client.chat.completions.create(
        **asked, tool_choice={"type": "function", "function": {"name": "Trip"}}
    ).choices[0]
    if found.finish_reason == "tool_calls":  # a model that knows nothing may write towns until its end
        assert Trip.model_validate_json(found.message.tool_calls[0].function.arguments)


def test_only_one_call_is_told_where_calls_are_not_parallel(wide_client):
    call = r'<tool_call>\n\{"name": "weather", "arguments": \{"town": "Oslo"\}\}\n</tool_call>'
    asked = {"model": "tiny", "messages": HI, "tools": TOOLS, "max_tokens": 250}
    asked["extra_body"] = {"response_format": {"type": "regex", "pattern": call + call}}
    for parallel, count in ((True, 2), (False, 1)):
        found = wide_client.chat.completions.create(**asked, parallel_tool_calls=parallel).choices[0]
        assert len(found.message.tool_calls) == count and not found.message.content
        stream = wide_client.chat.completions.create(**asked, parallel_tool_calls=parallel, stream=True)
        deltas = [call for piece in stream if piece.choices for call in piece.choices[0].delta.tool_calls or ()]
        assert sum(bool(delta.id) for delta in deltas) == count and {delta.index for delta in deltas} == {*range(count)}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"tool_choice": "required"}, "no such function"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "asks for 'fly'"),
        ({"continue_final_message": 1}, "must be true or false"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "opposite"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "true or false"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_said(server, body, word):
    status, reply = posted(server, CHAT, {"messages": HI, **body})
    assert status == 400 and word in reply["error"]["message"]


def test_the_last_message_goes_on(server, tiny_folder):
    begun = [*HI, {"role": "assistant", "content": "The quick brown"}]
    body = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
    status, reply = posted(server, CHAT, body | {"max_tokens": 8, "temperature": 0, "ignore_eos": True})
    prompt = tiny_folder[2].apply_chat_template(begun, tokenize=False, continue_final_message=True)
    asked = {"prompt": tiny_folder[2](prompt, add_special_tokens=False)["input_ids"], "max_tokens": 8, "temperature": 0}
    wanted = posted(server, TEXT, asked | {"ignore_eos": True})[1]["choices"][0]["text"]
    assert status == 200 and reply["choices"][0]["message"]["content"] == wanted


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_each_piece_of_a_stream_tells_the_usage_where_that_is_asked(server, path):
    own = {"prompt": "Hi", "logprobs": 0} if path == TEXT else {"messages": HI, "logprobs": True}
    body = {**own, "max_tokens": 6, "ignore_eos": True, "stream": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = send(server, path, body | {"stream_options": options})[1].decode()
    events = [json.loads(line[6:]) for line in reply.splitlines() if line.startswith("data: {")]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 6 and len(set(counts)) > 2
    assert all(event["usage"]["prompt_tokens"] == events[0]["usage"]["prompt_tokens"] for event in events)


def test_an_empty_suffix_means_nothing(client):
    asked = {"model": "tiny", "prompt": "The quick", "max_tokens": 4, "temperature": 0}
    assert (
        client.completions.create(**asked, suffix="").choices[0].text
        == client.completions.create(**asked).choices[0].text
    )


def headers_of(server, path, given=None, method="GET", data=None):
    asked = urllib.request.Request(
        server.url + path, data, {"Content-Type": "application/json", **(given or {})}, method=method
    )
    try:
        with urllib.request.urlopen(asked, timeout=120) as reply:
            return reply.status, reply.headers, reply.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def test_health_answers_a_look_at_its_head(server):
    status, headers, body = headers_of(server, "/health", method="HEAD")
    assert status == 200 and not body and int(headers["content-length"]) > 0


def test_every_answer_has_an_id_the_clients_own_or_a_new_one(server, client, monkeypatch):
    assert headers_of(server, "/v1/models", {"X-Request-Id": "mine-1"})[1]["x-request-id"] == "mine-1"
    made = [headers_of(server, path)[1]["x-request-id"] for path in ("/health", "/v1/models", "/v1/nothing")]
    assert len(set(made)) == 3 and all(one.startswith("req-") for one in made)
    for odd in ("a b", "x" * 129, "<b>"):
        assert headers_of(server, "/health", {"X-Request-Id": odd})[1]["x-request-id"].startswith("req-")
    assert client.models.list()._request_id.startswith("req-")
    monkeypatch.setattr(type(server.service), "check_model", lambda self, body: 1 / 0)
    status, headers, _ = headers_of(server, TEXT, {"X-Request-Id": "mine-2"}, "POST", b'{"prompt": "Hi"}')
    assert status == 500 and headers["x-request-id"] == "mine-2"


@pytest.mark.parametrize(
    ("path", "method", "status", "kind"),
    [
        ("/v1/nothing", "GET", 404, "not_found_error"),
        ("/v1/models", "DELETE", 405, "invalid_request_error"),
        ("/v1/batches?limit=0", "GET", 400, "invalid_request_error"),
        ("/v1/batches?limit=101", "GET", 400, "invalid_request_error"),
        ("/v1/batches?after=batch-nobody", "GET", 400, "invalid_request_error"),
    ],
)
def test_an_errors_type_is_its_statuss(server, path, method, status, kind):
    found, _, body = headers_of(server, path, method=method)
    assert found == status and json.loads(body)["error"]["type"] == kind


def test_what_the_server_cannot_is_no_fault_of_the_request():
    kinds = [ApiError(status, "x").body()["error"]["type"] for status in (500, 502, 503, 507, 400, 415)]
    assert kinds == ["server_error"] * 4 + ["invalid_request_error"] * 2


def test_lists_of_files_and_batches_come_in_pages(client):
    line = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": HI, "max_tokens": 1}}
    files = [client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch") for _ in range(3)]
    made = {client.batches.create(input_file_id=f.id, endpoint=CHAT, completion_window="24h").id for f in files}
    page = client.batches.list(limit=2)
    assert len(page.data) == 2 and page.has_more and page.last_id == page.data[-1].id
    assert made <= {batch.id for batch in page}, "the client asks for what is behind the last one"
    page = client.files.list(limit=1)
    assert len(page.data) == 1 and page.has_more and {f.id for f in files} <= {f.id for f in page}

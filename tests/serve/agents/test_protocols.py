"""What Messages and Responses promise beside a session's traffic, by the clients' own packages."""

from __future__ import annotations

import http.client
import json
import sys
import time

import pytest

from outcore.infer.chats import Parsed
from outcore.serve.kept import MOST_ONE_BYTES, KeptResponses, packed
from outcore.serve.protocols.messages import Blocks
from tests.refused import refused
from tests.serve.agents.sessions import PATCH, READ
from tests.serve.running import get, send

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
pytestmark = pytest.mark.usefixtures("one_thread")
HI = [{"role": "user", "content": "Hello"}]
TOOL = {"name": "Read", "description": "d", "input_schema": READ}
FREE = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": PATCH}}


@pytest.fixture(scope="module")
def claude(wide):
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=wide.url, api_key="unused", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def responses(openai, wide):
    return openai.OpenAI(base_url=f"{wide.url}/v1", api_key="unused", max_retries=0, timeout=120).responses


def test_a_message_says_why_it_ended_and_what_came_from_the_cache(claude):
    asked = {"model": "tiny", "max_tokens": 20, "messages": HI, "extra_body": {"temperature": 0, "ignore_eos": True}}
    first = claude.messages.create(**asked)
    assert first.stop_reason == "max_tokens" and first.usage.output_tokens == 20 and first.type == "message"
    again = claude.messages.create(**asked)
    assert again.content == first.content and again.usage.cache_read_input_tokens > 0
    total = again.usage.input_tokens + again.usage.cache_read_input_tokens
    assert total == first.usage.input_tokens == claude.messages.count_tokens(model="tiny", messages=HI).input_tokens
    with claude.messages.stream(**asked) as stream:
        assert stream.get_final_message().content[0].text == first.content[0].text
    stop = first.content[0].text[4:7]
    stopped = claude.messages.create(**asked, stop_sequences=[stop])
    assert stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == stop
    assert stopped.content[0].text == first.content[0].text.partition(stop)[0]


def test_calls_and_their_results_go_round(claude):
    asked = {"model": "tiny", "max_tokens": 200, "tools": [TOOL]}
    said = claude.messages.create(**asked, messages=HI, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    (call,) = said.content
    assert said.stop_reason == "tool_use" and call.name == "Read" and call.input["path"] in ("a.py", "b.py")
    result = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": [{"type": "text", "text": "3"}],
        "is_error": False,
    }
    talk = [*HI, {"role": "assistant", "content": [call.model_dump()]}, {"role": "user", "content": [result]}]
    auto = claude.messages.create(**asked | {"max_tokens": 4}, messages=talk)
    assert auto.usage.cache_read_input_tokens > 100
    tools = [TOOL | {"name": "Other"}, TOOL]
    chosen = claude.messages.create(
        **asked | {"tools": tools}, messages=HI, tool_choice={"type": "tool", "name": "Read"}
    )
    assert [block.name for block in chosen.content] == ["Read"], "the one that is named"
    none = claude.messages.create(**asked | {"max_tokens": 4}, messages=talk, tool_choice={"type": "none"})
    read = [one.usage.input_tokens + one.usage.cache_read_input_tokens for one in (none, auto)]
    assert none.stop_reason in ("max_tokens", "end_turn") and read[0] < read[1], "it reads of no tool"


def test_a_number_that_no_double_holds_breaks_no_answer():
    blocks, said = Blocks(), '{"a": 1e999, "b": [-1e999, 2.5], "c": 7}'
    blocks.take(Parsed(tool_calls=[{"index": 0, "id": "c", "function": {"name": "f", "arguments": said}}]))
    blocks.end(Parsed())
    most = sys.float_info.max
    assert blocks.content[0]["input"] == {"a": most, "b": [-most, 2.5], "c": 7}


def test_an_answer_goes_on_from_what_the_client_began(wide):
    begun = {"model": "tiny", "max_tokens": 5, "messages": [*HI, {"role": "assistant", "content": "The quick"}]}
    prompt = json.loads(send(wide, "/v1/messages/count_tokens", begun)[1])["input_tokens"]
    ended = begun | {"messages": [*begun["messages"], {"role": "user", "content": "x"}]}
    assert prompt < json.loads(send(wide, "/v1/messages/count_tokens", ended)[1])["input_tokens"] - 5


def test_thoughts_are_blocks_of_their_own(wide, claude, monkeypatch):
    """The model's own template is told whether to think; what it thinks comes first and is signed."""
    form = {"type": "regex", "pattern": "<think>so</think>\n\nYes"}
    from outcore.serve.protocols import messages

    read = messages._fields_of

    def formed(body):
        fields, ignored = read(body)
        return fields | {"response_format": form}, ignored

    monkeypatch.setattr(messages, "_fields_of", formed)
    asked = {"model": "tiny", "max_tokens": 200, "messages": HI, "thinking": {"type": "adaptive"}}
    with claude.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream if event.type != "text"]
        streamed = stream.get_final_message()
    for said in (claude.messages.create(**asked), streamed):
        thought, text = said.content
        assert (thought.type, thought.thinking, text.text) == ("thinking", "so", "Yes") and thought.signature
    assert kinds.count("content_block_start") == 2 and "signature" in kinds


def test_errors_have_the_shape_of_their_api(wide, claude):
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as told:
        claude.messages.create(model="other", max_tokens=5, messages=HI)
    assert told.value.body["type"] == "error" and told.value.body["error"]["type"] == "not_found_error"
    status, said = send(
        wide, "/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": HI, "tools": "x" * 400_000}
    )
    assert status == 400 and json.loads(said)["error"]["type"] == "invalid_request_error"
    long = http.client.HTTPConnection("127.0.0.1", wide.port, timeout=120)  # refused before it is read
    long.request("POST", "/v1/messages", headers={"Content-Type": "application/json", "Content-Length": str(1 << 30)})
    reply = long.getresponse()
    assert reply.status == 413 and json.loads(reply.read())["error"]["type"] == "request_too_large"
    long.close()
    status, said = send(wide, "/v1/messages", {"model": "tiny", "max_tokens": 1, "min_tokens": 3, "messages": HI})
    assert status == 400 and "min_tokens is 3" in json.loads(said)["error"]["message"]
    assert claude.messages.create(model="tiny", max_tokens=2, messages=HI).usage.output_tokens


def test_sound_is_never_served(openai, wide):
    client = openai.OpenAI(base_url=f"{wide.url}/v1", api_key="unused", max_retries=0, timeout=120)
    with pytest.raises(openai.NotFoundError, match="sound is never"):
        client.audio.transcriptions.create(model="tiny", file=("a.wav", b"RIFF"))  # a form
    with pytest.raises(openai.NotFoundError, match="sound is never"):
        client.audio.speech.create(model="tiny", voice="alloy", input="Hi")


def test_a_grammar_that_cannot_be_is_refused_and_others_are_served(wide, responses):
    odd = FREE | {"format": FREE["format"] | {"definition": "start: nothing"}}
    status, said = send(wide, "/v1/responses", {"model": "tiny", "input": "Hi", "tools": [odd]})
    assert status == 400 and json.loads(said)["error"]["message"].startswith("tools: ")
    assert responses.create(model="tiny", input="Hi", max_output_tokens=3).output


def test_keywords_that_no_form_can_hold_are_named(responses):
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "name": "f", "parameters": schema, "strict": False}, {"type": "web_search"}]
    told = responses.with_raw_response.create(model="tiny", input="Hi", tools=tools, max_output_tokens=3)
    ignored = told.headers["x-outcore-ignored-fields"]
    assert "uniqueItems" in ignored and "tools.web_search" in ignored


def test_a_patch_follows_its_grammar_while_it_is_written(responses):
    chosen = {"type": "custom", "name": "apply_patch"}
    asked = {"model": "tiny", "input": "Hi", "tools": [FREE], "tool_choice": chosen, "max_output_tokens": 280}
    ended = 0
    for seed in range(4):
        (item,) = responses.create(**asked, extra_body={"seed": seed}).output
        assert item.type == "custom_tool_call" and item.input.startswith("*** Begin Patch\n"[: len(item.input)])
        ended += item.status == "completed"
        assert item.status != "completed" or item.input.removesuffix("\n").endswith("\n*** End Patch")
    assert ended


def test_names_in_a_namespace_are_the_clients(responses):
    inner = {"type": "function", "name": "look", "description": "x", "parameters": READ, "strict": True}
    tools = [{"type": "namespace", "name": "mcp__files", "description": "x", "tools": [inner]}]
    chosen = {"type": "function", "name": "look", "namespace": "mcp__files"}
    asked = {"model": "tiny", "input": "Hi", "tools": tools, "tool_choice": chosen, "max_output_tokens": 280}
    (call,) = responses.create(**asked).output
    assert (call.type, call.name, call.namespace) == ("function_call", "look", "mcp__files")
    assert json.loads(call.arguments)["path"] in ("a.py", "b.py")


def test_a_response_goes_on_from_another(responses):
    first = responses.create(model="tiny", input="Hello", max_output_tokens=6)
    then = responses.create(model="tiny", input="And?", max_output_tokens=6, previous_response_id=first.id)
    assert then.previous_response_id == first.id and then.usage.input_tokens > first.usage.input_tokens + 8
    whole = [*HI, *[item.model_dump() for item in first.output], {"role": "user", "content": "And?"}]
    same = responses.create(model="tiny", input=whole, max_output_tokens=6, store=False)
    assert same.usage.input_tokens == then.usage.input_tokens
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="is not here"):
        responses.create(model="tiny", input="And?", previous_response_id=same.id)


def test_what_is_said_again_with_each_response_is_short(wide, responses):
    pairs = {f"{number:064}": "x" * 512 for number in range(16)}
    assert responses.create(model="tiny", input="Hi", max_output_tokens=1, metadata=pairs).metadata == pairs
    for wrong in (pairs | {"y": ""}, {"x" * 65: ""}, {"x": "x" * 513}, {"x": 3}, {"x": ["x"] * 9}, [], "x"):
        status, said = send(wide, "/v1/responses", {"model": "tiny", "input": "Hi", "metadata": wrong})
        assert status == 400 and json.loads(said)["error"]["param"] == "metadata", wrong
    for long in ({"tools": [{"type": "web_search", "x": "x" * (1 << 20)}]}, {"tool_choice": ["x"] * (1 << 18)}):
        status, said = send(wide, "/v1/responses", {"model": "tiny", "input": "Hi", **long})
        assert status == 400 and "1 MiB" in json.loads(said)["error"]["message"]


def test_responses_are_kept_within_limits():
    kept = KeptResponses(most=3, most_bytes=270)
    for number in range(4):
        kept.put(str(number), packed([number]))
    assert kept.get("1") == [1]
    kept.put("long", packed(["x" * 60]))
    kept.put("longer", packed(["x" * 30]))
    assert kept.get("longer") and kept.get("1") == [1]
    kept.put("too long", packed(["x" * 300]))
    assert kept.get("1") == [1], "what is not kept takes no place"
    for name in ("0", "too long", 3, None):
        refused(Exception, "is not here", lambda name=name: kept.get(name))


def test_one_conversation_does_not_take_all_room():
    kept = KeptResponses()
    kept.put("short", packed(["x"]))
    kept.put("long", packed(["x" * MOST_ONE_BYTES]))
    kept.put("many", packed([1] * (MOST_ONE_BYTES // 20)))
    assert kept.get("short") == ["x"]
    for name in ("long", "many"):
        refused(Exception, "is not here", lambda name=name: kept.get(name))


def test_the_models_of_every_client_are_one(wide, claude):
    page = json.loads(get(wide, "/v1/models"))
    assert [model.id for model in claude.models.list()] == ["tiny"] and page["models"][0]["slug"] == "tiny"
    assert page["models"][0]["context_window"] == page["data"][0]["max_input_tokens"] == 4096


def test_a_system_that_speaks_within_the_conversation(wide, claude):
    def tokens(*messages):
        return claude.messages.count_tokens(model="tiny", messages=list(messages)).input_tokens

    said, more = (
        {"role": "user", "content": "Hi"},
        {"role": "system", "content": [{"type": "text", "text": "Be brief"}]},
    )
    reminder = "<system-reminder>\nBe brief\n</system-reminder>"
    assert tokens(said, more) == tokens({"role": "user", "content": f"Hi\n\n{reminder}"})
    answer = {"role": "assistant", "content": "Yes."}
    assert tokens(said, answer, more) == tokens(said, answer, {"role": "user", "content": reminder})
    answered = claude.messages.create(model="tiny", max_tokens=3, messages=[said, more])
    assert answered.usage.output_tokens
    body = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "tool", "content": "x"}]}
    status, reply = send(wide, "/v1/messages", body)
    assert status == 400 and "must be user or assistant" in json.loads(reply)["error"]["message"]


CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c1", "content": "x"}
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
LARK = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: ("}}
BAD = {
    "a result without its call": (
        {"messages": [*HI, {"role": "tool", "tool_call_id": "c1", "content": "x"}]},
        {"messages": [{"role": "user", "content": [RESULT]}]},
        {"input": [{"type": "function_call_output", "call_id": "c1", "output": "x"}]},
    ),
    "a call without its result": (
        {"messages": [*HI, {"role": "assistant", "content": "", "tool_calls": [CALL]}, *HI]},
        {"messages": [*HI, {"role": "assistant", "content": [USE]}, *HI]},
        {"input": [*HI, {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}, *HI]},
    ),
    "an unknown part": (
        {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
        {"input": [{"role": "user", "content": [{"type": "hologram"}]}]},
    ),
    "an unknown kind of turn": (
        {"messages": [*HI, {"role": "hologram", "content": "x"}]},
        {"messages": [*HI, {"role": "hologram", "content": "x"}]},
        {"input": [*HI, {"type": "hologram_call", "call_id": "c1"}]},
    ),
    "ten thousand tools": (
        {
            "messages": HI,
            "tools": [{"type": "function", "function": FUNCTION | {"name": f"t{n}"}} for n in range(10_000)],
        },
        {"messages": HI, "tools": [{"name": f"t{n}", "input_schema": {"type": "object"}} for n in range(10_000)]},
        {"input": "Hi", "tools": [{"type": "function", **FUNCTION, "name": f"t{n}"} for n in range(10_000)]},
    ),
    "a grammar that is none": (None, None, {"input": "Hi", "tools": [LARK]}),
    "a tool without a name": (
        {"messages": HI, "tools": [{"type": "function", "function": {}}]},
        {"messages": HI, "tools": [{"input_schema": {}}]},
        {"input": "Hi", "tools": [{"type": "function"}]},
    ),
    "another model": ({"model": "other", "messages": HI}, {"model": "other", "messages": HI}, {"model": "other"}),
    "more than the context": (
        {"messages": [{"role": "user", "content": "fox " * 9000}]},
        {"messages": [{"role": "user", "content": "fox " * 9000}]},
        {"input": "fox " * 9000},
    ),
}
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_an_error_of_that_api_and_others_are_served(wide, case):
    for path, body in zip(PATHS, BAD[case], strict=True):
        if body is None:
            continue
        status, reply = send(wide, path, {"model": "tiny", "max_tokens": 2} | body)
        told = json.loads(reply)
        assert 400 <= status < 500 and told["type"] == "error" and told["error"]["message"], (path, reply)
        kind = "not_found_error" if case == "another model" else "invalid_request_error"
        assert told["error"]["type"] == kind
    status, _ = send(wide, PATHS[0], {"messages": HI, "max_tokens": 2})
    assert status == 200


def test_many_words_of_a_system_cost_their_length(wide):
    """Each copied all that was said before it."""
    rows = [{"role": "user", "content": "x" * (4 << 20)}, *[{"role": "system", "content": ""}] * 20_000]
    rows += [{"role": "user", "content": ""}, {"role": "wrong"}]  # refused when all is put together, not tokenized
    began_s = time.monotonic()
    status, said = send(wide, "/v1/messages/count_tokens", {"model": "tiny", "messages": rows})
    assert status == 400 and "messages.20002.role" in json.loads(said)["error"]["message"]
    assert time.monotonic() - began_s < 3

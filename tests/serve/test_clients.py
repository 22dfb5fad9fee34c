"""The server as real clients see it: the openai package, a harness that scores, Prometheus."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch

from outcore.infer import Request, Sampling
from tests.infer.models import greedy_by_transformers
from tests.serve.running import get, held, send
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("one_thread")


HELLO = [{"role": "user", "content": "Hello"}]


def ids_of(tokenizer, messages):
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_models(client):
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_chat_equals_transformers(client, tiny_folder):
    _, model, tokenizer = tiny_folder
    found = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, max_tokens=12, extra_body={"ignore_eos": True}
    )
    ids = ids_of(tokenizer, HELLO)
    expected = greedy_by_transformers(model, ids, 12)
    assert found.choices[0].message.content == tokenizer.decode(expected, skip_special_tokens=True)
    assert found.choices[0].finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(ids), 12)
    assert found.usage.total_tokens == len(ids) + 12


def test_streams_say_the_same_as_whole_answers(client):
    asked = {"model": "tiny", "messages": HELLO, "seed": 11, "max_tokens": 20, "n": 2, "logprobs": True}
    whole = client.chat.completions.create(**asked, top_logprobs=2)
    texts, reasons, logprobs, usage = ["", ""], [None, None], [0, 0], None
    stream = client.chat.completions.create(
        **asked, top_logprobs=2, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            logprobs[choice.index] += len(choice.logprobs.content) if choice.logprobs else 0
    assert texts == [c.message.content for c in whole.choices] and texts[0] != texts[1]
    assert reasons == [c.finish_reason for c in whole.choices]
    assert logprobs == [len(c.logprobs.content) for c in whole.choices]
    assert usage.completion_tokens == whole.usage.completion_tokens
    one = whole.choices[0].logprobs.content[0]
    assert len(one.top_logprobs) == 2 and one.logprob <= one.top_logprobs[0].logprob <= 0


def test_seed_stop_and_bias(client):
    asked = {"model": "tiny", "prompt": "The quick", "max_tokens": 24, "seed": 5}
    first = client.completions.create(**asked).choices[0].text
    assert client.completions.create(**asked).choices[0].text == first
    stop = first[6:9]
    stopped = client.completions.create(**asked, stop=[stop]).choices[0]
    assert stopped.text == first[: first.find(stop)] and stopped.finish_reason == "stop"
    parts = client.completions.create(**asked, stop=stop, stream=True)
    assert "".join(p.choices[0].text for p in parts if p.choices) == stopped.text
    biased = client.completions.create(**asked, logit_bias={"70": 100})
    assert len(set(biased.choices[0].text)) == 1


def test_answers_have_the_form_that_is_asked_for(client):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "old": {"type": "boolean"}},
        "required": ["name", "old"],
        "additionalProperties": False,
    }
    asked = {"model": "tiny", "messages": HELLO, "max_tokens": 60, "seed": 2}
    found = client.chat.completions.create(
        **asked, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    ).choices[0]
    answer = json.loads(found.message.content)
    assert set(answer) == {"name", "old"} and found.finish_reason == "stop"
    regex = {"type": "regex", "pattern": "(yes|no)!"}
    texts = {
        c.text
        for c in client.completions.create(
            model="tiny", prompt="The", n=6, max_tokens=9, extra_body={"response_format": regex}
        ).choices
    }
    assert texts <= {"yes!", "no!"}


def test_prompts_in_every_form(client, tiny_folder):
    tokenizer = tiny_folder[2]
    ids = tokenizer("The quick")["input_ids"]
    asked = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    texts = [
        [c.text for c in client.completions.create(prompt=prompt, **asked).choices]
        for prompt in ("The quick", ids, ["The quick", "dog"], [ids, ids])
    ]
    assert texts[0] == texts[1] == texts[2][:1] and texts[3] == texts[0] * 2


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "max_output_tokens"])
def test_a_length_has_three_names(client, name):
    body = {name: 3, "ignore_eos": True}
    assert client.completions.create(model="tiny", prompt="The", extra_body=body).usage.completion_tokens == 3


def test_a_completion_without_a_length_has_sixteen_tokens_or_what_the_context_leaves(client):
    for length, wanted in ((1, 16), (250, 6)):
        for said in ({}, {"max_tokens": None}):
            more = {"ignore_eos": True, **said}
            found = client.completions.create(model="tiny", prompt=[5] * length, extra_body=more)
            assert found.usage.completion_tokens == wanted


def test_places_of_tokens_go_on_through_a_stream(client):
    asked = {"model": "tiny", "prompt": ["One two", "The"], "seed": 3, "max_tokens": 12, "logprobs": 0}
    whole, found = client.completions.create(**asked), ([], [])
    for event in client.completions.create(**asked, stream=True):
        for choice in event.choices:
            found[choice.index].extend(choice.logprobs.text_offset if choice.logprobs else ())
    assert list(found) == [choice.logprobs.text_offset for choice in whole.choices]


def test_scores_as_a_harness_asks_for_them(client, tiny_folder):
    """lm-evaluation-harness: lists of token ids, echo, logprobs 1, max_tokens 1."""
    _, model, tokenizer = tiny_folder
    texts = [tokenizer("The quick brown fox")["input_ids"], tokenizer("lazy dog")["input_ids"]]
    found = client.completions.create(
        model="tiny", prompt=texts, max_tokens=1, logprobs=1, echo=True, temperature=0, seed=1
    )
    for ids, choice in zip(texts, found.choices):
        with torch.no_grad():
            wanted = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
        scores = choice.logprobs.token_logprobs
        assert len(scores) == len(ids) + 1 and scores[0] is None
        assert scores[1:-1] == pytest.approx([float(wanted[i - 1, t]) for i, t in enumerate(ids) if i], abs=1e-4)
        for place, (score, top) in enumerate(zip(scores[1:-1], choice.logprobs.top_logprobs[1:-1])):
            is_greedy = max(top.values()) <= score
            assert is_greedy == (int(wanted[place].argmax()) == ids[place + 1])
    only = client.completions.create(model="tiny", prompt="The", max_tokens=0, logprobs=1, echo=True)
    assert only.choices[0].text == "The"


def test_embeddings(client, tiny_folder):
    _, model, tokenizer = tiny_folder
    texts = ["The quick brown fox", "lazy dog"]
    found = client.embeddings.create(model="tiny", input=texts)
    for text, item in zip(texts, found.data):
        with torch.no_grad():
            hidden = model.model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0]
        wanted = torch.nn.functional.normalize(hidden.mean(0), dim=0)
        assert item.embedding == pytest.approx(wanted.tolist(), abs=1e-4)
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float")
    assert plain.data[1].embedding == pytest.approx(found.data[1].embedding, abs=1e-6)


@pytest.mark.parametrize(("wanted", "status"), [(8, 200), (8.0, 400), (True, 400), ([8], 400)])
def test_vectors_are_cut_to_a_whole_number_of_values(server, monkeypatch, wanted, status):
    config = server.service.opened.found.loaded.config
    monkeypatch.setattr(config, "matryoshka_dimensions", [1, 8], raising=False)
    found = send(server, "/v1/embeddings", {"input": "Hi", "dimensions": wanted})
    assert found[0] == status and (b"may be cut to 1, 8" in found[1]) == (status == 400)


def test_responses(client):
    asked = {"model": "tiny", "input": "Hello", "max_output_tokens": 9, "temperature": 0, "instructions": "be brief"}
    whole = client.responses.create(**asked, extra_body={"ignore_eos": True})
    assert whole.status == "incomplete" and whole.usage.output_tokens == 9 and whole.output_text
    assert whole.instructions == "be brief"
    plain = client.responses.create(**{**asked, "instructions": None})
    assert plain.instructions is None
    kinds, text = [], ""
    for event in client.responses.create(**asked, stream=True, extra_body={"ignore_eos": True}):
        kinds.append(event.type)
        assert event.type.startswith("response.output") or getattr(event, "response", whole).instructions == "be brief"
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert text == whole.output_text
    assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    again = client.responses.create(**{**asked, "input": parts}, extra_body={"ignore_eos": True})
    assert again.output_text == whole.output_text


def test_errors_have_classes(openai, client, start, tiny_folder):
    with pytest.raises(openai.NotFoundError, match="not here"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt="x" * 3000)
    assert error.value.code == "context_length_exceeded"
    from outcore.serve import ServeSettings

    guarded = start(ServeSettings(api_keys=("a-secret-key",)), max_sequences=2)
    wrong = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="another-key", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    right = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="a-secret-key", max_retries=0)
    assert len(right.models.list().data) == 1
    assert json.loads(get(guarded, "/health"))["status"] == "ok"


def test_every_other_class_of_error(openai, client, start, monkeypatch):
    from outcore.serve import ServeSettings

    one = start(ServeSettings(max_queue=1, max_body_bytes=4000), max_sequences=2)
    narrow = openai.OpenAI(base_url=f"{one.url}/v1", api_key="unused", max_retries=0, timeout=120)
    asked = {"model": "tiny", "prompt": "The", "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    with held(one.service.opened.engine):
        stream = narrow.completions.create(**asked, stream=True)
        with pytest.raises(openai.RateLimitError) as error:
            narrow.completions.create(**asked)
        assert error.value.code == "queue_full" and int(error.value.response.headers["retry-after"]) >= 1
        stream.close()
        until(lambda: not one.service.num_under_way)
    with pytest.raises(openai.APIStatusError) as error:
        narrow.completions.create(model="tiny", prompt="x" * 5000)
    assert error.value.status_code == 413
    with pytest.raises(openai.NotFoundError):
        narrow.batches.cancel("batch-nobody")
    with pytest.raises(openai.APIConnectionError):
        openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="unused", max_retries=0).models.list()
    with monkeypatch.context() as patch:
        patch.setattr(one.service.opened.engine.runner, "run", lambda works: 1 / 0)
        for _ in range(3):
            with pytest.raises(openai.InternalServerError) as error:
                narrow.completions.create(**asked)
            assert error.value.code != "engine_failed"
        until(lambda: one.service.thread.failures == 3)  # counted when the client has been told
    with pytest.raises(openai.InternalServerError) as error:
        narrow.completions.create(**asked)
    assert error.value.status_code == 503 and error.value.code == "engine_failed"
    assert 1 <= int(error.value.response.headers["retry-after"]) <= 30
    one.service.thread.failed_at_s -= 30
    assert narrow.completions.create(**asked).choices[0].text
    assert one.service.thread.is_well


def test_who_waits_is_told_that_the_server_stops(openai, start, capsys):
    one = start(max_sequences=2)
    client = openai.OpenAI(base_url=f"{one.url}/v1", api_key="unused", max_retries=0, timeout=120)
    asked, loop = {"prompt": "The", "max_tokens": 200, "ignore_eos": True}, asyncio.new_event_loop()
    with held(one.service.opened.engine), ThreadPoolExecutor() as threads:
        streams = [client.chat.completions.create(model="tiny", messages=HELLO, stream=True)]
        streams.append(client.responses.create(model="tiny", input="Hello", stream=True))
        assert [next(stream) for stream in streams]
        whole = [threads.submit(send, one, "/v1/completions", asked | {"n": n}) for n in (1, 2)]
        whole.append(threads.submit(send, one, "/v1/embeddings", {"input": "The"}))
        until(lambda: one.service.num_under_way == 5)
        one.server.should_exit = True
        with pytest.raises(openai.APIError, match="The server stops"):
            list(streams[0])
        assert "The server stops" in list(streams[1])[-1].response.error.message
        for status, reply in [one.result() for one in whole]:
            assert status == 503 and json.loads(reply)["error"]["code"] == "server_stopping"
        late = one.service.thread.stream(Request("late", (1,), Sampling(max_tokens=1)))
        assert "The server stops" in loop.run_until_complete(anext(late)).error
    one.stop()
    loop.close()
    assert "stopping: who waits for 5 answers is told" in capsys.readouterr().err


def test_calls_of_tools(openai, start):
    server = start(context=512, max_sequences=2)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=120)
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"town": {"type": "string"}}}}
    tools = [{"type": "function", "function": function}]
    call = r'<tool_call>\n\{"name": "weather", "arguments": \{"town": "(Oslo|Bern)"\}\}\n</tool_call>'
    asked = {"model": "tiny", "messages": HELLO, "tools": tools, "max_tokens": 120, "seed": 1, "temperature": 0.5}
    asked["extra_body"] = {"response_format": {"type": "regex", "pattern": call}}
    whole = client.chat.completions.create(**asked).choices[0]
    (made,) = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls" and made.function.name == "weather"
    assert json.loads(made.function.arguments)["town"] in ("Oslo", "Bern")
    pieces = [p.choices[0] for p in client.chat.completions.create(**asked, stream=True) if p.choices]
    told = [piece for p in pieces for piece in p.delta.tool_calls or ()]
    assert "".join(piece.function.arguments or "" for piece in told) == made.function.arguments
    assert pieces[-1].finish_reason == "tool_calls"


def test_a_client_that_goes_away_frees_its_place(client, server, monkeypatch):
    engine = server.service.opened.engine
    before, passes, gone = engine.counts.finished.get("cancelled", 0), [], threading.Event()

    def on_pass(*told):
        passes.append(told)
        if len(passes) >= 5:  # something was said, and much is left to say
            gone.wait(120)

    monkeypatch.setattr(engine, "observers", [*engine.observers, on_pass])
    stream = client.completions.create(
        model="tiny", prompt="The", max_tokens=64, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    until(lambda: not server.service.num_under_way)
    gone.set()
    until(lambda: not engine.num_running and engine.counts.finished.get("cancelled", 0) > before)


def test_a_client_that_went_away_before_the_first_event_frees_its_place(server):
    body = json.dumps({"prompt": "The", "max_tokens": 60, "stream": True}).encode()
    headers = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"transfer-encoding", b"chunked")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": headers}
    scope["server"], bodies, told = ("127.0.0.1", 80), [body], []
    until(lambda: not server.service.num_under_way)  # clients of earlier tests are gone

    async def receive():
        if not bodies:
            await asyncio.sleep(600)
        return {"type": "http.request", "body": bodies.pop(), "more_body": False}

    async def send(message):
        told.append(message["status"])
        raise OSError("the client is gone")

    with suppress(Exception):
        asyncio.run(server.server.config.app(scope, receive, send))
    assert told == [200] and not server.service.num_under_way


@pytest.mark.parametrize(("path", "field"), [("completions", "prompt"), ("embeddings", "input")])
def test_texts_of_clients_that_went_away_are_not_read(server, monkeypatch, path, field):
    """Their places were free at once, so each took some again, and all of their texts were scored."""
    engine, read = server.service.opened.engine, []
    kind = "score" if path == "completions" else "embed"
    method = getattr(engine.runner, kind)
    monkeypatch.setattr(
        engine.runner, kind, lambda texts, *more, **named: read.append(texts) or method(texts, *more, **named)
    )
    more = {"max_tokens": 1, "prompt_logprobs": 1} if kind == "score" else {}
    body = json.dumps({field: [[5] * 20] * 4, **more}).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with held(engine):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: server.service.num_under_way and engine._notes)
        until(lambda: not server.service.num_under_way)
    assert send(server, f"/v1/{path}", {field: [[6]], **more})[0] == 200
    assert read == [[(6,)]]


@pytest.mark.parametrize("path", ["completions", "chat/completions", "responses"])
def test_single_requests_are_listed_and_cancelled_by_id(server, path):
    asked = {"prompt": ["The", "A"], "messages": HELLO, "input": "Hello"}
    field = {"completions": "prompt", "chat/completions": "messages", "responses": "input"}[path]
    body = {field: asked[field], "max_tokens": 60, "ignore_eos": True, "stream": path == "completions"}
    replies, count, engine = [], 2 if path == "completions" else 1, server.service.opened.engine
    with held(engine):
        before = engine.counts.finished.get("cancelled", 0)
        asking = threading.Thread(target=lambda: replies.append(send(server, f"/v1/{path}", body)))
        asking.start()
        (one,) = until(lambda: json.loads(get(server, "/v1/requests"))["data"])
        until(lambda: len(server.service.under_way._parts(one["id"])) == count)
        one = json.loads(get(server, f"/v1/requests/{one['id']}"))
        assert one["endpoint"] == f"/v1/{path}" and one["status"] == "queued" and one["prompt_tokens"] > 0
        assert json.loads(get(server, f"/v1/requests/{one['id']}")) == one
        assert send(server, f"/v1/requests/{one['id']}/cancel", {})[1].startswith(b'{"id":"' + one["id"].encode())
    asking.join(120)
    ((status, reply),) = replies
    assert b"was cancelled" in reply and status == (200 if body["stream"] else 409)
    assert json.loads(get(server, "/v1/requests"))["data"] == []
    assert engine.counts.finished["cancelled"] == before + count


def test_tokens(server):
    def post(path, body):
        return json.loads(send(server, path, body)[1])

    found = post("/tokenize", {"prompt": "The quick"})
    assert found["count"] == len(found["tokens"])
    assert post("/detokenize", {"tokens": found["tokens"]})["prompt"] == "The quick"
    assert post("/tokenize", {"messages": HELLO})["count"] > found["count"] - 5

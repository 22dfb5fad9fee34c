"""`outcore serve` of a model that sees: pictures by three protocols, transformers' own answers, refusals in words."""

from __future__ import annotations

import base64
import io
import itertools
import json
import queue
import struct
import threading
import zlib
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from outcore.data.pictures import PictureEncoder, conversation_of, load_processor
from outcore.infer import Answer, Request, Sampling
from outcore.serve import ServeSettings
from tests import tiny_vision
from tests.serve.running import Running, get, held, send, until
from tests.tiny_vision import picture

pytestmark = pytest.mark.usefixtures("one_thread")
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
GREEDY = {"temperature": 0, "max_tokens": 8}


def url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def part(data: bytes) -> dict:
    return {"type": "image_url", "image_url": {"url": url(data)}}


def user(*parts) -> list[dict]:
    return [{"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_vision.save(tmp_path_factory.mktemp("sees") / "model")


@pytest.fixture(scope="module")
def seeing(folder, tmp_path_factory):
    settings = ServeSettings(logs=tmp_path_factory.mktemp("logs"), name="sees", max_answer_tokens=64, max_queue=40)
    running = Running(folder, settings, context=None, ram_gib=None, page_tokens=64)
    yield running
    running.stop()


def plain(folder, text: str, *pictures: bytes, after: tuple[str, ...] = ()) -> str:
    """What transformers' own `generate` says to `text`, the last of the turns that come `after` each other."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder)
    encoder = PictureEncoder(load_processor(str(folder)), [model.config.image_token_id])
    turns = zip(itertools.cycle(("user", "assistant")), (*after, text), strict=False)
    talk = conversation_of([{"role": role, "content": told} for role, told in turns], list(pictures))
    asked = encoder.inputs_of(encoder.written(talk), talk)
    with torch.no_grad():
        told = model.generate(**asked, do_sample=False, max_new_tokens=8)
    return encoder.tokenizer.decode(told[0, asked["input_ids"].shape[1] :], skip_special_tokens=True)


def test_the_openai_client_sends_pictures_and_gets_transformers_own_answer(openai, seeing, folder):
    client = openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="unused", max_retries=0, timeout=120)
    red, blue = picture(), picture("blue")
    messages = user("first ", part(red), " then ", part(blue), " which?")
    wanted = plain(folder, "first <image> then <image> which?", red, blue)
    answer = client.chat.completions.create(model="sees", messages=messages, **GREEDY)
    assert answer.choices[0].message.content == wanted
    pieces = client.chat.completions.create(model="sees", messages=messages, stream=True, **GREEDY)
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == wanted
    asked = [{"type": "input_text", "text": "hello"}, {"type": "input_image", "image_url": url(red)}]
    response = client.responses.create(
        model="sees", input=[{"role": "user", "content": asked}], temperature=0, max_output_tokens=8
    )
    assert response.output_text == plain(folder, "hello<image>", red)
    later = client.responses.create(
        model="sees", input="and?", previous_response_id=response.id, temperature=0, max_output_tokens=8
    )
    assert later.usage.input_tokens > response.usage.input_tokens


def test_prompts_that_begin_alike_are_answered_as_by_transformers(seeing, folder):
    red, long = picture(), "hello world " * 20
    wanted, messages = plain(folder, f"<image>{long}", red), user(part(red), long)
    for asked in ({}, {}, {"n": 2}):
        status, body = send(seeing, CHAT, {"messages": messages, **GREEDY, **asked})
        assert status == 200, body
        told = json.loads(body)
        assert told["usage"]["prompt_tokens"] > seeing.service.opened.engine.scheduler.cache.settings.page_tokens
        assert {choice["message"]["content"] for choice in told["choices"]} == {wanted}
    more = [*messages, {"role": "assistant", "content": "red"}, *user("and?")]
    status, body = send(seeing, CHAT, {"messages": more, **GREEDY})
    answer = json.loads(body)["choices"][0]["message"]["content"]
    assert answer == plain(folder, "and?", red, after=(f"<image>{long}", "red"))


def test_words_that_stand_for_pictures_cost_no_one_else_an_answer(tmp_path):
    red, model = picture(), tiny_vision.save_gemma3(tmp_path / "model")
    settings = ServeSettings(logs=tmp_path / "logs", name="sees", max_answer_tokens=64)
    running = Running(model, settings, context=None, ram_gib=None, pictures=True)
    try:
        engine, said = running.service.opened.engine, queue.SimpleQueue[Answer]()
        soft = running.service.prompts.tokenizer.convert_tokens_to_ids("<soft>")
        # as if the text had passed: five places, and a picture has four
        seen = {"pixel_values": torch.zeros(1, 3, 28, 28), "token_type_ids": torch.ones(1, 5, dtype=torch.long)}
        for number in range(4):
            status, reply = send(running, CHAT, {"messages": user(part(red), "a <soft>")})
            assert status == 400 and b"stands for a picture" in reply, reply
            engine.submit(Request(f"bad-{number}", (soft,) * 5, Sampling(max_tokens=4), seen=seen), None, said.put)
            answer = said.get(timeout=60)
            assert answer.finish == "error" and "this model cannot answer the request (" in answer.error
        assert running.service.thread.is_well
        status, body = send(running, CHAT, {"messages": user(part(red), "hello"), **GREEDY})
        assert status == 200, body
        assert json.loads(body)["choices"][0]["message"]["content"] == plain(model, "<image>hello", red)
    finally:
        running.stop()


def test_scores_of_prompts_are_refused_in_words(seeing):
    asked = {"prompt": "hello", "max_tokens": 4}
    for path, body in (
        (CHAT, {"messages": user(part(picture()), "hello"), "prompt_logprobs": 1}),
        ("/v1/completions", asked | {"prompt_logprobs": 1}),
        ("/v1/completions", asked | {"echo": True, "logprobs": 1}),
        ("/v1/embeddings", {"input": "hello"}),
    ):
        status, reply = send(seeing, path, body)
        error = json.loads(reply)["error"]
        assert (status, error["code"]) == (400, None) and "models of text" in error["message"], reply


def test_pictures_of_more_places_than_there_are_run_alone(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("outcore.serve.protocols.chat.PLACE_BYTES", 1000)
    running = Running(folder, ServeSettings(logs=tmp_path, max_queue=2), context=None, ram_gib=None)
    try:
        status, body = send(running, CHAT, {"messages": user(part(picture()), "hello"), **GREEDY})
        assert status == 200, body
    finally:
        running.stop()


def test_messages_with_pictures_also_in_a_tools_result(seeing, folder):
    red = picture()
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": url(red).split(",")[1]}}
    asked = {"model": "sees", "messages": user(block, "hello"), **GREEDY}
    status, body = send(seeing, MESSAGES, asked)
    assert status == 200, body
    assert "".join(b["text"] for b in json.loads(body)["content"]) == plain(folder, "<image>hello", red)
    tokens = json.loads(
        send(seeing, f"{MESSAGES}/count_tokens", {"model": "sees", "messages": user(block, "hello")})[1]
    )
    assert tokens["input_tokens"] == json.loads(body)["usage"]["input_tokens"]
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "seen"}, block]}
    calls = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    status, more = send(seeing, f"{MESSAGES}/count_tokens", {"model": "sees", "messages": calls})
    assert status == 200, more
    calls[2] = {"role": "user", "content": [result | {"content": "seen"}]}
    none = json.loads(send(seeing, f"{MESSAGES}/count_tokens", {"model": "sees", "messages": calls})[1])
    assert json.loads(more)["input_tokens"] >= none["input_tokens"] + tiny_vision.TOKENS


def test_sampling_forms_and_text_alone_are_the_engines_own(seeing):
    asked = {"messages": user(part(picture()), "hello"), "max_tokens": 8, "seed": 3, "temperature": 1}
    one, two = (json.loads(send(seeing, CHAT, asked)[1]) for _ in range(2))
    assert one["choices"] == two["choices"]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["red", "blue"]}}}
    status, body = send(seeing, CHAT, asked | {"max_tokens": 40, "response_format": form, "logprobs": True, "n": 2})
    assert status == 200, body
    for choice in json.loads(body)["choices"]:
        assert json.loads(choice["message"]["content"]) in ("red", "blue") and choice["logprobs"]["content"]
    assert send(seeing, CHAT, {"messages": user("an <image> of HTML"), "max_tokens": 4})[0] == 200
    assert send(seeing, "/v1/completions", {"prompt": "hello", "max_tokens": 4})[0] == 200
    assert send(seeing, "/v1/embeddings", {"input": "hello"})[0] == 400


def test_several_clients_are_answered_one_after_another_and_may_cancel(seeing):
    asked = {"messages": user(part(picture()), "hello"), "max_tokens": 8, "seed": 1}
    wanted = json.loads(send(seeing, CHAT, asked)[1])["choices"]
    found = list[object]()
    with held(seeing.service.opened.engine):
        clients = [
            threading.Thread(target=lambda: found.append(json.loads(send(seeing, CHAT, asked)[1])["choices"]))
            for _ in range(6)
        ]
        for client in clients:
            client.start()
        assert "ok" in get(seeing, "/health")  # the loop is free
    for client in clients:
        client.join(120)
    assert found == [wanted] * 6
    until(lambda: not seeing.service.num_under_way)  # a place is given back when its answer has been sent


def bomb() -> bytes:
    """A PNG that says it has 30,000 x 30,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(10**6))) + chunk(b"IEND", b"")
    )


def large() -> bytes:
    """A PNG of 81 million pixels in 80 kB."""
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    return file.getvalue()


WHOLE = picture()
BAD = [
    ({"url": url(WHOLE[: len(WHOLE) // 2])}, "damaged or cut off"),
    ({"url": url(b"")}, "empty"),
    ({"url": url(b"GIF89a")}, "not a picture"),
    ({"url": url(b"<svg xmlns='http://www.w3.org/2000/svg'/>")}, "not a picture"),
    ({"url": url(b"%!PS-Adobe-3.0 EPSF-3.0\n")}, "not a picture"),
    ({"url": url(b"%PDF-1.7\n")}, "not a picture"),
    ({"url": url(bomb())}, "pixels"),
    ({"url": url(large())}, "pixels"),
    ({"url": url(picture(size=(4000, 2)))}, "times the other"),
    ({"url": "data:image/png;base64,@@@"}, "not base64"),
    ({"url": "data:image/png,red"}, "should be data:"),
    ({"url": "/etc/passwd"}, "a path is not opened"),
    ({"url": "file:///etc/passwd"}, "a path is not opened"),
    ({"path": "/etc/passwd"}, "a path is not opened"),
    ({"url": "http://169.254.169.254/latest/meta-data"}, "not fetched"),
    ({"url": "https://localhost:8000/a.png"}, "not fetched"),
    ({"url": "ftp://example.org/a.png"}, "not fetched"),
    ({"url": {"url": {"url": "x"}}}, "without"),
    ({"url": 7}, "found int"),
    ({}, "without a picture"),
    (None, "without a picture"),
]


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_bad_pictures_are_refused_in_each_protocols_words(path, seeing):
    for value, words in BAD:
        if path == CHAT:
            body = {"messages": user({"type": "image_url", "image_url": value}, "hello")}
        elif path == RESPONSES:
            body = {"input": user({"type": "input_image", "image_url": value}, "hello")}
        else:
            given = value.get("url") if isinstance(value, dict) else None
            if not isinstance(given, str):
                continue
            source = {"type": "base64", "media_type": "image/png", "data": given.partition(",")[2]}
            source = source if given.startswith("data:image/png;base64") else {"type": "url", "url": given}
            body = {"messages": user({"type": "image", "source": source}, "hello"), "max_tokens": 4}
            words = "without" if not given.partition(",")[2] and given.startswith("data:") else words
        status, reply = send(seeing, path, body)
        error = json.loads(reply)["error"]
        assert status == 400 and words in error["message"], (value, status, error)
        assert error["type"] == "invalid_request_error"
    assert seeing.service.thread.is_well
    until(lambda: not seeing.service.num_under_way)


def test_clients_are_told_that_it_sees(seeing, server):
    modalities = [json.loads(get(of, "/v1/models"))["models"][0]["input_modalities"] for of in (seeing, server)]
    assert modalities == [["text", "image"], ["text"]]


def test_counts_of_pictures_and_places_are_held(seeing):
    many = user(*[part(picture())] * 65, "hello")
    status, reply = send(seeing, CHAT, {"messages": many})
    assert status == 400 and b"more than 64" in reply
    status, reply = send(seeing, CHAT, {"messages": user("a <picture>", part(picture()))})
    assert status == 400 and b"stands for a picture" in reply
    status, reply = send(seeing, CHAT, {"messages": user(*[part(picture())] * 63)})
    assert status == 400 and b"context" in reply  # of 256 tokens


def test_animated_turned_and_cmyk_pictures_are_read(seeing, folder):
    file = io.BytesIO()
    Image.new("RGB", (20, 20), "red").save(
        file, "GIF", save_all=True, append_images=[Image.new("RGB", (20, 20), "blue")]
    )
    exif = Image.Exif()
    exif[274] = 6
    turned = picture("green", (40, 20), "JPEG", exif=exif)
    for data in (file.getvalue(), picture((0, 255, 255, 0), kind="JPEG", mode="CMYK"), turned):
        status, body = send(seeing, CHAT, {"messages": user("hello", part(data)), **GREEDY})
        assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == plain(
            folder, "hello<image>", data
        )


def test_a_text_model_that_is_given_a_picture_names_itself(server):
    for path, body in (
        (CHAT, {"messages": user(part(picture()), "hello")}),
        (RESPONSES, {"input": user({"type": "input_image", "image_url": url(picture())})}),
        (MESSAGES, {"messages": user({"type": "image", "source": {"data": "aaaa"}}), "max_tokens": 4}),
    ):
        status, reply = send(server, path, body)
        assert status == 400 and b"the model 'tiny' reads text only" in reply, reply

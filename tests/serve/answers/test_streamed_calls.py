"""Calls of tools in server-sent events, by a service made up here."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from outcore.infer import Answer, Piece
from outcore.infer.chats import AnswerParser, CallStyle, Reads

pytest.importorskip("fastapi")
from outcore.serve.protocols.chat import ChatCall, events


def test_calls_are_numbered_through_each_answer():
    """By its number a client knows which call a piece goes on with."""

    async def pieces(request, endpoint):
        for choice in (0, 0, 1):
            yield Piece("r", choice, '<tool_call>{"name": "f", "arguments": {}}</tool_call>', ())
        for choice in (0, 1):
            yield Answer("r", choice, "", (), "stop")

    call: Any = SimpleNamespace(
        service=SimpleNamespace(frame=lambda *_: {}, prompts=SimpleNamespace(tokenizer=None), stream=pieces),
        request=SimpleNamespace(n=2, name="r"), usage="never", name_of=str,
        chat=SimpleNamespace(parser=lambda name: AnswerParser(name, Reads(style=CallStyle()))),
    )  # fmt: skip
    call.told = lambda endpoint: ChatCall.told(call, endpoint)

    async def told():
        return [json.loads(event["data"])["choices"][0] async for event in events(call) if event["data"][0] == "{"]

    found = [(one["index"], call) for one in asyncio.run(told()) for call in one["delta"].get("tool_calls", ())]
    assert [(choice, call["index"]) for choice, call in found if "id" in call] == [(0, 0), (0, 1), (1, 0)]
    assert [(choice, call["index"]) for choice, call in found if "id" not in call] == [(0, 0), (0, 1), (1, 0)]

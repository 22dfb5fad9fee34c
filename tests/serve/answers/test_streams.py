"""The engine's thread beside a loop that is slower than it: text comes in fewer pieces, and whole."""

import asyncio
import time

from outcore.infer import Answer, Request, Sampling
from outcore.serve.service import Streams
from tests.infer.models import TinyEngine

TOKENS = 120


def test_a_loop_that_falls_behind_gets_longer_pieces():
    tiny = TinyEngine("llama")
    thread = Streams(tiny.engine)
    requests = [Request(f"r{i}", (5, 6, 7 + i), Sampling(temperature=0, max_tokens=TOKENS)) for i in range(3)]

    async def read(request):
        pieces, first = [], True
        async for item in thread.stream(request):
            if isinstance(item, Answer):
                return pieces, item
            pieces.append(item)
            if first:
                time.sleep(0.3)  # the whole loop is busy
            first = False
        raise AssertionError("no end")

    async def all_of_them():
        return await asyncio.gather(*map(read, requests))

    thread.start()
    try:
        for pieces, answer in asyncio.run(all_of_them()):
            assert answer.finish == "length" and len(answer.tokens) == TOKENS
            assert "".join(piece.text for piece in pieces) == answer.text
            assert [token for piece in pieces for token in piece.tokens] == list(answer.tokens)
            assert len(pieces) < TOKENS / 2
    finally:
        assert thread.stop()
        tiny.close()

"""The engine on a thread of its own, for callers that wait without blocking: pieces of answers, scores, failures."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from outcore.infer import Answer, InferenceEngine, Piece, Request
from outcore.infer.passes import TokenScore

logger = logging.getLogger(__name__)
MAX_FAILURES = 3
"""Passes that fail in a row after which the server says that it is not well."""
IDLE_S = 0.5


class EngineThread:
    """Owns an engine from `start` to `stop`."""

    def __init__(
        self,
        engine: InferenceEngine,
        on_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self.engine, self._on_failure = engine, on_failure
        self.failures = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def is_well(self) -> bool:
        return self._thread.is_alive() and self.failures < MAX_FAILURES

    def start(self) -> None:
        """Begin to run passes."""
        self._thread.start()

    def stop(self, timeout_s: float = 60.0) -> None:
        """End after the pass under way; answers that are not finished are cancelled."""
        self._stopping.set()
        self.engine.call_soon(lambda: None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.engine.wait_for_work(IDLE_S)
            try:
                while not self._stopping.is_set() and self.engine.step():
                    self.failures = 0
            except Exception as error:
                self.failures += 1
                self._on_failure(error)
                logger.exception("a pass failed; its answers ended with an error")
        self.engine.cancel_all()
        self.engine.step()

    async def stream(self, request: Request) -> AsyncGenerator[Piece | Answer, None]:
        """Pieces as they come, and each answer when it has ended. Leaving the loop cancels what is left. ValueError for
        a request that could never be answered."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Piece | Answer] = asyncio.Queue()

        def put(item: Piece | Answer) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        self.engine.submit(request, put, put)
        left = request.n
        try:
            while left:
                item = await queue.get()
                left -= isinstance(item, Answer)
                yield item
        finally:
            if left:
                self.engine.cancel(request.name)

    async def score(self, texts: Sequence[Sequence[int]], num_top: int) -> list[list[TokenScore]]:
        """Scores of texts; see `InferenceEngine.submit_texts`."""
        return await _told(lambda told: self.engine.submit_texts(texts, num_top, told))

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[Any]:
        """Vectors of texts; see `InferenceEngine.submit_embeddings`."""
        return await _told(lambda told: self.engine.submit_embeddings(texts, told))


async def _told(ask: Callable[[Callable[[Any], None]], None]) -> Any:
    """What the engine's thread tells the callback that `ask` hands on."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def told(found: Any) -> None:
        def settle() -> None:
            if future.cancelled():
                return
            if isinstance(found, Exception):
                future.set_exception(found)
            else:
                future.set_result(found)

        loop.call_soon_threadsafe(settle)

    ask(told)
    return await future

"""Services that routes ask: one opened model, its engine's thread, limits, metrics, records.

The engine runs on a thread of its own, for callers that wait without blocking: pieces of answers, scores, failures.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any

from outcore.apart import Bench
from outcore.apart.pictures import PictureBench
from outcore.common.diagnostics import DiagnosticLog
from outcore.common.quantities import counted
from outcore.infer import Answer, EngineThread, InferenceEngine, Piece, Request, Sampling
from outcore.infer.chats import Chat, request_of
from outcore.infer.opening import OpenedModel
from outcore.infer.passes import TextScores
from outcore.infer.requests import Grammars, Prompts, own_defaults, sampling_of
from outcore.serve.errors import STOPS, ApiError, bad, stops
from outcore.serve.kept import KeptResponses
from outcore.serve.reading import Reading
from outcore.serve.settings import ServeSettings
from outcore.serve.under_way import Places, UnderWay
from outcore.serve.watch import Records, ServeMetrics, header_of

logger = logging.getLogger(__name__)
READ_TOKENS = 1 << 19
"""Texts up to so many tokens are read whole, also where the context is shorter."""


class Inbox:
    """Items for the one task that waits for them, on its loop: a queue of asyncio's takes several times as long."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.items: deque[Piece | Answer] = deque()
        self._loop, self._waiter = loop, None

    def put(self, item: Piece | Answer) -> None:
        """Add an item; on the loop's thread."""
        self.items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def filled(self) -> None:
        """Wait until there is an item."""
        while not self.items:
            self._waiter = self._loop.create_future()
            await self._waiter


class Streams(EngineThread):
    """An engine on its thread, for callers of an event loop: pieces of answers, scores, vectors."""

    def __init__(self, engine: InferenceEngine, on_failure: Callable[[Exception], None] = lambda error: None) -> None:
        super().__init__(engine, on_failure)
        self._ends: set[Callable[[], None]] = set()
        self._is_ending = False
        self._told: list[tuple[asyncio.AbstractEventLoop, Inbox, Piece | Answer]] = []
        """Pieces and answers not yet handed over, with loop and inbox of each; the engine's thread alone touches it."""
        self._busy: set[asyncio.AbstractEventLoop] = set()
        """Loops that have not passed on what they were handed last."""

    def hand_over(self, waits: bool) -> None:
        """Give loops what was said: at most once a pass, because each waking costs both threads. Where it may wait, a
        loop that has not passed on the last gets this with the next, in fewer and longer pieces."""
        told, self._told = self._told, []
        for loop, of_loop in itertools.groupby(told, key=lambda each: each[0]):
            if waits and loop in self._busy:
                self._told += of_loop
            elif not loop.is_closed():
                self._busy.add(loop)
                loop.call_soon_threadsafe(self._put_all, loop, [(inbox, item) for _, inbox, item in of_loop])

    def _put_all(self, loop: asyncio.AbstractEventLoop, items: Sequence[tuple[Inbox, Piece | Answer]]) -> None:
        for inbox, item in items:
            inbox.put(item)
        loop.call_soon(self._busy.discard, loop)  # behind those who wait for the items

    async def stream(
        self, request: Request, ended: Callable[[Answer], None] = lambda answer: None
    ) -> AsyncGenerator[Piece | Answer, None]:
        """Pieces as they come, and each answer when it has ended. Leaving the loop cancels what is left. `ended` hears
        of each answer, those too, on the engine's thread. ValueError for a request that could never be answered."""
        loop = asyncio.get_running_loop()
        inbox = Inbox(loop)

        def put(item: Piece | Answer) -> None:
            if isinstance(item, Answer):
                ended(item)
            self._told.append((loop, inbox, item))

        def end() -> None:
            inbox.put(Answer(request.name, 0, "", (), "error", error=STOPS))

        self.engine.submit(request, put, put)
        left = request.n
        self._ends.add(end)
        if self._is_ending:  # its place was taken before
            end()
        items = inbox.items
        try:
            while left:
                if not items:
                    await inbox.filled()
                item = items.popleft()
                # the client, or the loop, is slower than the passes
                while isinstance(item, Piece) and items:
                    after = items[0]
                    if isinstance(after, Answer) or after.choice != item.choice:
                        break
                    item = item.then(after)
                    items.popleft()
                left -= isinstance(item, Answer)
                yield item
        finally:
            self._ends.discard(end)
            if left:
                self.engine.cancel(request.name)

    def end_streams(self) -> None:
        """Have every stream, and each that begins yet, end at once with an answer that says why, whatever the pass
        under way takes."""
        self._is_ending = True
        for end in self._ends:
            end()

    async def settled(self) -> None:
        """Wait until the pass under way has ended, and is counted where it failed."""
        await _told(lambda told, is_wanted: self.engine.call_soon(lambda: told(None)))

    async def score(self, texts: Sequence[Sequence[int]], num_top: int) -> list[TextScores]:
        """Scores of texts; see `InferenceEngine.submit_texts`."""
        return await _told(partial(self.engine.submit_texts, texts, num_top))

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[Any]:
        """Vectors of texts; see `InferenceEngine.submit_embeddings`."""
        return await _told(partial(self.engine.submit_embeddings, texts))

    async def label(self, texts: Sequence[Sequence[int]]) -> list[Any]:
        """Scores of the labels of texts; see `InferenceEngine.submit_labels`."""
        return await _told(partial(self.engine.submit_labels, texts))


async def _told(ask: Callable[[Callable[[Any], None], Callable[[], bool]], None]) -> Any:
    """Wait for the result that the engine's thread gives to the first callback handed to `ask`; the second tells that
    thread whether anybody waits."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    gone = threading.Event()

    def told(found: Any) -> None:
        def settle() -> None:
            if future.cancelled():
                return
            if isinstance(found, Exception):
                future.set_exception(found)
            else:
                future.set_result(found)

        loop.call_soon_threadsafe(settle)

    ask(told, lambda: not gone.is_set())
    try:
        return await future
    finally:
        gone.set()


class Service:
    """Engine behind a server, under one name. `start` before the first request, `close` after the last. `first`: of the
    same server, whose requests are listed together and whose conversations go on with any of its models."""

    def __init__(self, opened: OpenedModel, settings: ServeSettings, first: Service | None = None) -> None:
        self.opened, self.settings = opened, settings
        self.name, self.adapter = settings.name or opened.found.words, 0
        tokenizer, ends = opened.found.tokenizer, opened.engine.speech.end_tokens
        bench, pictures = (sorted(ends), max(self.max_context, READ_TOKENS)), opened.found.pictures
        self.reading = Reading(Bench(tokenizer, *bench) if pictures is None else PictureBench(pictures, *bench))
        self.prompts = Prompts(tokenizer, self.reading.ask)
        self.grammars = Grammars(tokenizer, ends, self.reading.ask)
        self.defaults = own_defaults(opened.found.loaded.model, Sampling())
        self.metrics = ServeMetrics(opened)
        self.records = Records(settings.logs, header_of(opened, self.name), with_text=settings.record_text)
        self.events = DiagnosticLog(settings.logs.parent / "diagnostics")
        self.thread = Streams(opened.engine, self._failed)
        self.writer = ThreadPoolExecutor(1, "writer")
        """Writes large answers, one at a time."""
        self.started_s = int(time.time())
        self._numbers = itertools.count(1)
        self._stamp = f"{time.time_ns():x}"
        self._places, self.under_way = Places(), UnderWay() if first is None else first.under_way
        self.responses = KeptResponses() if first is None else first.responses

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together."""
        return self.opened.engine.max_tokens

    @property
    def num_under_way(self) -> int:
        """Places that are taken, under all names of the engine."""
        return self._places.taken

    @property
    def is_stopping(self) -> bool:
        """Whether it takes no more requests."""
        return self._places.is_closed

    def start(self) -> None:
        """Begin to run passes."""
        self.events.note(
            "serve started", model=self.name, placement=self.opened.placement.lines(), device=str(self.opened.device)
        )
        self.reading.start()
        self.thread.start()

    def end_answers(self) -> None:
        """Take no more requests, and tell clients that wait for answers that the server stops."""
        self._places.is_closed = True
        self.thread.end_streams()

    def close(self) -> None:
        """Cancel what is left, let the model go."""
        self.reading.close()
        self.writer.shutdown(wait=False, cancel_futures=True)
        has_ended = self.thread.stop()
        self.events.note("serve ended", **self.metrics.against_plan.facts())
        self.records.close()
        if has_ended:
            self.opened.close()
        else:  # the pass reads what closing would let go
            logger.error("a pass is still under way: the model's memory stays until the process has ended")

    def _failed(self, error: Exception) -> None:
        counts = self.opened.engine.counts
        logger.exception("a pass failed; its answers ended with an error")
        self.events.note("pass failed", error=f"{type(error).__name__}: {error}", passes_before=counts.passes)

    def new_name(self, prefix: str) -> str:
        """A name that no other request has had."""
        return f"{prefix}-{self._stamp}-{next(self._numbers)}"

    def frame(self, name: str, kind: str) -> dict[str, Any]:
        """Make the first fields of the answer of this id, in OpenAI's shape."""
        return {
            "id": name,
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
            "system_fingerprint": self.records.model_hash or None,
        }

    def check_model(self, body: Mapping[str, Any]) -> None:
        """404 for another model's name."""
        wanted = body.get("model")
        if wanted is not None and wanted != self.name:
            raise ApiError(
                404, f"The model {wanted!r} is not here; this server has {self.name!r}.", param="model",
                code="model_not_found",
            )  # fmt: skip

    def check_whole(self) -> None:
        """ApiError for what only the model itself gives."""
        if self.adapter:
            raise bad(
                "Scores and vectors are of the model, not of an adapter beside it: ask the model by its name.", "model"
            )
        try:
            self.opened.engine.check_texts(())
        except ValueError as error:
            raise bad(str(error), "model") from error

    def defaults_for(self, prompt_tokens: int) -> Sampling:
        """Choose the sampling of a prompt of so many tokens, where the request does not say."""
        longest = sampling_of({"max_tokens": self.settings.max_answer_tokens}, self.defaults)
        return longest.fitting(prompt_tokens, self.max_context)

    def request_of(
        self, body: Mapping[str, Any], ids: tuple[int, ...], name: str, chat: Chat | None = None, priority: int = 0
    ) -> Request:
        """A request for answers to these tokens, or to a chat. ApiError for what cannot be."""
        room = self.max_context - len(ids)
        if room < 1:
            raise bad(
                f"The prompt has {counted(len(ids), 'token')}, and the context is {self.max_context}. Shorten it.",
                "messages" if "messages" in body else "prompt",
                "context_length_exceeded",
            )
        try:
            sampling = sampling_of(body, self.defaults_for(len(ids)))
            chosen, deadline_s = self.grammars, self.settings.request_timeout_s
            request = request_of(body, name, ids, sampling, chosen, chat, deadline_s, priority)
            request = replace(request, adapter=self.adapter)
            self.check_length(request)
            self.opened.engine.check(request)
        except ValueError as error:
            code = "context_length_exceeded" if "together more" in str(error) else None
            field = str(error).split(" ", 1)[0].removesuffix(":")  # that the message begins with
            raise bad(str(error), field if field in body else None, code) from error
        return request

    def check_length(self, request: Request) -> None:
        """ApiError for an answer that may become longer than the server gives."""
        asked, most = request.sampling, self.settings.max_answer_tokens
        if asked.max_tokens > most:
            words = f"{asked.length_name} is {asked.max_tokens}, but this server gives at most {most}."
            raise bad(words, asked.length_name)

    def take_place(self, count: int = 1) -> None:
        """429 when too many requests are under way; 503 when none is taken."""
        if self.is_stopping:
            raise stops()
        if left_s := self.thread.refused_for_s:
            words = "The engine has failed; see the server's log."
            raise ApiError(503, words, code="engine_failed", retry_s=math.ceil(left_s) if left_s < math.inf else None)
        if count > self.settings.max_queue:
            words = f"{count} prompts are more than this server takes at a time, which is {self.settings.max_queue}."
            raise bad(f"{words} Send fewer together.", "prompt")
        if self.num_under_way + count > self.settings.max_queue:
            raise ApiError(
                429, f"{self.num_under_way} requests are under way and {count} more came; this server takes "
                f"{self.settings.max_queue}. Try again later.",
                code="queue_full", retry_s=self.retry_s(),
            )  # fmt: skip
        self._places.taken += count

    def leave_place(self, count: int = 1) -> None:
        """Give places back."""
        self._places.taken -= count

    def retry_s(self) -> int:
        """Seconds after which some request should have ended."""
        last = self.opened.engine.counts.last_pass_s or 0.1
        return max(1, min(60, math.ceil(20 * last)))

    async def stream(
        self, request: Request, endpoint: str, shown: str | None = None
    ) -> AsyncGenerator[Piece | Answer, None]:
        """Pieces and answers of a request whose place is taken; noted in metrics and records, also those of clients
        that went away, and listed under the id that is shown."""

        def ended(answer: Answer) -> None:
            self.metrics.answered(answer, len(request.prompt))
            self.records.add(request, answer, endpoint)

        with self.under_way.listed(request, endpoint, shown, self.opened.engine.cancel) as told:
            async with aclosing(self.thread.stream(request, ended)) as items:
                async for item in items:
                    told.hear(item)
                    yield item

    async def answers(self, request: Request, endpoint: str, shown: str | None = None) -> list[Answer]:
        """All answers, in the order of choices. ApiError when one failed."""
        async with aclosing(self.stream(request, endpoint, shown)) as items:
            found = [item async for item in items if isinstance(item, Answer)]
        if failure := next(filter(None, map(failure_of, found)), None):
            raise failure
        return sorted(found, key=lambda answer: answer.choice)


def reason_of(answer: Answer) -> str:
    """Why it ended, in a word that OpenAI's clients know."""
    return answer.finish if answer.finish in ("stop", "length") else "stop"


def failure_of(answer: Answer) -> ApiError | None:
    """Make the ApiError of an answer that failed, or was cancelled by its id; None for any other."""
    why = answer.error
    if answer.finish == "cancelled":
        return ApiError(409, "The request was cancelled.", code="cancelled")
    if answer.finish != "error":
        return None
    if why.startswith("not finished within"):
        return ApiError(408, f"The answer was {why}.", code="timeout")
    if why == STOPS:
        return stops()
    return ApiError(500, f"The answer failed: {why}", code="engine_error")

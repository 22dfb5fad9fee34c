"""What routes stand on: one opened model, its engine's thread, limits, metrics, records.

The engine on a thread of its own, for callers that wait without blocking: pieces of answers, scores, failures.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from outcore.apart import Bench
from outcore.common.diagnostics import DiagnosticLog
from outcore.common.quantities import counted
from outcore.infer import Answer, InferenceEngine, Piece, Request, Sampling
from outcore.infer.chats import Chat
from outcore.infer.opening import OpenedModel
from outcore.infer.passes import TextScores
from outcore.infer.requests import Grammars, Prompts, own_defaults, sampling_of
from outcore.serve.errors import STOPS, ApiError, bad, stops
from outcore.serve.reading import Reading
from outcore.serve.settings import ServeSettings
from outcore.serve.under_way import UnderWay
from outcore.serve.watch import Records, ServeMetrics, header_of

logger = logging.getLogger(__name__)
MAX_FAILURES = 3
"""Passes that fail in a row after which the server says that it is not well."""
TRIED_AGAIN_S = 30.0
"""A server that is not well takes requests again so long after its last failure; a pass that succeeds makes it well."""
READ_TOKENS = 1 << 19
"""Texts up to so many tokens are read whole, also where the context is shorter."""
IDLE_S = 0.5


class EngineThread:
    """Owns an engine from `start` to `stop`."""

    def __init__(self, engine: InferenceEngine, on_failure: Callable[[Exception], None] = lambda error: None) -> None:
        self.engine, self._on_failure = engine, on_failure
        self.failures, self.failed_at_s = 0, -math.inf
        self._stopping = threading.Event()
        self._ends: set[Callable[[], None]] = set()
        self._is_ending = False
        self._told: list[tuple[asyncio.AbstractEventLoop, asyncio.Queue[Piece | Answer], Piece | Answer]] = []
        """What the pass under way said, and to whom; the engine's thread alone touches it."""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def is_well(self) -> bool:
        return self._thread.is_alive() and self.failures < MAX_FAILURES

    @property
    def refused_for_s(self) -> float:
        """How long requests are refused yet; 0 while they are taken."""
        if not self._thread.is_alive():
            return math.inf
        return 0.0 if self.is_well else max(0.0, self.failed_at_s + TRIED_AGAIN_S - time.monotonic())

    def start(self) -> None:
        """Begin to run passes."""
        self._thread.start()

    def stop(self, timeout_s: float = 60.0) -> bool:
        """End after the pass under way; answers that are not finished are cancelled. False when it takes longer."""
        self._stopping.set()
        self.engine.call_soon(lambda: None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.engine.wait_for_work(IDLE_S)
            try:
                while not self._stopping.is_set():
                    passes = self.engine.counts.passes
                    did = self.engine.step()
                    self._hand_over()
                    if not did:
                        break
                    if self.engine.counts.passes > passes:  # and no note only was done
                        self.failures = 0
            except Exception as error:
                self._hand_over()
                self.failures, self.failed_at_s = self.failures + 1, time.monotonic()
                self._on_failure(error)
                logger.exception("a pass failed; its answers ended with an error")
        self.engine.cancel_all()
        self.engine.step()
        self._hand_over()

    def _hand_over(self) -> None:
        """Wake the loops that wait for what a pass said: once a pass, because each waking costs both threads."""
        told, self._told = self._told, []
        for loop, of_loop in itertools.groupby(told, key=lambda each: each[0]):
            items = [(queue, item) for _, queue, item in of_loop]
            loop.call_soon_threadsafe(_put_all, items)

    async def stream(
        self, request: Request, ended: Callable[[Answer], None] = lambda answer: None
    ) -> AsyncGenerator[Piece | Answer, None]:
        """Pieces as they come, and each answer when it has ended. Leaving the loop cancels what is left. `ended` hears
        of each answer, those too, on the engine's thread. ValueError for a request that could never be answered."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[Piece | Answer] = asyncio.Queue()

        def put(item: Piece | Answer) -> None:
            if isinstance(item, Answer):
                ended(item)
            self._told.append((loop, queue, item))

        def end() -> None:
            queue.put_nowait(Answer(request.name, 0, "", (), "error", error=STOPS))

        self.engine.submit(request, put, put)
        left = request.n
        self._ends.add(end)
        if self._is_ending:  # its place was taken before
            end()
        held: Piece | Answer | None = None
        try:
            while left:
                item, held = held or await queue.get(), None
                while isinstance(item, Piece) and not queue.empty():  # the client is slower than the passes
                    held = queue.get_nowait()
                    if isinstance(held, Answer) or held.choice != item.choice:
                        break
                    item, held = item.then(held), None
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
        await _told(lambda told: self.engine.call_soon(lambda: told(None)))

    async def score(self, texts: Sequence[Sequence[int]], num_top: int) -> list[TextScores]:
        """Scores of texts; see `InferenceEngine.submit_texts`."""
        return await _told(lambda told: self.engine.submit_texts(texts, num_top, told))

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[Any]:
        """Vectors of texts; see `InferenceEngine.submit_embeddings`."""
        return await _told(lambda told: self.engine.submit_embeddings(texts, told))


def _put_all(items: Sequence[tuple[asyncio.Queue[Piece | Answer], Piece | Answer]]) -> None:
    for queue, item in items:
        queue.put_nowait(item)


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


class Service:
    """Engine behind a server. `start` before the first request, `close` after the last."""

    def __init__(self, opened: OpenedModel, settings: ServeSettings) -> None:
        self.opened, self.settings = opened, settings
        self.name = settings.name or opened.found.words
        tokenizer, ends = opened.found.tokenizer, opened.engine.speech.end_tokens
        self.reading = Reading(Bench(tokenizer, sorted(ends), max(self.max_context, READ_TOKENS)))
        self.prompts = Prompts(tokenizer, self.reading.ask)
        self.grammars = Grammars(tokenizer, ends, self.reading.ask)
        self.defaults = own_defaults(opened.found.loaded.model, Sampling())
        self.metrics = ServeMetrics(opened)
        self.records = Records(settings.logs, header_of(opened, self.name), with_text=settings.record_text)
        self.events = DiagnosticLog(settings.logs.parent / "diagnostics")
        self.thread = EngineThread(opened.engine, self._failed)
        self.started_s = int(time.time())
        self._numbers = itertools.count(1)
        self._stamp = f"{time.time_ns():x}"
        self.num_under_way, self.under_way = 0, UnderWay()
        self.is_stopping = False

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer together."""
        return self.opened.engine.max_tokens

    def start(self) -> None:
        """Begin to run passes."""
        self.events.note(
            "serve started", model=self.name, placement=self.opened.placement.lines(), device=str(self.opened.device)
        )
        self.reading.start()
        self.thread.start()

    def end_answers(self) -> None:
        """Take no more requests, and tell clients that wait for answers that the server stops."""
        self.is_stopping = True
        self.thread.end_streams()

    def close(self) -> None:
        """Cancel what is left, let the model go."""
        self.reading.close()
        has_ended = self.thread.stop()
        self.events.note("serve ended", **self.metrics.against_plan.facts())
        self.records.close()
        if has_ended:
            self.opened.close()
        else:  # the pass reads what closing would let go
            logger.error("a pass is still under way: the model's memory stays until the process has ended")

    def _failed(self, error: Exception) -> None:
        counts = self.opened.engine.counts
        self.events.note("pass failed", error=f"{type(error).__name__}: {error}", passes_before=counts.passes)

    def new_name(self, prefix: str) -> str:
        """A name that no other request has had."""
        return f"{prefix}-{self._stamp}-{next(self._numbers)}"

    def frame(self, name: str, kind: str) -> dict[str, Any]:
        """What the answer of this id begins with, in OpenAI's shape."""
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

    def defaults_for(self, prompt_tokens: int) -> Sampling:
        """How tokens are chosen for a prompt of so many where the request does not say."""
        longest = sampling_of({"max_tokens": self.settings.max_answer_tokens}, self.defaults)
        return longest.fitting(prompt_tokens, self.max_context)

    def request_of(self, body: Mapping[str, Any], ids: tuple[int, ...], name: str, chat: Chat | None = None) -> Request:
        """A request for answers to these tokens, or to a chat. ApiError for what cannot be."""
        count = body.get("n", 1)
        count = 1 if count is None else count
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 128:
            raise bad(f"n is {count!r}, but must be a whole number from 1 to 128.", "n")
        room = self.max_context - len(ids)
        if room < 1:
            raise bad(
                f"The prompt has {counted(len(ids), 'token')}, and the context is {self.max_context}. Shorten it.",
                "messages" if "messages" in body else "prompt",
                "context_length_exceeded",
            )
        try:
            sampling = sampling_of(body, self.defaults_for(len(ids)))
            form = chat.form if chat else (body.get("response_format"), "response_format")
            grammar = self.grammars.of(*form)
            reads = {"keeps_special": chat.keeps_special, "goes_on": chat.goes_on} if chat else {"goes_on": True}
            request = Request(name, ids, sampling, count, 0, grammar, self.settings.request_timeout_s, **reads)
            self.check_length(request)
            self.opened.engine.check(request)
        except ValueError as error:
            code = "context_length_exceeded" if "together more" in str(error) else None
            raise bad(str(error), _param_of(str(error), body), code) from error
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
        self.num_under_way += count

    def leave_place(self, count: int = 1) -> None:
        """Give places back."""
        self.num_under_way -= count

    def retry_s(self) -> int:
        """Seconds after which some request should have ended."""
        last = self.opened.engine.counts.last_pass_s or 0.1
        return max(1, min(60, math.ceil(20 * last)))

    def cancel(self, name: str) -> dict[str, Any]:
        """End the request of this id within a pass; 404 when none is under way."""
        found = self.under_way.get(name)
        for part in self.under_way.names(name):
            self.opened.engine.cancel(part)
        return found | {"status": "cancelling"}

    async def stream(
        self, request: Request, endpoint: str, shown: str | None = None
    ) -> AsyncGenerator[Piece | Answer, None]:
        """Pieces and answers of a request whose place is taken; noted in metrics and records, also those of clients
        that went away, and listed under the id that is shown."""

        def ended(answer: Answer) -> None:
            self.metrics.answered(answer, len(request.prompt))
            self.records.add(request, answer, endpoint)

        with self.under_way.listed(request, endpoint, shown) as told:
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
    """What a client is told of an answer that failed, or was cancelled by its id."""
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


def _param_of(message: str, body: Mapping[str, Any]) -> str | None:
    """The field that a message begins with."""
    word = message.split(" ", 1)[0].removesuffix(":")
    return word if word in body else None

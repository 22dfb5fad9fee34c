"""The engine as what answers: owned here and stepped by who asks, or a server's, that steps by itself."""

from __future__ import annotations

import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from outcore.evaluate.asking.question import ScoreQuestion, WriteQuestion
from outcore.evaluate.settings import EvaluationError
from outcore.infer import Answer, InferenceEngine, Request, Sampling
from outcore.infer.opening import OpenedModel
from outcore.infer.requests import sampling_of

AHEAD = 3
"""Most requests that run at a time, as a multiple of the answers that the engine writes at once."""
LOOK_EVERY_S = 0.2
"""Seconds between two looks at whether the job was cancelled and the server's engine still works."""


class EngineAnswerer:
    """Answers by an inference engine of this process. `is_well`: None when the engine is stepped here; else whether
    a server's still runs, of whose places at most half are taken."""

    def __init__(self, opened: OpenedModel, is_well: Callable[[], bool] | None = None) -> None:
        self.opened, self._is_well = opened, is_well
        self.engine: InferenceEngine = opened.engine
        places = opened.placement.max_sequences
        self._most = AHEAD * places if is_well is None else max(1, places // 2)

    @property
    def max_length(self) -> int:
        """Tokens of context and continuation together, less the last one, which is only told."""
        limits = [self.engine.speech.max_context, self.opened.placement.context_tokens]
        return min(limit for limit in limits if limit is not None) - 1

    def score(self, questions: Sequence[ScoreQuestion], check: Callable[[], None]) -> list[list[Any]]:
        texts = [self._text_of(question) for question in questions]
        told: list[Any] = []
        self._until_told(told, lambda tell: self.engine.submit_texts(texts, 1, tell), check)
        if isinstance(told[0], Exception):
            raise told[0]
        answers = []
        for question, scores in zip(questions, told[0], strict=True):
            of_continuation = scores[-len(question.continuation) :]
            logprob = sum(score.logprob for score in of_continuation)
            answers.append([logprob, all(score.is_likeliest for score in of_continuation)])
        return answers

    def write(
        self, questions: Sequence[WriteQuestion], told: Callable[[int, str], None], check: Callable[[], None]
    ) -> None:
        stamp = uuid.uuid4().hex
        requests = [self._request_of(f"{stamp}-{n}", question) for n, question in enumerate(questions)]
        for request in requests:
            self.engine.check(request)
        waiting, under_way = deque(enumerate(requests)), dict[str, int]()
        ended: deque[Answer] = deque()
        arrived = threading.Event()

        def end(answer: Answer) -> None:
            ended.append(answer)
            arrived.set()

        try:
            while waiting or under_way:
                while waiting and len(under_way) < self._most:
                    number, request = waiting.popleft()
                    under_way[request.name] = number
                    self.engine.submit(request, None, end)
                self._wait(arrived, check)
                while ended:
                    answer = ended.popleft()
                    if answer.finish in ("error", "cancelled"):
                        raise RuntimeError(f"an answer failed: {answer.error or 'the server cancelled it'}")
                    told(under_way.pop(answer.request), answer.text)
        except BaseException:
            for name in under_way:
                self.engine.cancel(name)
            raise

    def _until_told(
        self, told: list[Any], ask: Callable[[Callable[[Any], None]], None], check: Callable[[], None]
    ) -> None:
        arrived = threading.Event()

        def tell(found: Any) -> None:
            told.append(found)
            arrived.set()

        ask(tell)
        while not told:
            self._wait(arrived, check)

    def _wait(self, arrived: threading.Event, check: Callable[[], None]) -> None:
        """Run a pass, or wait for one of the server's."""
        check()
        if self._is_well is None:
            self.engine.step()
            return
        if not arrived.wait(LOOK_EVERY_S) and not self._is_well():
            raise RuntimeError("the server's engine has ended or failed; its log says why.")
        arrived.clear()

    def _text_of(self, question: ScoreQuestion) -> list[int]:
        most = self.max_length + 1
        if len(question.continuation) > most - 1:
            raise EvaluationError(
                f"a text to be scored has {len(question.continuation)} tokens, and the context is {most}. Give a "
                "larger --context, or leave this task out.",
                "tasks",
            )
        return [*question.context, *question.continuation][-most:]

    def _request_of(self, name: str, question: WriteQuestion) -> Request:
        sampling = sampling_of(question.sampling, Sampling(temperature=0.0))
        return Request(name, question.prompt, sampling)

"""One answer while it is being written: its tokens, how many of them are computed, its pages, its text so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from outcore.infer.cache import SequencePages
from outcore.infer.requests import (
    Answer,
    Chosen,
    FinishReason,
    Matcher,
    Piece,
    Request,
    Row,
    TextStream,
    Timings,
)
from outcore.infer.schedule.drafts import Drafter


@dataclass
class Clock:
    """Moments of one answer, in seconds of the engine's clock."""

    arrived_s: float
    began_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None

    def since(self, moment_s: float | None) -> float:
        """Seconds from the arrival."""
        return 0.0 if moment_s is None else moment_s - self.arrived_s


@dataclass(eq=False)
class Sequence:
    """Sequence: a request on its way to an answer."""

    request: Request
    choice: int
    seed: int
    text: TextStream
    drafter: Drafter | None
    clock: Clock
    end_tokens: frozenset[int]
    """Tokens that end the answer."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and answer."""
    computed: int = 0
    """Tokens whose keys and values are stored."""
    pages: SequencePages | None = None
    """Pages that it holds; None: it waits."""
    is_brief: bool = False
    """Whether little of its prompt was to be read when it came."""
    chosen: list[Chosen] = field(default_factory=list)
    passes: int = 0
    waited_s: Counter[str] = field(default_factory=Counter)
    most_pages: int = 0
    cached_tokens: int = 0
    read_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    finish: FinishReason | None = None
    stop: str | int | None = None
    error: str = ""
    said: str = ""
    """The text so far, as far as it was asked for."""
    is_told: bool = False
    """Whether its listeners have heard of it."""
    _unread: list[int] = field(default_factory=list)
    _unsaid: str = ""
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens, self.num_prompt = list(self.request.prompt), len(self.request.prompt)
        grammar = self.request.grammar
        self.matcher: Matcher | None = None if grammar is None else grammar.matcher()

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_answer(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def left(self) -> int:
        """Tokens that the answer may still get."""
        return self.request.sampling.max_tokens - self.num_answer

    @property
    def is_writing(self) -> bool:
        """Whether only its last token is to be computed: prompts are through."""
        return self.computed == len(self.tokens) - 1 and self.num_answer > 0

    @property
    def takes_likeliest(self) -> bool:
        """Whether the next token is the likeliest one, and nothing else is asked."""
        sampling = self.request.sampling
        is_bare = sampling.is_greedy and sampling.is_plain and sampling.logprobs is None
        return is_bare and self.matcher is None and self.num_answer >= sampling.min_tokens

    def row(self, place: int | None) -> Row:
        """Make the row that the next token is chosen by. `place`: it stands behind so many guesses of this pass, all
        right; None: it is a guess itself, and forms do not count."""
        sampling = self.request.sampling
        needs_history = not sampling.is_plain
        return Row(
            sampling,
            self.seed,
            len(self.tokens),
            self.request.prompt if needs_history else (),
            self.answer if needs_history else (),
            tuple(self.end_tokens) if self.num_answer < sampling.min_tokens else (),
            None if self.matcher is None or place is None else self.matcher.mask(place),
        )

    def take(self, chosen: Chosen, now_s: float) -> None:
        """Append a token. Sets `finish` when it is the last."""
        sampling = self.request.sampling
        self.tokens.append(chosen.token)
        self.chosen.append(chosen)
        if self.clock.first_token_s is None:
            self.clock.first_token_s = now_s
        if self.matcher is not None and chosen.token not in self.end_tokens:
            self.matcher.take(chosen.token)
        if self.matcher is not None and self.matcher.error:  # no answer of this form goes on so: not an end
            self.finish, self.error = "error", f"response_format: {self.matcher.error}"
        elif chosen.token in self.end_tokens:
            self.finish, self.stop = "stop", chosen.token
        else:
            self._unread.append(chosen.token)
            if sampling.stop:  # the text decides whether the answer goes on
                self._read()
            if self.matcher is not None and self.matcher.is_complete:
                self.finish = "stop"
            elif self.text.is_stopped:
                self.finish, self.stop = "stop", self.text.stop
            elif self.left <= 0:
                self.finish = "length"

    def _read(self) -> None:
        self._unsaid += self.text.add(self._unread, may_stop=self.num_answer >= self.request.sampling.min_tokens)
        self._unread.clear()

    def say(self) -> str:
        """Text that the tokens settled which were taken since the last call; all the rest once it has ended."""
        self._read()
        said, self._unsaid = self._unsaid + (self.text.finish() if self.finish else ""), ""
        self.said += said
        return said

    def passed(self, waited_s: Mapping[str, float]) -> None:
        """A pass with tokens of this sequence has run, in which the device waited so long."""
        self.passes += 1
        if waited_s:
            self.waited_s.update(waited_s)
        if self.pages is not None:
            self.most_pages = max(self.most_pages, self.pages.num_pages)

    def timings(self) -> Timings:
        """Sum up what the answer took."""
        clock = self.clock
        return Timings(
            queued_s=clock.since(clock.began_s),
            first_token_s=clock.since(clock.first_token_s),
            total_s=clock.since(clock.ended_s),
            passes=self.passes,
            waited_s=dict(self.waited_s),
            cached_tokens=self.cached_tokens,
            read_tokens=self.read_tokens,
            pages=self.most_pages,
            drafted=self.drafted,
            accepted=self.accepted,
        )

    def piece(self, text: str, tokens: list[Chosen]) -> Piece:
        """Text and tokens that came just now, with how the answer stands."""
        return Piece(self.request.name, self.choice, text, tuple(tokens), self.finish, self.stop, self.error)

    def ended(self) -> Answer:
        """The answer, which has ended."""
        assert self.finish is not None
        chosen, name = tuple(self.chosen), self.request.name
        return Answer(name, self.choice, self.said, chosen, self.finish, self.stop, self.error, self.timings())

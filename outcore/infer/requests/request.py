"""A request for answers to one prompt, and what comes back: pieces while it runs, a whole answer at its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from outcore.infer.requests.grammar import Grammar
from outcore.infer.requests.sampler import Chosen
from outcore.infer.requests.sampling import Sampling

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Request:
    """One prompt, `n` answers to it."""

    name: str
    """Unique among those that run; also the seed of the generator where the request gives none."""
    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    priority: int = 0
    """Higher ones are admitted first; equal ones in the order of arrival. What those below 0 leave in the prefix cache
    makes room first."""
    grammar: Grammar | None = None
    """Form that answers must have."""
    deadline_s: float | None = None
    """Seconds after which the request is given up, from its arrival."""
    keeps_special: bool = False
    """Whether marks that the tokenizer calls special stay in the text, for who reads the answer's parts by them."""
    goes_on: bool = False
    """Whether the answer's text goes on from the prompt's, as a completion does; a chat's begins anew."""
    adapter: int = 0
    """Number of the adapter that answers, of those that the model was opened with; 0: the base alone."""

    seen: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Tensors that the model reads of pictures, beside their places in the prompt."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", tuple(self.prompt))
        if not self.prompt:
            raise ValueError("the prompt has no tokens. Give a prompt with text.")
        if type(self.n) is not int or not 1 <= self.n <= 128:
            raise ValueError(f"n is {self.n!r}, but must be a whole number from 1 to 128.")


@dataclass(frozen=True)
class Piece:
    """Part of an answer that one pass added."""

    request: str
    choice: int
    text: str
    tokens: tuple[Chosen, ...]
    finish: FinishReason | None = None
    """Why the answer ended; None while it goes on."""
    stop: str | int | None = None
    """The stop text or token that ended it."""
    error: str = ""

    def then(self, later: Piece) -> Piece:
        """This piece and the next one of the same answer, as one."""
        text, tokens = self.text + later.text, self.tokens + later.tokens
        return Piece(self.request, self.choice, text, tokens, later.finish, later.stop, later.error)


@dataclass(frozen=True)
class Timings:
    """Costs of one answer: seconds by phase, waits by what they were for, tokens and pages by where they came from."""

    queued_s: float = 0.0
    """From its arrival until its prompt began."""
    first_token_s: float = 0.0
    """From its arrival to its first token."""
    total_s: float = 0.0
    """From its arrival to its end."""
    passes: int = 0
    waited_s: Mapping[str, float] = field(default_factory=dict)
    """In its passes, which it shares with others, the device waited so long for weights: pcie (the link), nvme."""
    cached_tokens: int = 0
    """Tokens of the prompt that were taken from the prefix cache."""
    read_tokens: int = 0
    """Cached tokens whose keys and values came from the drive."""
    pages: int = 0
    """Pages of keys and values that it held at most."""
    drafted: int = 0
    accepted: int = 0
    """Tokens that speculation proposed, and those of them that were right."""


@dataclass(frozen=True)
class Answer:
    """A whole answer."""

    request: str
    choice: int
    text: str
    tokens: tuple[Chosen, ...]
    finish: FinishReason
    stop: str | int | None = None
    error: str = ""
    timings: Timings = field(default_factory=Timings)


OnPiece = Callable[[Piece], None]

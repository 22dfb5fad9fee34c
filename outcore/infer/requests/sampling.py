"""Settings by which a request's tokens are chosen: one frozen value, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

MAX_STOPS, MAX_TOP_LOGPROBS, MAX_SEED = 16, 20, 2**63 - 1
LEAST_TEMPERATURE = 1e-5
"""Below it logits over the temperature leave fp32's range, and the likeliest token is all that could be drawn."""


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 takes the likeliest token each time; above, tokens are drawn by a generator keyed by (seed,
    position), so the same request gives the same text whatever else runs beside it."""

    temperature: float = 1.0
    """Logits are divided by this; 0 is greedy."""
    top_k: int = 0
    """Draw among so many likeliest tokens; 0: all."""
    top_p: float = 1.0
    """Draw among the fewest likeliest tokens whose probabilities reach this."""
    min_p: float = 0.0
    """Draw among tokens at least this share as likely as the likeliest."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token that the answer holds."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a token for each time the answer holds it."""
    repetition_penalty: float = 1.0
    """Positive logits of tokens in prompt or answer are divided by this, negative ones multiplied."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> added to its logit."""
    max_tokens: int = 256
    """The answer ends after so many tokens."""
    min_tokens: int = 0
    """The answer cannot end before so many; stop texts in them stay."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer; they are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, besides the model's own end."""
    ignore_eos: bool = False
    """Go on after the model's end token."""
    seed: int | None = None
    """Key of the generator; None: the engine's own, by the request's id."""
    logprobs: int | None = None
    """Report each token's log-probability, and those of so many likeliest beside it; None: none."""
    length_name: str = field(default="max_tokens", compare=False, repr=False)
    """Name that the request has for `max_tokens`, for messages about it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "logit_bias", MappingProxyType({int(k): float(v) for k, v in self.logit_bias.items()}))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(int(token) for token in self.stop_token_ids))
        _between("temperature", self.temperature, 0.0, 100.0)
        _whole("top_k", self.top_k, 0)
        _between("top_p", self.top_p, 0.0, 1.0, above=True)
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _between("repetition_penalty", self.repetition_penalty, 0.0, 10.0, above=True)
        _whole(self.length_name, self.max_tokens, 1)
        _whole("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, above {self.length_name} {self.max_tokens}. Lower it.")
        if len(self.stop) > MAX_STOPS or not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop takes up to {MAX_STOPS} texts, none of them empty.")
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        for token, bias in self.logit_bias.items():
            if token < 0 or not -100 <= bias <= 100:
                raise ValueError(f"logit_bias gives token {token} {bias}: ids start at 0, biases lie in [-100, 100].")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE

    @property
    def is_plain(self) -> bool:
        """Whether logits are taken as they are: what was said before changes nothing."""
        return (
            not self.logit_bias
            and self.presence_penalty == 0
            and self.frequency_penalty == 0
            and self.repetition_penalty == 1
        )

    def fitting(self, prompt_tokens: int, context_tokens: int) -> Sampling:
        """Lower `max_tokens` to what the context leaves beside the prompt, to one token at least."""
        room = max(1, context_tokens - prompt_tokens)
        return replace(self, max_tokens=min(self.max_tokens, room), min_tokens=min(self.min_tokens, room))

    def check_vocabulary(self, vocab_size: int) -> None:
        """ValueError for a token id that the model does not have."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise ValueError(f"{name} names token {token}, but the model has tokens 0 to {vocab_size - 1}.")


def _between(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high or (above and value == low):
        raise ValueError(f"{name} is {value!r}, but must lie in {'(' if above else '['}{low:g}, {high:g}].")


def _whole(name: str, value: int, low: int, high: int = 2**31 - 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}, but must be a whole number from {low} to {high}.")

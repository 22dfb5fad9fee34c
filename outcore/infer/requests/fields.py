"""Sampling from the field names that OpenAI's API and its kin use, in files and over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from outcore.infer.requests.sampling import MAX_TOP_LOGPROBS, Sampling

NAMES = frozenset(f.name for f in fields(Sampling)) - {"length_name"}
PLAIN = NAMES - {"stop", "logprobs", "logit_bias", "stop_token_ids"}
RENAMED = {"max_completion_tokens": "max_tokens", "max_output_tokens": "max_tokens"}
KNOWN = NAMES | {*RENAMED, "top_logprobs"}
"""Names that say how tokens are chosen."""


def sampling_of(given: Mapping[str, Any], defaults: Sampling) -> Sampling:
    """`defaults` with what `given` says. ValueError in words for a value that cannot be."""
    changes: dict[str, Any] = {}
    if len(said := [name for name in ("max_tokens", *RENAMED) if given.get(name) is not None]) > 1:
        raise ValueError(f"{said[1]} and {said[0]} mean the same: leave out one.")
    for said_as, value in given.items():
        name = RENAMED.get(said_as, said_as)
        if value is not None and name in PLAIN:
            changes[name] = _number(said_as, value)
    changes["length_name"] = said[0] if said else "max_tokens"
    if (stop := given.get("stop")) is not None:
        changes["stop"] = (stop,) if isinstance(stop, str) else _list_of(str, "stop", stop)
    if (ids := given.get("stop_token_ids")) is not None:
        changes["stop_token_ids"] = _list_of(int, "stop_token_ids", ids)
    if (bias := given.get("logit_bias")) is not None:
        changes["logit_bias"] = _bias(bias)
    changes |= _logprobs(given)
    return replace(defaults, **changes)


def own_defaults(model: Any, defaults: Sampling) -> Sampling:
    """Replace defaults by what the model's generation config recommends. ValueError, naming that file, for what cannot
    be."""
    config = getattr(model, "generation_config", None)
    found = {}
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = max(0, int(value)) if name == "top_k" else float(value)  # some write -1 for all tokens
    if found and getattr(config, "do_sample", None) is not True:  # they are there, but greedy is recommended
        found = {"repetition_penalty": found["repetition_penalty"]} if "repetition_penalty" in found else {}
    try:
        return replace(defaults, **found)
    except ValueError as error:
        raise ValueError(f"generation_config.json of the model: {error} Mend that file.") from error


def _number(name: str, value: Any) -> Any:
    if name == "ignore_eos":
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be true or false.")
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name} must be a number, got {value!r}.")
    return value


def _list_of(kind: type, name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)) or not all(type(item) is kind for item in value):
        raise ValueError(f"{name} must be a list of {'texts' if kind is str else 'token ids'}.")
    return tuple(value)


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError("logit_bias must be an object of token id: number.")
    try:
        return {int(token): float(bias) for token, bias in value.items()}
    except (TypeError, ValueError):
        raise ValueError("logit_bias must be an object of token id: number.") from None


def _logprobs(given: Mapping[str, Any]) -> dict[str, int]:
    """logprobs is a number for completions; for chats a flag, with top_logprobs beside it."""
    wanted, top = given.get("logprobs"), given.get("top_logprobs")
    if top is not None and (type(top) is not int or not 0 <= top <= MAX_TOP_LOGPROBS):
        raise ValueError(f"top_logprobs is {top!r}, but must be a whole number from 0 to {MAX_TOP_LOGPROBS}.")
    if wanted is None or wanted is False:
        if top:
            raise ValueError("top_logprobs needs logprobs: true.")
        return {}
    return {"logprobs": (top or 0) if wanted is True else _number("logprobs", wanted)}

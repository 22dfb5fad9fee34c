"""From what a person wrote (text of a flag, a value of YAML or JSON) to the type of the field."""

from __future__ import annotations

import difflib
import json
import typing
from typing import Any, get_origin

from outcore.config.spec import Field


class ConfigError(ValueError):
    """A setting is unknown, malformed or contradicts another; the message says which and what is right."""


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """A hint naming the closest known word, or an empty string; leading dashes do not count as likeness."""
    by_name = {name.lstrip("-"): name for name in known}
    matches = difflib.get_close_matches(word.lstrip("-"), list(by_name), n=1, cutoff=0.54)
    return f" Did you mean {by_name[matches[0]]}?" if matches else ""


def typed_value(row: Field, value: Any) -> Any:
    """`value` as the field's type.

    Raises ConfigError when it cannot be: 'save_steps: expected a whole number, got "ten"'.
    """
    kind, name = row.kind, row.name
    if row.is_optional:
        unset = ("null", "") if kind is str or row.choices else ("none", "null", "")  # "none" may be a name or a choice
        if value is None or (value is False and kind is str) or (isinstance(value, str) and value.lower() in unset):
            return None  # a text that YAML's no leaves out: push_to_hub, resume_from_checkpoint
    if row.choices:
        return _choice(row, value)
    if isinstance(value, str) and value.lower() in row.words_beside:
        return value.lower()
    if get_origin(kind) is tuple:
        return _texts(name, value)
    if kind is bool:
        return _switch(name, value)
    if kind is int:
        return _whole(name, value, row.words_beside)
    if kind is float:
        try:
            if not isinstance(value, bool):
                return float(value)
        except (TypeError, ValueError):
            pass
        raise ConfigError(f"{name}: expected a number, got {value!r}.")
    if value is None:
        raise ConfigError(f"{name}: has no value. Give it one, or delete the line to get the default.")
    if row.spec.names and (value is False or isinstance(value, list)):
        return ",".join(_texts(name, value)) if value else (None if row.is_optional else "none")
    if row.spec.mapping and isinstance(value, dict):
        return json.dumps(value)
    if isinstance(value, dict | list | bool):
        raise ConfigError(f"{name}: expected text, got {type(value).__name__}.")
    return str(value)


def _choice(row: Field, value: Any) -> str:
    text = str(value).lower()
    if isinstance(value, bool):  # YAML's own reading of on, off, yes and no
        spellings = ("on", "yes") if value else ("off", "no", "none")
        text, value = next((word for word in spellings if word in row.choices), spellings[0]), spellings[1]
    for spelling in (str(value), text):
        text = row.spec.words.get(spelling, text)
    if text not in row.choices:
        raise ConfigError(f"{row.name}: {value!r} is not one of {', '.join(row.choices)}.{nearest(text, row.choices)}")
    return text


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """Several of a flag that may be repeated, or a list of YAML."""
    values = value if isinstance(value, list | tuple) else [value]
    for one in values:
        if one is None or isinstance(one, dict | list):
            raise ConfigError(f"{name}: expected text or a list of texts, got {one!r} in it.")
    return tuple(str(one) for one in values)


def _switch(name: str, value: Any) -> bool:
    text = str(value).lower()
    if text in ("true", "1", "yes", "on"):
        return True
    if text in ("false", "0", "no", "off"):
        return False
    raise ConfigError(f"{name}: expected true or false, got {value!r}.")


def _whole(name: str, value: Any, words: tuple[str, ...]) -> int:
    if not isinstance(value, bool):
        try:
            number = float(value)
            if number == int(number):
                return int(value) if isinstance(value, str) and value.lstrip("+-").isdigit() else int(number)
        except (TypeError, ValueError, OverflowError):
            pass
    raise ConfigError(f"{name}: expected {' or '.join(('a whole number', *words))}, got {value!r}.")

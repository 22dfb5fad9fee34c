"""The settings of a run as data: the table for a form, and a form's values as command line and YAML."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any, get_origin

import yaml

from outcore.config import FIELDS, ConfigError, Field, TrainConfig
from outcore.plan.asked import PRESETS
from outcore.serve.additions import bad
from outcore.train.configure import parse_config

HIDDEN = frozenset({"local_rank", "plan"})
"""Set by a launcher; asked by a route of its own."""


def table() -> dict[str, Any]:
    """Every field (name, group, kind, choices, default, range, help, whether it is common) and the presets' names."""
    rows = [_row(field) for name, field in FIELDS.items() if name not in HIDDEN]
    return {"object": "list", "data": rows, "presets": list(PRESETS)}


def _row(field: Field) -> dict[str, Any]:
    spec = field.spec
    kind = "choice" if field.choices else "list" if get_origin(field.kind) is tuple else field.kind.__name__
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    return {
        "name": field.name,
        "group": field.group,
        "kind": kind,
        "choices": list(field.choices),
        "default": default,
        "is_optional": field.is_optional,
        "help": field.help,
        "is_common": spec.common,
        "range": {name: getattr(spec, name) for name in ("above", "least", "below", "most")},
    }


def said(fields: Mapping[str, Any]) -> dict[str, Any]:
    """What a form says beyond the defaults; an empty field says nothing. ApiError for a name that is no setting."""
    found = {}
    for name, value in fields.items():
        field = FIELDS.get(name)
        if field is None or name in HIDDEN:
            raise bad(f"{name} is no setting of a run.", name)
        is_misplaced = isinstance(value, list) and get_origin(field.kind) is not tuple
        if is_misplaced or isinstance(value, dict) or (isinstance(value, bool) and not field.is_switch):
            raise bad(f"{name}: expected one value, got {json.dumps(value)}.", name)
        if field.kind in (int, float):
            value = _number(value)
        if isinstance(value, list):
            value = tuple(str(one) for one in value)
        if value not in (None, "", (), field.default):
            found[name] = value
    return found


def _number(value: Any) -> Any:
    """A number out of a form's text, whole where it is; what is none stays as it is, and is refused in words later."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return value
    return int(found) if found.is_integer() and abs(found) < 2**53 and "e" not in str(value).lower() else found


def checked(settings: Mapping[str, Any]) -> TrainConfig:
    """The run's settings as training takes them. ApiError, naming the field, for what cannot be."""
    try:
        return parse_config(argv_of(settings))
    except ConfigError as error:
        raise bad(str(error), field_of(str(error))) from error


def argv_of(settings: Mapping[str, Any]) -> list[str]:
    """Flags that say these settings."""
    words: list[str] = []
    for name, value in settings.items():
        for one in value if isinstance(value, tuple) else (value,):
            text = str(one).lower() if isinstance(one, bool) else str(one)
            words += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return words


def command_of(settings: Mapping[str, Any]) -> str:
    """The command line to copy; `outcore train` works in any folder."""
    return shlex.join(["outcore", "train", *argv_of(settings)])


def yaml_of(settings: Mapping[str, Any]) -> str:
    """The file for `--config`."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True) if plain else "# all defaults\n"


def field_of(message: str) -> str | None:
    """The setting that a ConfigError begins with; None where it begins with something else."""
    word = message.lstrip("-").split(" ", 1)[0].rstrip(":")
    return word if word in FIELDS else None

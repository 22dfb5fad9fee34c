"""The settings of a run as data: the table for a form, and a form's values as command line and YAML."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, get_origin

import yaml

from outcore.config import FIELDS, ConfigError, Field, TrainConfig
from outcore.data import DataError, weighted_source
from outcore.plan.asked import PRESETS
from outcore.serve.additions import ApiError, bad, check_folder
from outcore.train.configure import parse_config

HIDDEN = frozenset({"local_rank", "plan"})
"""Set by a launcher; asked by a route of its own."""
COMMAND_LINE = frozenset({"trust_remote_code", "reward_function"})
"""Said on a command line alone: it runs code that comes with a model, or that judges its answers."""
OPENED = frozenset({
    "model_name_or_path", "config_file", "tokenizer_name_or_path", "dataset", "eval_dataset", "chat_template",
    "data_cache_dir", "resume_from_checkpoint", "checkpoint_dir", "log_dir", "export_dir", "deepspeed_config",
    "nvme_offload_path", "teacher",
})  # fmt: skip
"""Settings that name a file or folder."""


def table() -> dict[str, Any]:
    """Every field (name, group, kind, choices, default, range, help, whether it is common) and the presets' names."""
    rows = [_row(field) for name, field in FIELDS.items() if name not in HIDDEN | COMMAND_LINE]
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
    """Read what a form sets beyond the defaults; empty fields say nothing. ApiError for a name that is no setting."""
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


def check_reach(settings: Mapping[str, Any], allowed: Sequence[Path]) -> None:
    """ApiError for what a client may not say: code that runs, and files outside of the folder in which the panels were
    started and of those that are allowed."""
    for name, value in settings.items():
        if name in COMMAND_LINE:
            raise ApiError(403, f"{name} is said on the command line alone (outcore train --{name}).", param=name)
        if name == "model_module":
            check_folder(str(value).rpartition(":")[0], allowed, name)
        elif name in OPENED and (name, value) != ("resume_from_checkpoint", "auto"):
            for one in _named(name, value):
                check_folder(one, (Path(), *allowed), name)


def _named(name: str, value: Any) -> list[str]:
    """Files and folders that a setting names."""
    if name == "nvme_offload_path":
        return [str(value), *map(str.strip, str(value).split(","))]
    texts = [str(one) for one in (value if isinstance(value, tuple) else (value,))]
    try:
        return [weighted_source(text).name for text in texts] if name == "dataset" else texts
    except DataError as error:
        raise bad(str(error), name) from error


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


def _texts(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(name, value) as a command line says them."""
    values = [(name, one) for name, v in settings.items() for one in (v if isinstance(v, tuple) else (v,))]
    return [(name, str(one).lower() if isinstance(one, bool) else str(one)) for name, one in values]


def argv_of(settings: Mapping[str, Any]) -> list[str]:
    """Flags that say these settings, each in one word with its value, which is so taken for no flag."""
    return [f"--{name}={text}" for name, text in _texts(settings)]


def command_of(settings: Mapping[str, Any]) -> str:
    """The command line to copy; `outcore train` works in any folder."""
    words = [(f"--{name}={text}",) if text.startswith("-") else (f"--{name}", text) for name, text in _texts(settings)]
    return shlex.join(["outcore", "train", *chain(*words)])


def yaml_of(settings: Mapping[str, Any]) -> str:
    """The file for `--config`."""
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True) if plain else "# all defaults\n"


def field_of(message: str) -> str | None:
    """The setting that a ConfigError begins with; None where it begins with something else."""
    word = message.lstrip("-").split(" ", 1)[0].rstrip(":")
    return word if word in FIELDS else None

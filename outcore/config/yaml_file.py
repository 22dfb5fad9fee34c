"""The YAML file of `--config`: `name: value` lines, with the names of the flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from outcore.config.convert import ConfigError, nearest
from outcore.config.spec import Field
from outcore.config.spellings import meaning_of


def load_yaml(path: str, rows: Mapping[str, Field]) -> dict[str, Any]:
    """The settings of a YAML file, unconverted, with other tools' names replaced by ours. ConfigError saying the line
    where it is not readable."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise ConfigError(f"--config {path}: no such file. Give the path of a YAML file with training settings.")
    try:
        text = file.read_text(encoding="utf-8")
        data = yaml.safe_load(text)
        repeated = _repeated_key(yaml.compose(text, Loader=yaml.SafeLoader))
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not UTF-8 (byte {error.start}). Save the file as UTF-8.") from error
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(
            f"--config {path}{where}: not readable as YAML: {what}. Settings are written as `name: value`, one a line."
        ) from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"--config {path}: expected `name: value` lines, got a {type(data).__name__}.")
    if repeated is not None:
        raise ConfigError(f"--config {path}, line {repeated[1]}: {repeated[0]} is given twice. Keep one of the lines.")
    return _by_our_names(path, data, rows)


def _by_our_names(path: str, data: Mapping[Any, Any], rows: Mapping[str, Field]) -> dict[str, Any]:
    ours = {name: name for name in rows} | {alias: row.name for row in rows.values() for alias in row.spec.aliases}
    settings: dict[str, Any] = {}
    for key, value in data.items():
        name = ours.get(str(key))
        if name is None:
            raise ConfigError(
                f"--config {path}: unknown setting {key!r}.{meaning_of(str(key)) or nearest(str(key), rows)}"
            )
        if name in settings:
            raise ConfigError(f"--config {path}: {name} is given twice (one of them as {key!r}).")
        settings[name] = value
    return settings


def _repeated_key(node: yaml.Node | None) -> tuple[str, int] | None:
    """(key, line) of a top-level key that comes a second time, which YAML readers pass over in silence."""
    seen: set[str] = set()
    for key, _value in node.value if isinstance(node, yaml.MappingNode) else ():
        if key.value in seen:
            return str(key.value), key.start_mark.line + 1
        seen.add(key.value)
    return None

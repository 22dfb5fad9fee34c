"""From a command line, with the YAML file that it may name, to checked settings.

Flags are made from the table: `--name value`, switches as `--name`, `--name true|false` or `--no_name`.

`--help` lists the fields that are common, `--help all` every one. Dashes and underscores are the same.

The YAML file of `--config`: `name: value` lines, with the names of the flags.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_origin

import yaml

from outcore import __version__
from outcore.config.checks import check_config, check_ranges
from outcore.config.convert import ConfigError, nearest, typed_value
from outcore.config.fields import TrainConfig
from outcore.config.spec import Field, fields_of
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


Config = TypeVar("Config", bound=TrainConfig)
SHOWN_NAMES = 2
"""Names of a field in the short help: its own and the first alias."""


class _Parser(argparse.ArgumentParser):
    """argparse that reports wrong input as ConfigError, with what the flag wants."""

    def error(self, message: str) -> NoReturn:
        flag = re.match(r"argument (--\w+)[^:]*: expected one argument$", message)
        if flag:
            message = f"{flag.group(1)} needs a value ({flag.group(1)} VALUE); --help all says which ones it takes."
        raise ConfigError(message)


def build_parser(
    rows: Mapping[str, Field], prog: str, description: str, *, everything: bool = True
) -> argparse.ArgumentParser:
    """A parser with one flag per row, grouped as the table is. `everything`: whether all of them are in its help."""
    few = "" if everything else f"The settings that matter most; {prog} --help all lists every one."
    parser = _Parser(
        prog=prog,
        description=description,
        epilog=few or None,
        usage=f"{prog} [MODEL] [--config FILE] [--name VALUE ...]",
        allow_abbrev=False,
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    parser.add_argument("--help", "-h", nargs="?", const="few", metavar="all", help="this text; all: every setting")
    parser._negative_number_matcher = re.compile(r"-\.?\d[\d.eE+-]*$")  # argparse takes -1e-4 for a flag
    parser.add_argument("--version", action="version", version=f"outcore {__version__}", help=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of the settings; flags win")
    sections: dict[str, Any] = {}
    for row in rows.values():
        if row.group not in sections:
            sections[row.group] = parser.add_argument_group(row.group)
        shown_names = None if everything else SHOWN_NAMES
        _add(sections[row.group], row, is_shown=everything or row.spec.common, shown_names=shown_names)
    return parser


def _add(section: Any, row: Field, *, is_shown: bool, shown_names: int | None) -> None:
    flags = [f"--{name}" for name in (row.name, *row.spec.aliases)]
    shown = "" if row.default in (None, ()) else f" [{_words(row.default)}]"
    text = (row.help + shown).replace("%", "%%") if is_shown else argparse.SUPPRESS
    if row.is_switch:
        section.add_argument(*flags, dest=row.name, nargs="?", const="true", metavar="BOOL", help=text)
        off = [f"--no_{flag.removeprefix('--')}" for flag in flags]
        section.add_argument(*off, dest=row.name, action="store_const", const="false", help=argparse.SUPPRESS)
        return
    more: dict[str, Any] = {"nargs": "?", "const": row.spec.bare} if row.spec.bare is not None else {}
    if get_origin(row.kind) is tuple:
        more = {"action": "append"}
    more |= {"dest": row.name, "metavar": _metavar(row)}
    section.add_argument(*flags[:shown_names], help=text, **more)
    if shown_names is not None and flags[shown_names:]:
        section.add_argument(*flags[shown_names:], help=argparse.SUPPRESS, **more)


def _words(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _metavar(row: Field) -> str:
    if row.choices:
        return "|".join(row.choices)
    return "|".join(({int: "N", float: "X", str: "TEXT"}.get(row.kind, "TEXT"), *row.words_beside))


def underscored(arg: str) -> str:
    """--save-steps=5 as --save_steps=5: both spellings of a flag are accepted."""
    if not arg.startswith("--"):
        return arg
    flag, equals, value = arg.partition("=")
    return "--" + flag[2:].replace("-", "_") + equals + value


Named = Callable[[str], tuple[str, str]]
"""A model's name -> the setting that it stands for, and that setting's value."""


def _closed(args: Sequence[str], rows: Mapping[str, Field], named: Named) -> list[str]:
    """The command line with a value for each switch before MODEL, which argparse would take for that value."""
    switches = {f"--{name}" for row in rows.values() if row.is_switch for name in (row.name, *row.spec.aliases)}

    def is_model(word: str) -> bool:
        return "/" in word or Path(word).exists() or named(word)[0] == "preset"

    return [
        f"{arg}=true" if arg in switches and is_model(after) else arg
        for arg, after in zip(args, [*args[1:], ""], strict=False)
    ]


def read_flags(
    rows: Mapping[str, Field], argv: Sequence[str] | None, prog: str, description: str, named: Named
) -> dict[str, Any]:
    """Read the command line, by field and unconverted, with `config` for the YAML file; only what was said.

    Prints the help and leaves where that is asked for. Raises ConfigError for an unknown flag or one without a value.
    """
    args = _closed([underscored(arg) for arg in (sys.argv[1:] if argv is None else argv)], rows, named)
    parser = build_parser(rows, prog, description)
    namespace, unknown = parser.parse_known_args(args)
    if namespace.help is not None:
        build_parser(rows, prog, description, everything=namespace.help == "all").print_help()
        raise SystemExit(0)
    if [word.startswith("-") for word in unknown] == [False]:
        if namespace.model_name_or_path is not None:
            raise ConfigError(f"{unknown[0]!r} and --model {namespace.model_name_or_path} name two models. Keep one.")
        namespace.model_name_or_path = unknown.pop()
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        word = next((word for word in unknown if word.startswith("-")), unknown[-1]).split("=")[0]  # MODEL is no fault
        if not word.startswith("-"):
            raise ConfigError(f"unexpected argument {word!r}: beside MODEL every setting is a flag (--name value).")
        hint = meaning_of(word) or nearest(word, known) or " --help all lists all flags."
        raise ConfigError(f"unknown flag {word}.{hint}")
    return {name: value for name, value in vars(namespace).items() if value is not None and name != "help"}


def parse(
    argv: Sequence[str] | None,
    cls: type[Config],
    prog: str,
    description: str,
    named: Named = lambda name: ("model_name_or_path", name),
) -> Config:
    """Checked settings of class `cls` (`TrainConfig`, or one with further fields).

    Flags win over YAML. `named`: the setting, and its value, that a model's name stands for. Raises ConfigError for an
    unknown key, a malformed value or a contradiction.
    """
    rows = fields_of(cls)
    said = read_flags(rows, argv, prog, description, named)
    file = said.pop("config", None)
    return checked(cls, {**(load_yaml(file, rows) if file is not None else {}), **said}, named)


def checked(
    cls: type[Config], said: Mapping[str, Any], named: Named = lambda name: ("model_name_or_path", name)
) -> Config:
    """Settings of class `cls` from values by field, each made the field's type; `named`: as `parse` takes it.
    ConfigError for an unknown name, a malformed value or a contradiction."""
    rows = fields_of(cls)
    if unknown := next((name for name in said if name not in rows), None):
        raise ConfigError(f"unknown setting {unknown!r}.{meaning_of(unknown) or nearest(unknown, rows)}")
    typed = {name: typed_value(rows[name], value) for name, value in said.items()}
    if (model := typed.get("model_name_or_path")) is not None:
        setting, value = named(model)
        if typed.get(setting) in (None, model):  # else two models are named, which the checks tell
            del typed["model_name_or_path"]
            typed[setting] = value
    config = cls(**typed)
    check_ranges(config, rows)
    check_config(config)
    return config

"""From the command line and YAML to a checked `TrainConfig`; a wrong key names the nearest right one.

Flags are made from the dataclass: `--name value`, booleans as `--name`, `--name true|false` or `--no-name`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import inspect
import math
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml

from outcore.monitor.metrics.loggers import check_report_to
from outcore.train.configure.config import BARE_FLAGS, FIELD_ALIASES, SCHEDULE_ALIASES, ZERO_STAGE_ALIASES, TrainConfig

MAX_AIO_BLOCK_BYTES = 1 << 30


class ConfigError(ValueError):
    """A setting is unknown, malformed or contradicts another; the message says which and what is right."""


def field_docs(cls: type) -> dict[str, str]:
    """The docstring under each field of a dataclass, by field name."""
    tree = ast.parse(inspect.getsource(cls)).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for node, following in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(following, ast.Expr):
            value = following.value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docs[node.target.id] = inspect.cleandoc(value.value).replace("\n", " ")
    return docs


def field_groups(cls: type) -> dict[str, str]:
    """The `# --- title` that each field stands under, by field name (groups of `--help`)."""
    groups: dict[str, str] = {}
    title = ""
    for line in inspect.getsource(cls).splitlines():
        text = line.strip()
        if text.startswith("# --- "):
            title = text.removeprefix("# --- ")
        name = text.split(":")[0]
        if name.isidentifier() and text.startswith(f"{name}:"):
            groups[name] = title
    return groups


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """A hint naming the closest known word, or an empty string; leading dashes do not count as likeness."""
    by_name = {name.lstrip("-"): name for name in known}
    matches = difflib.get_close_matches(word.lstrip("-"), list(by_name), n=1, cutoff=0.54)
    return f" Did you mean {by_name[matches[0]]}?" if matches else ""


def convert(name: str, value: Any, annotation: Any) -> Any:
    """`value` (from YAML or a flag) as the field's type.

    Raises ConfigError when it cannot be: 'save_steps: expected a whole number, got "ten"'.
    """
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [a for a in get_args(annotation) if a is not type(None)]
        is_name = inner[0] is str or get_origin(inner[0]) is Literal  # "none" may be a run's name or a choice
        unset = ("null", "") if is_name else ("none", "null", "")
        if value is None or (isinstance(value, str) and value.lower() in unset):
            return None
        return convert(name, value, inner[0])
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        text = str(value).lower() if not isinstance(value, bool) else ("on" if value else "off")
        if name == "zero_stage":
            text = ZERO_STAGE_ALIASES.get(text, text)
        if name == "lr_scheduler_type":
            text = SCHEDULE_ALIASES.get(str(value), text)
        if text not in choices:
            raise ConfigError(f"{name}: {value!r} is not one of {', '.join(choices)}.{nearest(text, choices)}")
        return text
    if annotation is bool:
        text = str(value).lower()
        if text in ("true", "1", "yes", "on"):
            return True
        if text in ("false", "0", "no", "off"):
            return False
        raise ConfigError(f"{name}: expected true or false, got {value!r}.")
    if annotation is int:
        if not isinstance(value, bool):
            try:
                number = float(value)
                if number == int(number):
                    return int(value) if isinstance(value, str) and value.lstrip("+-").isdigit() else int(number)
            except (TypeError, ValueError, OverflowError):
                pass
        raise ConfigError(f"{name}: expected a whole number, got {value!r}.")
    if annotation is float:
        try:
            if not isinstance(value, bool):
                return float(value)
        except (TypeError, ValueError):
            pass
        raise ConfigError(f"{name}: expected a number, got {value!r}.")
    if value is None:
        raise ConfigError(f"{name}: has no value. Give it one, or delete the line to get the default.")
    if isinstance(value, dict | list):
        raise ConfigError(f"{name}: expected text, got {type(value).__name__}.")
    return str(value)


def load_yaml(path: str) -> dict[str, Any]:
    """The settings of a YAML file, unconverted, with other tools' names replaced by ours."""
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
    known = {f.name for f in dataclasses.fields(TrainConfig)}
    settings: dict[str, Any] = {}
    for key, value in data.items():
        name = FIELD_ALIASES.get(str(key), str(key))
        if name not in known:
            raise ConfigError(f"--config {path}: unknown setting {key!r}.{nearest(str(key), known)}")
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


class _Parser(argparse.ArgumentParser):
    """argparse that reports wrong input as ConfigError, with what the flag wants."""

    def error(self, message: str) -> NoReturn:
        flag = re.match(r"argument (--\w+)[^:]*: expected one argument$", message)
        if flag:
            message = f"{flag.group(1)} needs a value ({flag.group(1)} VALUE); --help says which ones it takes."
        raise ConfigError(message)


def build_parser(prog: str = "train_model.py") -> argparse.ArgumentParser:
    """A parser with one flag per field, grouped as the dataclass is."""
    parser = _Parser(
        prog=prog,
        description="Train a language model larger than the GPU. Without flags: a tiny model on Python's own source.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of the settings below; flags win")
    docs, groups, hints = field_docs(TrainConfig), field_groups(TrainConfig), get_type_hints(TrainConfig)
    sections: dict[str, Any] = {}
    for field in dataclasses.fields(TrainConfig):
        section = sections.setdefault(groups[field.name], parser.add_argument_group(groups[field.name]))
        annotation = hints[field.name]
        is_switch = annotation is bool or bool in get_args(annotation)
        flags = [f"--{field.name}"]
        for alias, target in FIELD_ALIASES.items():
            if target == field.name:
                flags.append(f"--{alias}")
        shown = "" if field.default is None else f" [{str(field.default).lower() if is_switch else field.default}]"
        help_text = (docs[field.name] + shown).replace("%", "%%")
        if is_switch:
            section.add_argument(*flags, dest=field.name, nargs="?", const="true", metavar="BOOL", help=help_text)
            off = [f"--no_{flag.removeprefix('--')}" for flag in flags]
            section.add_argument(*off, dest=field.name, action="store_const", const="false", help=argparse.SUPPRESS)
        else:
            bare = {"nargs": "?", "const": BARE_FLAGS[field.name]} if field.name in BARE_FLAGS else {}
            section.add_argument(*flags, dest=field.name, metavar=_metavar(annotation), help=help_text, **bare)
    return parser


def _underscored(arg: str) -> str:
    """--save-steps=5 as --save_steps=5: both spellings of a flag are accepted."""
    if not arg.startswith("--"):
        return arg
    flag, equals, value = arg.partition("=")
    return "--" + flag[2:].replace("-", "_") + equals + value


def _metavar(annotation: Any) -> str:
    kinds = [a for a in get_args(annotation) if a is not type(None)]
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if kinds:
        return _metavar(kinds[0])
    return {int: "N", float: "X", str: "TEXT"}.get(annotation, "VALUE")


def parse_config(argv: list[str] | None = None) -> TrainConfig:
    """A checked configuration from flags and, with `--config FILE`, YAML; flags win.

    Raises ConfigError for an unknown key, a malformed value or a contradiction.
    """
    parser = build_parser()
    args = [_underscored(arg) for arg in (sys.argv[1:] if argv is None else argv)]
    namespace, unknown = parser.parse_known_args(args)
    if unknown:
        known = [flag for action in parser._actions for flag in action.option_strings]
        word = unknown[0].split("=")[0]
        if not word.startswith("--"):
            raise ConfigError(f"unexpected argument {word!r}: every setting is a flag (--name value).")
        raise ConfigError(f"unknown flag {word}.{nearest(word, known) or ' --help lists all flags.'}")
    flags = {k: v for k, v in vars(namespace).items() if v is not None and k != "config"}
    raw = {**(load_yaml(namespace.config) if namespace.config else {}), **flags}
    hints = get_type_hints(TrainConfig)
    config = TrainConfig(**{name: convert(name, value, hints[name]) for name, value in raw.items()})
    check_config(config)
    return config


def check_config(config: TrainConfig) -> None:
    """Raise ConfigError for values out of range and for settings that contradict each other."""
    sources = [n for n in ("model_name_or_path", "preset", "config_file", "model_module") if getattr(config, n)]
    if len(sources) > 1:
        raise ConfigError(f"{' and '.join(sources)} contradict each other: a run has one model. Keep one of them.")
    positive = ("seq_length", "per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs")
    positive += ("gradient_accumulation_steps", "learning_rate", "save_total_limit", "logging_steps", "lora_alpha")
    positive += ("aio_block_size", "aio_queue_depth", "max_train_samples", "max_eval_samples", "adam_epsilon")
    positive += ("tile_bytes",)
    for name in positive:
        value = getattr(config, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}: must be above 0 and finite, got {value}.")
    for name in (
        "warmup_steps",
        "eval_steps",
        "sample_steps",
        "save_steps",
        "lora_r",
        "max_grad_norm",
        "weight_decay",
        "sample_tokens",
        "trace",
        "ram_budget_gib",
    ):
        value = getattr(config, name)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{name}: must not be below 0 or infinite, got {value}.")
    for name in ("adam_beta1", "adam_beta2", "lora_dropout", "eval_fraction"):
        value = getattr(config, name)
        if value is not None and not 0 <= value < 1:
            raise ConfigError(f"{name}: must be at least 0 and below 1, got {value}.")
    if config.metrics_port is not None and not 0 <= config.metrics_port <= 65535:
        raise ConfigError(f"metrics_port: must be from 0 (any free one) to 65535, got {config.metrics_port}.")
    if config.max_steps == 0 or config.max_steps < -1:
        raise ConfigError(f"max_steps: must be above 0 (or -1: follow num_train_epochs), got {config.max_steps}.")
    if config.max_steps > 0 and config.warmup_steps is not None and config.warmup_steps > config.max_steps:
        raise ConfigError(
            f"warmup_steps ({config.warmup_steps}) is more than max_steps ({config.max_steps}): the learning rate "
            "would never reach its peak. Lower warmup_steps, or raise max_steps."
        )
    if not 0 <= config.seed < 2**63:
        raise ConfigError(f"seed: must be from 0 to 9223372036854775807, got {config.seed}.")
    if not 0 <= config.max_in_cpu_gb < math.inf:
        raise ConfigError(f"max_in_cpu_gb: must not be below 0 or infinite, got {config.max_in_cpu_gb}.")
    try:
        check_report_to(config.report_to)
    except ValueError as error:
        raise ConfigError(f"--{error}") from error
    name = config.run_name
    if name and (Path(name).name != name or name in (".", "..") or not name.strip() or not name.isprintable()):
        raise ConfigError(f"run_name: must be a plain folder name without slashes, got {name!r}.")
    if config.aio_block_size > MAX_AIO_BLOCK_BYTES:
        raise ConfigError(
            f"aio_block_size: {config.aio_block_size} bytes in one drive request is too much: {MAX_AIO_BLOCK_BYTES} "
            "(1 GiB) at most; 1048576 to 16777216 is usual."
        )
    if config.engine == "stream" and config.zero_stage in ("none", "zero1", "zero2"):
        raise ConfigError(
            f"engine stream and zero_stage {config.zero_stage} contradict each other: the streaming engine offloads "
            "every state (it is ZeRO-Infinity for one GPU). Use --engine deepspeed, or leave zero_stage out."
        )
    if config.engine == "deepspeed":
        only_stream = [n for n in ("activations", "compile", "tiling") if getattr(config, n) != "auto"]
        only_stream += ["tile_bytes"] if config.tile_bytes is not None else []
        if only_stream:
            raise ConfigError(
                f"{only_stream[0]} is a setting of the streaming engine: leave it out, or leave out --engine deepspeed."
            )
    if config.zero_stage == "none" and "nvme" in (config.offload_optimizer, config.offload_params):
        raise ConfigError("zero_stage none and offload to nvme contradict each other: use --zero_stage infinity.")
    if config.zero_stage in ("none", "zero1", "zero2") and config.offload_params in ("cpu", "nvme"):
        raise ConfigError(
            f"zero_stage {config.zero_stage} keeps parameters on the GPU: offload_params {config.offload_params} "
            "needs --zero_stage zero3 or infinity."
        )
    if config.zero_stage == "none" and config.offload_optimizer == "cpu":
        raise ConfigError("zero_stage none keeps everything on the GPU: offload_optimizer cpu needs zero1, 2 or 3.")
    if config.strict_offload and config.zero_stage == "infinity" and not config.nvme_offload_path:
        raise ConfigError("strict_offload with zero_stage infinity needs --nvme_offload_path DIR.")
    if config.lora_r == 0 and config.lora_alpha is not None:
        raise ConfigError("lora_alpha is given but lora_r is 0: add --lora_r 16 (or another rank) to train adapters.")

"""From a command line, with the YAML file that it may name, to checked settings; flags win."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from outcore.config.checks import check_config, check_ranges
from outcore.config.convert import typed_value
from outcore.config.fields import TrainConfig
from outcore.config.flags import read_flags
from outcore.config.spec import fields_of
from outcore.config.yaml_file import load_yaml

Config = TypeVar("Config", bound=TrainConfig)


def parse(argv: Sequence[str] | None, cls: type[Config], prog: str, description: str) -> Config:
    """Checked settings of class `cls` (`TrainConfig`, or one with further fields).

    Raises ConfigError for an unknown key, a malformed value or a contradiction.
    """
    rows = fields_of(cls)
    said = read_flags(rows, argv, prog, description)
    file = said.pop("config", None)
    raw = {**(load_yaml(file, rows) if file is not None else {}), **said}
    config = cls(**{name: typed_value(rows[name], value) for name, value in raw.items()})
    check_ranges(config, rows)
    check_config(config)
    return config

"""The settings of a run: one table of fields, three doors (flags, YAML, deepspeed_config.json), one set of checks."""

from __future__ import annotations

from outcore.config.convert import ConfigError, nearest
from outcore.config.fields import FIELDS, TrainConfig
from outcore.config.parse import parse
from outcore.config.spec import Field, fields_of, setting

__all__ = [
    "FIELDS",
    "ConfigError",
    "Field",
    "TrainConfig",
    "fields_of",
    "nearest",
    "parse",
    "setting",
]

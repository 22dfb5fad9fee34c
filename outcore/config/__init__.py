"""The settings of a run: one table of fields, three doors (flags, YAML, deepspeed_config.json), one set of checks."""

from outcore.config.checks import check_said
from outcore.config.convert import ConfigError
from outcore.config.deepspeed_file import DeepSpeedFile, read_deepspeed_file, understand
from outcore.config.fields import FIELDS, TrainConfig
from outcore.config.flags import checked, parse
from outcore.config.resolver import ProcessFacts, is_tiny, recomputes, resolve
from outcore.config.run_settings import Device, Offload, Precision, RunSettings
from outcore.config.spec import Field, fields_of, setting

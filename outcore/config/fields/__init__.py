"""Every setting of a run, once: the flag, the line of YAML and the key of deepspeed_config.json are this one table.

A field is a line of one of these classes: name, type, default, `setting(...)` with what else is known of it, and a
docstring, which is its `--help`. `None` means "not said": the value is then derived, and the run prints what was chosen
and why. Names are Hugging Face's where Hugging Face has one.
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.config.fields.data import DataFields
from outcore.config.fields.engine import EngineFields
from outcore.config.fields.lora import LoraFields
from outcore.config.fields.method import ROLLED as ROLLED
from outcore.config.fields.method import MethodFields
from outcore.config.fields.method import is_address as is_address
from outcore.config.fields.model import ModelFields
from outcore.config.fields.optimization import OptimizationFields
from outcore.config.fields.reporting import ReportingFields
from outcore.config.spec import Field, fields_of


@dataclass(frozen=True)
class TrainConfig(EngineFields, ReportingFields, LoraFields, OptimizationFields, DataFields, MethodFields, ModelFields):
    """Everything that defines a training run; the last base is the first group of `--help`."""


FIELDS: dict[str, Field] = fields_of(TrainConfig)
"""The table: name -> row."""

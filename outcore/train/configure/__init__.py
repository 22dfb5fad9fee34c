"""From the command line to checked settings, without torch."""

from __future__ import annotations

from collections.abc import Sequence

from outcore.config import ConfigError, TrainConfig, parse
from outcore.model import named_model
from outcore.monitor.metrics import check_report_to

DESCRIPTION = "Train a language model larger than the GPU. Without flags: a tiny model on Python's own source."


def parse_config(argv: Sequence[str] | None = None, prog: str = "train_model.py") -> TrainConfig:
    """Checked settings from flags and, with `--config FILE`, YAML; flags win. `prog`: what the user typed, for help.

    Raises ConfigError for an impossible value."""
    return check_reports(parse(argv, TrainConfig, prog, DESCRIPTION, named_model))


def check_reports(config: TrainConfig) -> TrainConfig:
    """The settings. ConfigError where they name a tracker that is not there."""
    try:
        check_report_to(config.report_to)
    except ValueError as error:
        raise ConfigError(f"--{error}") from error
    return config

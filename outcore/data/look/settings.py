"""From the settings of a run to those of its data."""

from __future__ import annotations

from outcore.common.classes import same_named
from outcore.config import TrainConfig
from outcore.data.basis import DEFAULT_TEXT_EXTENSIONS, DataSettings
from outcore.data.mix import weighted_source
from outcore.data.sources import check_hub_settings


def data_settings_of(config: TrainConfig, seq_length: int, packing: str) -> DataSettings:
    """Make the settings of a run's (first) data set from those of the run. `packing`: auto, on, off."""
    extensions = config.text_extensions
    said = {
        **same_named(DataSettings, config, "eval_split", "format", "cache_dir", "num_proc", "lock_timeout_s"),
        "dataset": weighted_source(config.dataset[0]).name,
        "format": config.data_format,
        "seq_length": seq_length,
        "packing": packing,
        "cache_dir": config.data_cache_dir,
        "text_extensions": tuple(extensions.split(",")) if extensions else DEFAULT_TEXT_EXTENSIONS,
    }
    settings = DataSettings(**said)
    sources = [weighted_source(name).name for name in config.dataset]
    check_hub_settings(settings, [*sources, *([config.eval_dataset] if config.eval_dataset else [])])
    return settings

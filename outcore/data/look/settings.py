"""From the settings of a run to those of its data."""

from __future__ import annotations

from outcore.config import TrainConfig
from outcore.data.basis import DEFAULT_TEXT_EXTENSIONS, DataSettings
from outcore.data.mix import weighted_source


def data_settings_of(config: TrainConfig, seq_length: int, packing: str) -> DataSettings:
    """What a run's settings say of its (first) data set. `packing`: auto, on, off."""
    return DataSettings(
        dataset=weighted_source(config.dataset[0]).name,
        dataset_config=config.dataset_config,
        dataset_split=config.dataset_split,
        eval_dataset=config.eval_dataset,
        eval_fraction=config.eval_fraction,
        text_column=config.text_column,
        prompt_column=config.prompt_column,
        completion_column=config.completion_column,
        messages_column=config.messages_column,
        format=config.data_format,
        seq_length=seq_length,
        packing=packing,
        on_bad_row=config.on_bad_row,
        streaming=config.streaming,
        cache_dir=config.data_cache_dir,
        seed=config.seed,
        max_train_samples=config.max_train_samples,
        max_eval_samples=config.max_eval_samples,
        train_on_prompt=config.train_on_prompt,
        train_on_last_turn=config.train_on_last_turn,
        long_rows=config.long_rows,
        text_extensions=tuple(config.text_extensions.split(",")) if config.text_extensions else DEFAULT_TEXT_EXTENSIONS,
    )

"""The run's rows: their length, the tokenizer, and the prepared data, with what was chosen said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outcore.checkpoint import Checkpoint
from outcore.config import ConfigError, TrainConfig, is_tiny
from outcore.data import PreparedData, load_or_train_tokenizer, prepare_mixture, weighted_source
from outcore.data.chat import read_template
from outcore.data.look import data_settings_of
from outcore.model import LoadedModel, ModelSettings, max_positions, resolve_source
from outcore.model.trial import check_abilities, check_token_ids, embedding_rows
from outcore.train.changes import kept_tokenizer
from outcore.train.configure.rooms import DEFAULT_SEQ_LENGTH, TINY_SEQ_LENGTH, model_settings_of

Say = Callable[[str], None]


def default_seq_length(config: TrainConfig, precision: str) -> int:
    """Tokens per row when nobody says: a tiny preset's own, else the smaller of 1,024 and what the model can take."""
    if is_tiny(config):
        return TINY_SEQ_LENGTH
    if config.model_module:
        return DEFAULT_SEQ_LENGTH
    limit = max_positions(resolve_source(model_settings_of(config, precision, 2)).config)
    return min(DEFAULT_SEQ_LENGTH, limit or DEFAULT_SEQ_LENGTH)


def load_tokenizer(config: TrainConfig, settings: ModelSettings, say: Say, checkpoint: Checkpoint | None = None) -> Any:
    """The tokenizer that was named, the model's, the one of the checkpoint from which the run goes on, or one trained
    on the data."""
    kept = kept_tokenizer(config, checkpoint)
    tokenizer = load_or_train_tokenizer(
        data_settings_of(config, settings.seq_length, "auto"),
        str(kept) if kept else config.tokenizer_name_or_path or settings.model_name_or_path,
        trust_remote_code=config.trust_remote_code,
        say=say,
    )
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template)
    return tokenizer


def load_data(
    config: TrainConfig, settings: ModelSettings, tokenizer: Any, loaded: LoadedModel | None, say: Say
) -> PreparedData:
    """Tokenized rows for training and evaluation. ConfigError when packing is asked for and the model cannot."""
    model_config = loaded.config if loaded is not None else None
    encoder_decoder = False
    if settings.model_module is None:
        source = resolve_source(settings, tokenizer)
        model_config = source.config
        encoder_decoder = source.is_encoder_decoder
        abilities = check_abilities(source.config, config.attn_implementation)
        reason = "an encoder-decoder reads one document per row" if encoder_decoder else abilities.packing_reason
        allowed = abilities.packing and not encoder_decoder
    else:
        allowed, reason = config.packing == "on", "an own model is not known to keep documents apart"
    if not allowed and config.packing == "on":
        raise ConfigError(f"packing on: not with this model ({reason}). Use --packing off.")
    if not allowed:
        say(f"packing: off ({reason})")
    elif config.group_by_length:
        say("packing: off (group_by_length is for rows that are not packed)")
    data = prepare_mixture(
        data_settings_of(config, settings.seq_length, "off" if config.group_by_length else config.packing),
        [weighted_source(name) for name in config.dataset],
        tokenizer,
        say,
        encoder_decoder=encoder_decoder,
        packing_allowed=allowed,
    )
    check_token_ids(data.summary.max_token_id, embedding_rows(loaded.model if loaded else None, model_config))
    for line in data.summary.lines():
        say(line)
    if data.sample_text:
        say(f"a sample of each shape of rows, loss on the marked parts:\n{data.sample_text}")
    return data

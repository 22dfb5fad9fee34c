"""The model room: where a model comes from, how it is made ready, and its loss; used by both engines.

    settings = ModelSettings(preset="tiny")
    loaded = load_model(settings, tokenizer=tokenizer)     # zero3_config=... : partitioned while it is made
    loss = loaded.token_loss()
    part = loss(loaded.model, batch)                        # LossSum(loss_sum, n_tokens, aux_loss)
    part.objective(global_tokens).backward()

The names open their files when they are asked for: a preset's shape is planned without torch."""

import typing
from importlib import import_module

if typing.TYPE_CHECKING:
    from outcore.model.generate import context_length_of, generate_tokens
    from outcore.model.load import LoadedModel, load_model
    from outcore.model.loss import HeadLoss, summed_loss
    from outcore.model.origin import Origin
    from outcore.model.presets import PRESETS, named_model
    from outcore.model.settings import LoraSettings, ModelSettings
    from outcore.model.shape import (
        named_config,
        on_targets,
        preset_shape,
        resolve_shape,
        shape_from_config,
    )
    from outcore.model.source import max_positions, resolve_source

_FILE_OF = {
    "context_length_of": "generate",
    "generate_tokens": "generate",
    "LoadedModel": "load",
    "load_model": "load",
    "HeadLoss": "loss",
    "summed_loss": "loss",
    "Origin": "origin",
    "PRESETS": "presets",
    "named_model": "presets",
    "LoraSettings": "settings",
    "ModelSettings": "settings",
    "named_config": "shape",
    "on_targets": "shape",
    "preset_shape": "shape",
    "resolve_shape": "shape",
    "shape_from_config": "shape",
    "max_positions": "source",
    "resolve_source": "source",
}


def __getattr__(name: str) -> typing.Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FILE_OF[name]}"), name)

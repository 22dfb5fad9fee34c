"""What a step needs beside units' buffers, counted from the model's configuration as the planner does."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outcore.engine.stream.settings import StreamSettings
from outcore.model import LoadedModel, shape_from_config
from outcore.sizing.activations import has_masks, long_ram_bytes
from outcore.sizing.tiles import TilingWork
from outcore.sizing.work import step_work


def work_of_step(
    loaded: LoadedModel,
    settings: StreamSettings,
    device: torch.device,
    tile_bytes: int,
    chunk_bytes: int | None,
    *,
    compiled: bool,
) -> TilingWork | None:
    """For the largest micro-batch of a step. None where a step's tokens are not told, or the configuration does not say
    what a layer computes: the rule then leaves a fixed share of the device to it."""
    if not settings.step_tokens:
        return None
    try:
        shape = shape_from_config("model", loaded.config)
    except ValueError:
        return None
    tokens, accumulation = _micro_batches(settings.step_tokens)
    home = "vram" if settings.activations_on(device) == "device" else "elsewhere"
    itemsize = next(loaded.model.parameters()).dtype.itemsize
    return step_work(
        shape,
        itemsize,
        settings.row_tokens or tokens,
        tokens,
        accumulation,
        checkpoints_home=home,
        compiled=compiled,
        tile_bytes=tile_bytes,
        chunk_bytes=chunk_bytes,
        masks=has_masks(settings.packed_attention, itemsize),
    )


def long_rows_ram_bytes(loaded: LoadedModel, settings: StreamSettings, itemsize: int, *, near: bool) -> int:
    """RAM of the homes of a step's long rows, whose tokens are told (otherwise nothing is cut). `near`: of a layer's
    own on the device."""
    assert settings.step_tokens
    shape = shape_from_config("model", loaded.config)
    return long_ram_bytes(shape, itemsize, *_micro_batches(settings.step_tokens), near=near)


def _micro_batches(step_tokens: Sequence[int]) -> tuple[int, int]:
    """(tokens of the largest micro-batch, as how many of these a step counts)."""
    tokens = max(step_tokens)
    return tokens, -(-sum(step_tokens) // tokens)

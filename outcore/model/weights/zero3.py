"""Everything here that knows DeepSpeed, imported only when a ZeRO-3 run asks for it.

transformers partitions weights as they are made or read while an HfDeepSpeedConfig object is alive; this room keeps
one alive around loading and leaves initial values to `outcore.model.weights.initialise`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn


def full_shape(parameter: torch.Tensor) -> torch.Size:
    """The parameter's shape, whether partitioned or not."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def full_numel(parameter: torch.Tensor) -> int:
    """The parameter's number of elements, whether partitioned or not."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def is_first_rank() -> bool:
    """True on rank 0 and where there are no ranks."""
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0


def gathered(parameters: list[nn.Parameter]) -> AbstractContextManager:
    """Partitioned parameters whole inside, to be written: rank 0's values are shared out on exit."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(parameters, modifier_rank=0)


def settle(engine: Any) -> None:
    """After evaluation or sampling with a DeepSpeed engine, before anything is gathered by hand (saving, export).

    A forward without backward leaves prefetched parameters in flight, and gathering those fails with "Cannot partition
    a param in flight". Every rank calls it; nothing happens without ZeRO-3."""
    release = getattr(getattr(engine, "optimizer", None), "empty_partition_cache", None)
    if release is not None:
        release()


@contextmanager
def partition_while_loading(zero3_config: dict[str, Any] | None) -> Iterator[None]:
    """Within this context transformers partitions every model it makes or reads (ZeRO-3), without drawing initial
    weights.

    `zero3_config`: a complete DeepSpeed configuration with stage 3 (no "auto" values); None: nothing happens."""
    if zero3_config is None:
        yield
        return
    stage = zero3_config.get("zero_optimization", {}).get("stage")
    if stage != 3:
        raise ValueError(
            f"zero3_config has zero_optimization.stage {stage!r}; weights are partitioned while loading at "
            "stage 3 only."
        )
    import transformers.integrations.deepspeed as integration

    before = integration._hf_deepspeed_config_weak_ref
    keep_alive = integration.HfDeepSpeedConfig(zero3_config)
    try:
        # Their initial values would be drawn on rank 0 and replaced by ours at once: two useless passes over the model.
        with patch.object(integration, "initialize_weights_zero3", lambda model: None):
            yield
    finally:
        integration._hf_deepspeed_config_weak_ref = before
        del keep_alive


@contextmanager
def without_partitioning() -> Iterator[None]:
    """Within this context transformers builds whole models even while a ZeRO-3 configuration is alive (for small
    trial models)."""
    import transformers.integrations.deepspeed as integration

    with patch.object(integration, "_hf_deepspeed_config_weak_ref", None):
        yield

"""`outcore.load`: a model by any name that our commands take, as the plain transformers model in RAM."""

from __future__ import annotations

import os
from typing import Any

from outcore.common.quantities import format_gib
from outcore.formats import PackedTensor
from outcore.infer.opening import InferSettings, device_of, open_model, precision_of
from outcore.machine import available_ram_bytes
from outcore.model.facts import named_checkpoint_parameters
from outcore.model.forward import unwrap


def load(
    name: str | os.PathLike[str],
    *,
    precision: str = "auto",
    adapter: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Model and tokenizer of a hub id, a folder, a run, a checkpoint, an adapter on its base, a GGUF file or another
    checkpoint with packed weights, which are expanded: all weights in RAM, as `from_pretrained` has them.
    ValueError or RuntimeError, in words; also where RAM does not hold them."""
    settings = InferSettings(precision=precision)  # pyright: ignore[reportArgumentType]
    found = open_model(
        str(name),
        precision=precision_of(settings, device_of(settings)),
        adapter=adapter,
        trust_remote_code=trust_remote_code,
    )
    if found.loaded.has_labels:
        raise ValueError(f"{found.words} gives labels: AutoModelForSequenceClassification loads it.")
    model, feed = found.loaded.model, found.loaded.feed
    homes = named_checkpoint_parameters(model)
    needed, free = sum(home.numel() * home.itemsize for home in homes.values()), available_ram_bytes()
    if feed is not None and needed > free:
        raise ValueError(
            f"{found.words} takes {format_gib(needed)} of RAM, and {format_gib(free)} are free. outcore.LLM answers "
            "with models of any size, and outcore.Trainer trains them."
        )
    for group in () if feed is None else feed.groups():
        for own, value in group.items():
            home = homes[own]
            values = value.unpack(home.dtype) if isinstance(value, PackedTensor) else value
            home.data = values.to(home.dtype, copy=True).view(home.shape)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    config: Any = unwrap(model).config
    config.use_cache = True  # training has it off
    return model, found.tokenizer

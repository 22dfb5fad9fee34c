"""From a micro-batch to the arguments of a model's forward, with packed documents really kept apart.

A packed batch has position_ids that restart at 0 with each document and no attention_mask. transformers builds a
block-diagonal mask from them when there is no cache and no 2-D mask (isolation "position_ids"). Models whose mask
comes from elsewhere get an explicit 4-D mask ("mask_4d", T x T bytes per sample), or one for each kind of layer
("mask_map": GPT-OSS, whose own masks overlook the documents). FlashAttention finds documents only
in a batch of one, so packed batches are laid end to end for it. Which of them holds for a model is found out by
`outcore.model.trial.abilities`, numerically, before training."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import nn

Batch = Mapping[str, torch.Tensor]
Isolation = Literal["position_ids", "mask_4d", "mask_map"]
IGNORE = -100
"""Label value without loss, as everywhere in transformers."""


def is_packed(batch: Batch) -> bool:
    """True when the batch carries restarting positions, that is several documents per row."""
    return batch.get("position_ids") is not None


def count_target_tokens(batch: Batch, encoder_decoder: bool = False) -> int:
    """Unmasked tokens the loss of this micro-batch sums over; labels are not shifted, so column 0 never counts."""
    labels = batch["labels"] if encoder_decoder else batch["labels"][:, 1:]
    return int((labels != IGNORE).sum())


def shifted_targets(labels: torch.Tensor) -> torch.Tensor:
    """labels [B, T] -> what each position predicts [B, T]: the next label, -100 at the end of the row."""
    targets = torch.full_like(labels, IGNORE)
    targets[:, :-1] = labels[:, 1:]
    return targets


def document_numbers(position_ids: torch.Tensor) -> torch.Tensor:
    """position_ids [B, T] -> number of the document each token belongs to, from 0 in every row."""
    starts = torch.ones_like(position_ids)
    starts[:, 1:] = (position_ids[:, 1:] != position_ids[:, :-1] + 1).to(starts.dtype)
    return starts.cumsum(-1) - 1


def document_mask(
    position_ids: torch.Tensor, attn_implementation: str, dtype: torch.dtype, window: int | None = None
) -> torch.Tensor:
    """The causal mask [B, 1, T, T] that keeps documents apart: bool for sdpa, additive in `dtype` otherwise.

    `window`: a token sees itself and the window - 1 tokens before it (sliding attention)."""
    documents = document_numbers(position_ids)
    index = torch.arange(position_ids.shape[-1], device=position_ids.device)
    near = index[:, None] >= index[None, :]
    if window is not None:
        near &= index[None, :] > index[:, None] - window
    allowed = ((documents[:, :, None] == documents[:, None, :]) & near)[:, None]
    if attn_implementation.endswith("sdpa"):
        return allowed
    zero = torch.zeros((), dtype=dtype, device=allowed.device)
    return torch.where(allowed, zero, torch.full_like(zero, torch.finfo(dtype).min))


def document_mask_map(config: Any, position_ids: torch.Tensor, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A mask for every kind of layer in `config.layer_types`. ValueError for kinds other than full and sliding."""
    text = config.get_text_config(decoder=True)
    kinds = set(getattr(text, "layer_types", None) or ())
    windows = {"full_attention": None, "sliding_attention": getattr(text, "sliding_window", None)}
    if not kinds or not kinds <= set(windows):
        raise ValueError(f"layers are of kinds {sorted(kinds)}, masks are known for full and sliding attention")
    attention = str(getattr(text, "_attn_implementation", ""))
    return {kind: document_mask(position_ids, attention, dtype, windows[kind]) for kind in sorted(kinds)}


def accepted_names(module: nn.Module) -> tuple[frozenset[str], bool]:
    """The names a module's forward takes, and whether it takes any other by **kwargs."""
    forward = module.forward
    # A class's method is remembered; one put on the module itself may hold it, and would keep its weights in memory.
    return _known_names(forward.__func__) if inspect.ismethod(forward) else _names_of(forward)


def _names_of(forward: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    parameters = inspect.signature(forward).parameters.values()
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return frozenset(names - {"self"}), any(p.kind is p.VAR_KEYWORD for p in parameters)


_known_names = lru_cache(maxsize=64)(_names_of)  # asked in every pass, and a look at a signature takes 0.1 ms


def attention_of(model: nn.Module) -> str:
    """The attention implementation a transformers model was built with ('' for other models)."""
    return str(getattr(getattr(model, "config", None), "_attn_implementation", None) or "")


def forward_inputs(model: nn.Module, batch: Batch, isolation: Isolation = "position_ids") -> dict[str, Any]:
    """Keyword arguments for `model.forward` from a micro-batch (labels are not passed: the loss is computed here).

    `batch`: input_ids [B, T]; position_ids [B, T] when packed; attention_mask [B, T] when padded. Under FlashAttention
    a packed batch comes back as [1, B*T]; hidden states then have that layout, too. Raises ValueError for a packed
    batch that also has a mask (padding would switch isolation off without a word) or a model that takes no positions.
    """
    names, takes_any = accepted_names(model)
    inputs: dict[str, Any] = {"input_ids": batch["input_ids"]}
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if positions is not None:
        if mask is not None:
            raise ValueError(
                "A packed micro-batch (position_ids) must not carry an attention_mask: transformers would then "
                "ignore the documents' borders. Pack without padding, or pad without packing."
            )
        if "position_ids" not in names and not takes_any:
            raise ValueError(
                f"{type(model).__name__} takes no position_ids, so it cannot train on packed batches. Set packing off."
            )
        if attention_of(model).startswith("flash_attention"):
            inputs = {"input_ids": batch["input_ids"].reshape(1, -1)}
            positions = positions.reshape(1, -1)
        inputs["position_ids"] = positions
        dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        if isolation == "mask_4d":
            inputs["attention_mask"] = document_mask(positions, attention_of(model), dtype)
        elif isolation == "mask_map":
            inputs["attention_mask"] = document_mask_map(model.config, positions, dtype)
    elif mask is not None:
        if "attention_mask" not in names and not takes_any:
            raise ValueError(
                f"{type(model).__name__} takes no attention_mask, so padding would be read as text. Let its forward "
                "take one (1 for tokens, 0 for padding), or give the model with a loss of its own."
            )
        inputs["attention_mask"] = mask
    if "use_cache" in names:
        inputs["use_cache"] = False
    return inputs

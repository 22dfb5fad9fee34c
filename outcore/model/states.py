"""Recurrent states of one sequence, counted before any weight is there: the model's own code runs on two tokens on the
meta device and leaves tensors in transformers' cache. Experts, whose code looks at values, are passed over.

Cost: nothing where no layer keeps states, otherwise under a second and no memory."""

from __future__ import annotations

from typing import Any

from outcore.model.forward import accepted_names


def state_numels(model: Any, config: Any) -> tuple[int, int] | None:
    """(numbers in the model's type, numbers in fp32) of what layers keep beside keys and values; None where they keep
    some that cannot be counted. `model`: on the meta device; it is in bf16 and without experts afterwards."""
    import torch
    from transformers import DynamicCache
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    class Empty(DynamicCache):
        """Knows that no token came before, also where no layer keeps keys."""

        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 0

        def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
            return query_length, 0

    try:
        cache = Empty(config=config.get_text_config(decoder=True))
    except AttributeError:  # a config of other parts than layers
        return None
    layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    if not layers:
        return 0, 0
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "experts":
            module.forward = lambda hidden, *args, **more: torch.zeros_like(hidden)
    name = "cache_params" if "cache_params" in accepted_names(model)[0] else "past_key_values"
    ids = torch.zeros((1, 2), dtype=torch.long, device="meta")
    try:
        with torch.no_grad():
            model.to(torch.bfloat16).eval()(input_ids=ids, use_cache=True, **{name: cache})
    except Exception:  # any model's own code may fail in any way without values
        return None
    held = [value for layer in layers for value in vars(layer).values() if isinstance(value, dict)]
    states = [state for of_one in held for state in of_one.values() if isinstance(state, torch.Tensor)]
    wide = sum(state.numel() for state in states if state.dtype == torch.float32)
    return (sum(state.numel() for state in states) - wide, wide) if states else None

"""How attention learns of the documents in packed rows: by their borders or by masks. Decided when an engine is built.

By their borders (`outcore.model.packed.trial`), documents cost what they would cost alone and there is no mask of
T x T; this needs sdpa attention in a model that passes two trials (`outcore.model.packed.trial`). Everything else goes
on with masks, with the reason said once. On the CPU the same borders become masks within each layer."""

from __future__ import annotations

import logging

import torch

from outcore.flow.check.trial import tiny_copy
from outcore.model import LoadedModel
from outcore.model.forward import attention_of, unwrap
from outcore.model.packed import takes_packed_attention, why_masks_differ, why_no_kernel
from outcore.model.weights import seeded_cpu

logger = logging.getLogger(__name__)


def attention_to_packed_rows(
    loaded: LoadedModel, device: torch.device, dtype: torch.dtype, *, wanted: bool = True, trial: bool = True
) -> str:
    """Have the model attend to packed rows by their borders where it can; in words, what it does ('' when it does not
    come up). `wanted`: whether the choice of attention was left to us; `trial`: first on a tiny copy."""
    causal = unwrap(loaded.model)
    if attention_of(causal) != "sdpa" or loaded.abilities.isolation != "position_ids":
        return ""
    if not wanted:
        return "masks, as asked"
    if device.type == "cuda" and dtype not in (torch.bfloat16, torch.float16):
        return "masks (torch's variable-length kernel computes in bf16 and fp16)"
    why = why_no_kernel(loaded.config, device, dtype) if device.type == "cuda" else ""
    if not why and trial:
        try:
            with seeded_cpu(0, "stream trial"):
                tiny = tiny_copy(loaded).model
        except Exception as error:  # any model's own code may fail in any way on a shrunken config
            why = f"a tiny copy of it could not be built to try it ({type(error).__name__}: {error})"
        else:
            why = why_masks_differ(tiny)
    why = why or takes_packed_attention(causal)
    if why:
        logger.warning("packed rows are computed with masks: %s", why)
        return f"masks ({why})"
    return "variable-length flash attention" if device.type == "cuda" else "masks, made in each layer (no GPU)"

"""May this model attend to packed rows without masks? Tried before it does.

Two questions. Does borders' attention mean to this model what its masks mean: a tiny copy of it is run on the CPU with
both (a model that cuts rows into chunks, or bends its mask in its own code, does not pass). And, on a GPU, does torch's
kernel compute it there: random queries, keys and values with the model's own heads, forward and backward, beside the
masked result in fp32. A fraction of a second each."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from outcore.model.packed.borders import PACKED_ATTENTION, borders_known, borders_of, mask_of
from outcore.model.trial import DOCUMENTS, TOLERANCE, VOCAB
from outcore.model.weights import seeded_cpu

KERNEL_TOLERANCE = 0.02
"""Share of the norm of what is compared: rounding to bf16 makes 0.003 of it, another mask 0.2 and more."""
TRIAL_LENGTHS = ((1, 130, 37, 88), (200, 56))
"""Documents of two rows: a single token, less and more than the kernel's blocks, longer than the window."""
TRIAL_WINDOW = 48


def takes_packed_attention(model: nn.Module) -> str:
    """Have `model` use the packed attention from now on; the reason where transformers does not let it, else ''."""
    from outcore.model.packed.attention import register

    register()
    change: Callable[[str], None] | None = getattr(model, "set_attn_implementation", None)
    if change is None:
        return "it is not a transformers model"
    before = attention_names(model)
    try:
        change(PACKED_ATTENTION)
    except (ValueError, ImportError, KeyError) as error:
        return f"transformers does not give it another attention ({error})"
    if attention_names(model) != {PACKED_ATTENTION}:
        change(next(iter(before)))
        return "transformers does not give it another attention"
    return ""


def attention_names(model: nn.Module) -> set[str]:
    """The attention implementations of all its parts."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return {str(config._attn_implementation) for config in configs if hasattr(config, "_attn_implementation")}  # pyright: ignore[reportOptionalMemberAccess]


def why_masks_differ(tiny: nn.Module) -> str:
    """Reason, in words; '' when a tiny model in fp32 on the CPU gives the same logits with borders as with masks; it
    is changed."""
    with seeded_cpu(0, "packed trial"):
        ids = torch.randint(2, VOCAB, (len(DOCUMENTS), sum(DOCUMENTS[0])))
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in DOCUMENTS])

    def logits() -> torch.Tensor:
        return tiny(input_ids=ids, position_ids=positions, use_cache=False).logits

    tiny.eval()
    try:
        with torch.no_grad():
            masked = logits()
            if why := takes_packed_attention(tiny):
                return why
            with borders_known(borders_of(positions)):
                packed = logits()
    except Exception as error:  # any model's own code may fail in any way on a mask it does not expect
        line = next(iter(str(error).strip().splitlines()), "")[:200]
        return f"its tiny copy fails without a mask ({type(error).__name__}: {line})"
    off = float((packed - masked).abs().max() / masked.std().clamp(min=1e-12))
    return (
        "" if off <= TOLERANCE else f"without a mask the logits of its tiny copy are off by {off:.1e} of their spread"
    )


def why_no_kernel(config: Any, device: torch.device, dtype: torch.dtype) -> str:
    """Reason, in words; '' when the kernel gives what masks give, with heads as in a transformers config, on a GPU;
    else the reason."""
    from outcore.model.packed.attention import kernel_takes

    text = config.get_text_config(decoder=True)

    def number(*names: str) -> Any:
        return next((value for name in names if (value := getattr(text, name, None))), 0)

    heads = number("num_attention_heads")
    if not heads:
        return "its config does not tell how many heads it has"
    kv_heads = number("num_key_value_heads") or heads
    latent = number("qk_nope_head_dim") + number("qk_rope_head_dim")  # multi-head latent attention
    width = latent or number("head_dim") or number("hidden_size") // heads
    of_values = (number("v_head_dim") if latent else 0) or width
    dropout = number("attention_dropout", "attn_pdrop")
    query = torch.empty((1, heads, 2, width), dtype=dtype, device=device)
    key, value = (query.new_empty((1, kv_heads, 2, n)) for n in (width, of_values))
    if not kernel_takes(query, key, value, dropout, {}):
        return (
            f"torch's variable-length attention does not take heads of {width}, their values of {of_values}, {heads} "
            f"for {kv_heads}, dropout {dropout}"
        )
    try:
        for window in (None, TRIAL_WINDOW):
            off = kernel_error(device, dtype, heads, kv_heads, width, window)
            if not off <= KERNEL_TOLERANCE:
                return f"torch's variable-length attention is off by {off:.1e} there"
    except (RuntimeError, NotImplementedError) as error:
        line = next(iter(str(error).strip().splitlines()), "")[:200]
        return f"torch's variable-length attention does not run there ({type(error).__name__}: {line})"
    return ""


def kernel_error(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, width: int, window: int | None
) -> float:
    """Largest of the errors of output and gradients, each relative to its norm."""
    from outcore.model.packed.attention import attend

    generator = torch.Generator().manual_seed(0)
    rows, length = len(TRIAL_LENGTHS), sum(TRIAL_LENGTHS[0])
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in TRIAL_LENGTHS])
    found = borders_of(positions)
    assert found is not None
    borders = found.to(device)
    shapes = [(rows, n, length, width) for n in (heads, kv_heads, kv_heads)]
    inputs = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    grad = torch.randn((rows, length, heads, width), generator=generator).to(device, dtype)
    layer: Any = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True)

    def run(mask: torch.Tensor, kind: torch.dtype) -> list[torch.Tensor]:
        leaves = [x.to(kind).requires_grad_() for x in inputs]
        with torch.enable_grad():
            output = attend(layer, leaves[0], leaves[1], leaves[2], mask, sliding_window=window)[0]
        return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(kind))]

    expected = run(mask_of(borders, rows, length, window), torch.float32)
    packed = run(borders, dtype)
    errors = [float((a.float() - b).norm() / b.norm()) for a, b in zip(packed, expected, strict=True)]
    return max(errors, key=lambda error: float("inf") if error != error else error)

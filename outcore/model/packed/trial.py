"""May this model attend to packed rows without masks? Tried before it does.

Two questions. Does borders' attention mean to this model what its masks mean: a tiny copy of it is run on the CPU with
both (a model that cuts rows into chunks, or bends its mask in its own code, does not pass). And, on a GPU, does torch's
kernel compute it there: random queries, keys and values with the model's own heads, forward and backward, beside the
masked result in fp32. A fraction of a second each.

Borders: where documents begin in packed rows: borders, a few numbers in place of a mask of T x T. Legend: B rows,
T tokens.

Borders are cumulative lengths of the documents over the flattened micro-batch, 0, ..., B*T, as variable-length kernels
take them: a 1-D int32 tensor, told from every other mask by its type and shape. Each row begins a document.
The total is repeated at the end, which adds documents of no length, so that shapes are few: compiled layers and CUDA
graphs see one, or two, for a run. The number of entries depends on the micro-batch alone, never on what came before.

`borders_known` makes them known to the mask function (`packed_attention`) for the time of a call.

Torch's flash kernel for documents of various lengths that lie one behind another.

Attention over packed rows without a mask of T x T: torch's flash kernel for documents of various lengths.

transformers tells packed documents apart by a mask [B, 1, T, T], with which torch's fused attention cannot take its
flash kernel: every layer reads T x T bytes and computes the whole square. Here the mask is the documents' borders
(`borders`), and attention goes document by document: time grows with the sum of their squared lengths, and there is no
mask. The kernel is the one that torch takes for rows of one document, behind the same operator since torch 2.7, with
the same switch for a deterministic backward (`torch.use_deterministic_algorithms(True)`).

The function and its mask function are registered with transformers as `outcore_sdpa`. Whatever has no borders (rows of
one document, padded rows, sampling) goes to transformers' sdpa as it is, bit by bit. Where the kernel cannot be used
(CPU, fp32, dropout within attention, heads wider than 256) the mask is made from the borders, in each layer anew, and
sdpa does the rest: the same bits as with transformers' own mask. `packed_trial` decides who uses this."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from outcore.model.trial import DOCUMENTS, TOLERANCE, VOCAB
from outcore.model.weights import seeded_cpu

PACKED_ATTENTION = "outcore_sdpa"
"""The attention that takes borders for a mask, among transformers' implementations."""
TOKENS_PER_ENTRY = 256
"""There are at least this many times fewer entries than tokens, whatever the documents, so that most batches of usual
text have one shape. A document of no length costs the backward kernel 128 rows of scratch, and no time to speak of."""
MIN_TOKENS_PER_DOCUMENT = 32
MIN_ENTRIES, FEW_ENTRIES = 16, 64
"""Above FEW_ENTRIES documents shorter than MIN_TOKENS_PER_DOCUMENT on average get a mask: for each document the
backward kernel keeps 128 rows of gradients in fp32, which would outgrow everything else."""

_KNOWN: ContextVar[torch.Tensor | None] = ContextVar("borders of the micro-batch under way", default=None)


def borders_of(position_ids: torch.Tensor) -> torch.Tensor | None:
    """position_ids [B, T] on the CPU -> borders; None for documents so short that a mask serves better.

    A document begins at every row and wherever the position does not go up by one, as transformers sees it."""
    begins = torch.ones(position_ids.shape, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff(dim=-1) != 1
    starts = begins.flatten().nonzero().flatten()
    entries = num_entries(len(starts), begins.numel())
    if entries is None:
        return None
    borders = torch.full((entries,), begins.numel(), dtype=torch.int32)
    borders[: len(starts)] = starts
    return borders


def num_entries(documents: int, tokens: int) -> int | None:
    """Length of the borders of so many documents: a power of two; None when they are too short for them."""
    entries = _power_of_two(max(documents + 1, tokens // TOKENS_PER_ENTRY, MIN_ENTRIES))
    return entries if entries <= max(FEW_ENTRIES, _power_of_two(tokens // MIN_TOKENS_PER_DOCUMENT)) else None


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def are_borders(mask: object) -> bool:
    """Whether what a layer got for a mask are borders."""
    return isinstance(mask, torch.Tensor) and mask.ndim == 1 and mask.dtype == torch.int32


@contextmanager
def borders_known(borders: torch.Tensor | None) -> Iterator[None]:
    """Within this context masks of packed rows are these borders (where the model's attention takes them)."""
    token = _KNOWN.set(borders)
    try:
        yield
    finally:
        _KNOWN.reset(token)


def known_borders() -> torch.Tensor | None:
    """Borders of the micro-batch under way; None where nobody said."""
    return _KNOWN.get()


def mask_of(borders: torch.Tensor, rows: int, length: int, window: int | None = None) -> torch.Tensor:
    """The boolean mask [B, 1, T, T] that borders stand for: causal, within documents and, if given, the window.

    `window`: a token sees itself and the window - 1 tokens before it. Costs B*T*T bytes; asks nothing of the device."""
    places = torch.arange(rows * length, dtype=torch.int32, device=borders.device)
    documents = torch.searchsorted(borders, places, right=True).view(rows, 1, length)
    index = torch.arange(length, device=borders.device)
    near = index[:, None] >= index[None, :]
    if window is not None:
        near = near & (index[None, :] > index[:, None] - window)
    return (documents[..., :, None] == documents[..., None, :]) & near


def by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    scaling: float | None,
    window: int | None,
) -> torch.Tensor:
    """[B, T, H, D] by the variable-length kernel. The longest document is taken to be a whole row, so that it is the
    same number for every batch; the kernel sees for itself where documents end."""
    rows, _, length, _ = query.shape
    flat = [x.transpose(1, 2).reshape(rows * length, x.shape[1], x.shape[3]) for x in (query, key, value)]
    output = torch.ops.aten._flash_attention_forward(
        *flat,
        borders,
        borders,
        length,
        length,
        0.0,
        True,  # causal
        False,
        scale=scaling,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]
    return output.view(rows, length, *output.shape[1:])


KERNEL_TYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM, HEAD_DIM_STEP = 256, 8
"""Heads that the flash kernel takes as they are."""


def register() -> None:
    """Make the name known to transformers; again does no harm."""
    AttentionInterface.register(PACKED_ATTENTION, attend)
    AttentionMaskInterface.register(PACKED_ATTENTION, borders_or_mask)


def borders_or_mask(
    batch_size: int, q_length: int, kv_length: int, *args: Any, attention_mask: torch.Tensor | None = None, **more: Any
) -> torch.Tensor | None:
    """The borders of the micro-batch under way where they say all that the mask would; else sdpa's mask."""
    borders = known_borders()
    # use_vmap: the model adds a rule of its own to the mask, which borders cannot say
    if borders is not None and attention_mask is None and q_length == kv_length and not more.get("use_vmap"):
        return borders
    return sdpa_mask(batch_size, q_length, kv_length, *args, attention_mask=attention_mask, **more)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, H, T, D], key and value [B, H', T, D] -> [B, T, H, D]; as transformers' sdpa but for borders."""
    if are_borders(attention_mask):
        assert attention_mask is not None
        window = more.get("sliding_window")
        if kernel_takes(query, key, value, dropout, more):
            return by_kernel(query, key, value, attention_mask, scaling, window), None
        attention_mask = mask_of(attention_mask, query.shape[0], query.shape[2], window)
    return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)


def kernel_takes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, more: dict[str, Any]
) -> bool:
    """Whether the flash kernel computes what is asked. Shapes and types only: nothing is asked of the device."""
    width = query.shape[-1]
    return (
        has_kernel(query)
        and key.shape == value.shape
        and key.shape[-1] == width <= MAX_HEAD_DIM
        and width % HEAD_DIM_STEP == 0
        and key.shape[2] == query.shape[2]
        and query.shape[1] % key.shape[1] == 0
        and not dropout
        and all(more.get(name) is None for name in ("position_bias", "softcap", "s_aux", "cache"))
    )


def has_kernel(tensor: torch.Tensor) -> bool:
    """Whether the flash kernel is there for tensors of this device and type."""
    return tensor.is_cuda and tensor.dtype in KERNEL_TYPES


KERNEL_TOLERANCE = 0.02
"""Share of the norm of what is compared: rounding to bf16 makes 0.003 of it, another mask 0.2 and more."""
TRIAL_LENGTHS = ((1, 130, 37, 88), (200, 56))
"""Documents of two rows: a single token, less and more than the kernel's blocks, longer than the window."""
TRIAL_WINDOW = 48


def takes_packed_attention(model: nn.Module) -> str:
    """Have `model` use the packed attention from now on; the reason where transformers does not let it, else ''."""

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

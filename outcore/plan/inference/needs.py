"""Parts that inference has to place, counted from a model's shape."""

from __future__ import annotations

from outcore.sizing.inference import AttentionSize, InferenceNeeds, KvSize, LayerSize, PartSize
from outcore.sizing.shape import ModelShape
from outcore.sizing.states import packed_size


def needs_of(
    shape: ModelShape, *, itemsize: int, kv_itemsize: float, experts_apart: bool = False, on_gpu: bool = True
) -> InferenceNeeds:
    """Count the parts to place, from the shape. `experts_apart`: a layer's experts are a part of their own."""
    saved, is_packed = shape.layer_saved_bytes(itemsize), bool(shape.quantize)
    in_experts = shape.expert_params if experts_apart and shape.is_moe else (0,) * shape.num_layers
    layers, sizes = list[PartSize](), list[tuple[int, int, int]]()
    for i, (n, e) in enumerate(zip(shape.layer_params, in_experts, strict=True)):
        of_experts = packed_size(shape.quantize).of(e) if is_packed else e * itemsize
        own = n * itemsize - saved - of_experts
        layers.append(PartSize(f"layer {i}", own, True, (n - e) * itemsize if is_packed else 0))
        if e:
            expanded = e * itemsize if is_packed else 0
            layers.append(PartSize(f"layer {i} experts", of_experts, True, expanded, is_experts=True))
            sizes.append((of_experts // shape.num_experts, shape.num_experts, expanded // shape.num_experts))
    if shape.tied:
        ends = {"embedding and head": shape.embedding_params + shape.head_params}
    else:
        ends = {"embedding": shape.embedding_params, "head": shape.head_params}
    first, *last = (
        _end(shape, name, params * itemsize, kind, itemsize, on_gpu)
        for (name, params), kind in zip(ends.items(), shape.packed_ends)
    )
    windows = [window for window, _ in shape.windows] or [None]
    attentions = tuple(
        AttentionSize(
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.head_dim,
            window,
            shape.fused_attention,
            shape.fused_attention and itemsize < 4,
        )
        for window in windows
    )
    layer = LayerSize(shape.hidden_size, shape.ffn_width, attentions, shape.experts_per_token)
    kv = kv_of(shape, kv_itemsize)
    states = InferenceNeeds.COPIES_WITH_GUESSES * state_bytes_of(shape, itemsize)
    needs = InferenceNeeds(
        (first, *layers, *last), kv, layer, shape.vocab_size, itemsize, kv_itemsize < itemsize, state_bytes=states
    )
    return needs.with_experts(sizes)


def _end(shape: ModelShape, name: str, size_bytes: int, kind: str, itemsize: int, on_gpu: bool) -> PartSize:
    """Embedding or head, its matrix in the packed format `kind` if it is in one."""
    if not kind:
        return PartSize(name, size_bytes, False, is_rows=name == "embedding")
    from outcore.flow.weights import InPlaceProducts  # torch, which sizes of other models do not wait for

    numel = shape.head_weight_numel
    expanded = min(numel, InPlaceProducts.EXPANDED_NUMEL) if on_gpu else numel
    saved = numel * itemsize - packed_size(kind).of(numel)
    return PartSize(name, size_bytes - saved, False, expanded * itemsize, is_rows=name == "embedding")


def state_bytes_of(shape: ModelShape, itemsize: int) -> int:
    """Bytes of one answer's recurrent states; 0 where they are not known, which `words_of` says."""
    own, wide = shape.states or (0, 0)
    return own * itemsize + wide * 4


def kv_of(shape: ModelShape, itemsize: float) -> KvSize:
    """Keys and values of a token, `itemsize` bytes a number."""
    of_layer = 2 * shape.num_kv_heads * shape.head_dim * itemsize
    windows = shape.windows or ((None, shape.num_layers),)
    return KvSize(tuple((window, round(layers * of_layer)) for window, layers in windows))

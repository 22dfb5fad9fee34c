"""Tiny random models of transformers' image-text architectures, and batches with pictures for them.

Nothing goes by a model's name: a batch is found by offering pixels in the few forms that processors give until
`get_image_features` takes one, and its features are counted to know how many placeholders stand for a picture."""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from outcore.hf.layer import is_streamed
from outcore.model.trial import VOCAB, shrink_config

STEPS, LR, TOLERANCE = 3, 0.05, 1e-6
Batch = dict[str, torch.Tensor]
MOST_PARAMS = 40_000_000
"""A "tiny" model that is larger has a part whose sizes are fixed."""
SMALL = {
    "image_size": 56, "patch_size": 14, "depth": 2, "num_heads": 4, "embed_dim": 64, "num_position_embeddings": 64,
    "projection_dim": 64, "d_model": 64, "mm_tokens_per_image": 4, "encoder_hidden_size": 64, "resampler_n_latents": 8,
    "num_query_tokens": 4,
}  # fmt: skip
"""Sizes of towers that no text model has."""
AFTER = {
    "out_hidden_size": 64,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 1],
    "image_grid_pinpoints": [[56, 112], [112, 56]],
    "vision_feature_layers": [-1, -2],
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
}


def architectures() -> list[str]:
    """Model types with an image-text-to-text model, by name."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def tiny(name: str) -> Any:
    """A random model of this type without dropout."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(name, **PUBLISHED.get(name, {}))
    blind = {key: kind for key, kind in config.sub_configs.items() if "vision" in key and getattr(config, key) is None}
    if blind:  # by default it is made without its tower
        config = AutoConfig.for_model(name, **{key: kind() for key, kind in blind.items()})
    for part in _parts(config):
        for field, value in SMALL.items():
            if type(getattr(part, field, None)) is int and not (part is config and field == "num_heads"):
                setattr(part, field, value)
    config = shrink_config(config)
    for part in _parts(config):
        for field, value in AFTER.items():
            if getattr(part, field, None) is not None:
                setattr(part, field, value)
        if hasattr(part, "fullatt_block_indexes"):  # windows of so many pixels; others count patches
            part.window_size = 56
        rope = getattr(part, "rope_parameters", None)
        if isinstance(rope, dict):
            half = int(8 * rope.get("partial_rotary_factor", 1))
            rope.update(mrope_section=[(half + 1) // 3, (half + 1) // 3, half - 2 * ((half + 1) // 3)])
    for field in ("image_token_id", "image_token_index"):
        if getattr(config, field, 0) is None:
            setattr(config, field, VOCAB - 1)
    _special_tokens_within(config)
    with torch.device("meta"):
        num_params = sum(p.numel() for p in AutoModelForImageTextToText.from_config(config).parameters())
    if num_params > MOST_PARAMS:
        raise ValueError(f"a small one still has {num_params / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:  # pictures must matter
                p.normal_(0.0, 1.0 / p.shape[-1] ** 0.5)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.float()


def _parts(config: Any) -> Iterator[Any]:
    """The config and those nested in it."""
    yield config
    for part in vars(config).values():
        if hasattr(part, "get_text_config"):
            yield from _parts(part)


def _special_tokens_within(config: Any) -> None:
    """Have tokens beyond a small vocabulary be its last ones."""
    moved: dict[int, int] = {}
    for part in _parts(config):
        for field, value in vars(part).items():
            if "token" in field and type(value) is int and value >= VOCAB:
                setattr(part, field, moved.setdefault(value, VOCAB - 1 - len(moved)))


def batches(model: Any) -> list[Batch]:
    """Two ragged micro-batches: two padded rows with a picture or two; one row with another number of pictures."""
    generator = torch.Generator().manual_seed(1)
    form = _form_that_runs(model, generator)
    rows = [_row(model, [form(at) for at in which], n, generator) for which, n in (((0,), 7), ((1,), 9), ((2, 0), 5))]
    return [_joined(rows[:2], model), _joined(rows[2:], model)]


Form = Callable[[int], Batch]
"""Pixels of picture 0, 1 or 2."""


def _form_that_runs(model: Any, generator: torch.Generator) -> Form:
    said = list[str]()
    for form in _forms(model, generator):
        try:
            for number in (0, 1, 2):
                _num_placeholders(model, form(number))
        except Exception as error:
            said.append(f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}")
            continue
        return form
    raise ValueError(f"no known form of pixels is taken ({'; '.join(list(dict.fromkeys(said))[:2])})")


def _forms(model: Any, generator: torch.Generator) -> Iterator[Form]:
    vision, wanted = _vision_config(model.config), _features_arguments(model)
    patch = _side(_field(vision, "patch_size", 14))
    size = _side(_field(vision, "image_size", 4 * patch))

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def of_patches(grids: list[tuple[int, int]], shape: Callable[[int], tuple[int, ...]]) -> Form:
        def form(number: int) -> Batch:
            (h, w), n = grids[number], grids[number][0] * grids[number][1]
            across = torch.stack(torch.meshgrid(torch.arange(w), torch.arange(h), indexing="xy"), -1).reshape(1, n, 2)
            other = {
                "image_grid_thw": torch.tensor([[1, h, w]]), "image_grid_hw": torch.tensor([[h, w]]),
                "target_sizes": torch.tensor([[h, w]]), "spatial_shapes": torch.tensor([[h, w]]),
                "pixel_attention_mask": torch.ones(1, n, dtype=torch.long), "image_position_ids": across,
                "image_merge_sizes": torch.tensor([_field(vision, "spatial_merge_size", 2)]),
            }  # fmt: skip
            return {"pixel_values": noise(*shape(n)), **{k: v for k, v in other.items() if k in wanted}}

        return form

    if wanted & {"image_grid_thw", "image_grid_hw", "target_sizes", "spatial_shapes", "image_position_ids"}:
        for grids in ([(4, 4), (4, 8), (8, 4)], [(6, 6)] * 3, [(4, 4)] * 3, [(2, 2)] * 3):
            joined = _field(vision, "pooling_kernel_size", 1) ** 2  # patches that a processor puts in one
            for depth in dict.fromkeys((_field(vision, "temporal_patch_size", 1), 2, 1, joined)):
                width = 3 * depth * patch * patch
                if "image_position_ids" not in wanted:  # which has a row for each picture, as its patches then have
                    yield of_patches(grids, lambda n, width=width: (n, width))
                if len(set(grids)) == 1:  # rows of patches: of pictures of one size
                    yield of_patches(grids, lambda n, width=width: (1, n, width))
                yield of_patches(grids, lambda n, depth=depth: (n, depth, patch, patch, 3))
            yield of_patches(grids, lambda n: (n, 3, patch, patch))
            yield of_patches(grids, lambda n: (1, 3, patch, n * patch))
    for side in dict.fromkeys((size, 4 * patch, 8 * patch)):
        sizes = {"image_sizes": torch.tensor([[side, side]])} if "image_sizes" in wanted else {}
        wide = {"image_sizes": torch.tensor([[side, 2 * side]])} if "image_sizes" in wanted else {}
        yield lambda _, side=side: {"pixel_values": noise(1, 3, side, side)}
        ids = {"qformer_input_ids": torch.full((1, 3), 2)} if "qformer_input_ids" in wanted else {}
        yield lambda _, side=side, more=sizes | ids: {"pixel_values": noise(1, 3, side, side), **more}
        yield lambda _, side=side, more=wide: {"pixel_values": noise(1, 3, 3, side, side), **more}
        yield lambda _, side=side: {"pixel_values": noise(1, 1, 3, side, side)}


def _features_arguments(model: Any) -> set[str]:
    """What `get_image_features` takes, and what `forward` takes besides."""
    found = set(inspect.signature(model.forward).parameters)
    for owner in (model, getattr(model, "model", None)):
        if owner is not None and hasattr(owner, "get_image_features"):
            own = set(inspect.signature(owner.get_image_features).parameters)
            found = own | (found & {"image_grid_thw"}) if "args" not in own else found
    return found


def _num_placeholders(model: Any, pixels: Batch) -> int:
    features = getattr(model, "get_image_features", None) or model.base_model.get_image_features
    wanted = inspect.signature(features).parameters
    takes_all = "args" in wanted or "kwargs" in wanted
    with torch.no_grad():
        found = features(**{k: v for k, v in pixels.items() if k in wanted or takes_all})
    found = getattr(found, "pooler_output", found)
    found = list(found) if isinstance(found, (list, tuple)) else [found]
    width = model.get_input_embeddings().weight.shape[1]
    total = sum(part.numel() for part in found)
    if total % width:
        raise ValueError(f"features of {[tuple(part.shape) for part in found]} are not as wide as the text's, {width}")
    return total // width


def _row(model: Any, pictures: list[Batch], num_text: int, generator: torch.Generator) -> Batch:
    """Text, and for each picture its placeholders between the marks that a model may have for its borders."""

    def text(n: int) -> list[int]:
        return torch.randint(5, VOCAB // 2, (n,), generator=generator).tolist()

    tokens = text(2)
    start, end = (_field(model.config, name, None) for name in ("vision_start_token_id", "vision_end_token_id"))
    for pixels in pictures:
        n = _num_placeholders(model, pixels)
        tokens += [*([start] if start is not None else text(1)), *[_image_token(model.config)] * n]
        tokens += [end] if end is not None else text(1)
    ids = torch.tensor([[*tokens, *text(num_text)]])
    by_row = len(pictures[0]["pixel_values"].shape) == 5 and pictures[0]["pixel_values"].shape[:2] == (1, 1)
    joined = {k: torch.cat([one[k] for one in pictures], 1 if by_row else 0) for k in pictures[0]}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **joined}


def _joined(rows: list[Batch], model: Any) -> Batch:
    """One batch, padded on the right; labels leave out padding and placeholders."""
    longest = max(row["input_ids"].shape[1] for row in rows)
    found: Batch = {}
    for name in rows[0]:
        parts = [row[name] for row in rows]
        if name in ("input_ids", "attention_mask"):
            parts = [nn.functional.pad(part, (0, longest - part.shape[1])) for part in parts]
        found[name] = torch.cat(parts)
    is_picture = found["input_ids"] == _image_token(model.config)
    found["labels"] = found["input_ids"].masked_fill(is_picture | (found["attention_mask"] == 0), -100)
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in inspect.signature(model.forward).parameters:
            found[name] = is_picture.long()
    return found


def _image_token(config: Any) -> int:
    for name in ("image_token_id", "image_token_index", "im_patch_id", "image_patch_id", "media_placeholder_token_id"):
        if isinstance(token := getattr(config, name, None), int):
            return token
    raise ValueError("its config tells no token that stands for a picture")


def _vision_config(config: Any) -> Any:
    for name in ("vision_config", "vision_tower_config", "vit_config"):
        if (found := getattr(config, name, None)) is not None:
            return found
    thinker = getattr(config, "thinker_config", None)
    return config if thinker is None else _vision_config(thinker)


def _side(size: Any) -> int:
    return size if isinstance(size, int) else max(size)


def _field(config: Any, name: str, otherwise: Any) -> Any:
    try:
        found = getattr(config, name, None)
    except AttributeError:
        found = None
    return otherwise if found is None else found


def try_pictures(name: str) -> dict[str, Any]:
    """The record of one model type: `unbuilt` says why it could not be tried, `streams` why it does not stream (''
    when it does), `steps` and `answer` what differs from plain transformers ('' for nothing)."""
    import outcore.hf
    from outcore.flow import StreamUnsupported

    record: dict[str, Any] = {"name": name}
    try:
        model = tiny(name)
        data = batches(model)
        model(**data[0])
    except Exception as error:
        return record | {"unbuilt": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"}
    try:
        streamed = outcore.hf.stream(copy.deepcopy(model))
    except StreamUnsupported as error:
        return record | {"streams": str(error)}
    record |= {"streams": "", "lists": len({type(layer) for layer in streamed.modules() if is_streamed(layer)})}
    try:
        record["answer"] = _answers_differ(model, streamed, data[1])
        record["steps"] = _steps_differ(model, streamed, data)
    except Exception as error:
        record["crash"] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
        record["trace"] = traceback.format_exc(limit=-6)
    return record


def _answers_differ(model: Any, streamed: Any, batch: Batch) -> str:
    """Greedy answers about one row's pictures."""
    asked = {name: value for name, value in batch.items() if name != "labels"}
    told = {"do_sample": False, "max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
    told["suppress_tokens"] = [_image_token(model.config)]  # which may not come without its picture
    plain, ours = (one.eval().generate(**asked, **told) for one in (model, streamed))
    return "" if torch.equal(plain, ours) else f"WRONG: answers {plain.tolist()} and {ours.tolist()} differ"


def _steps_differ(model: Any, streamed: Any, data: list[Batch]) -> str:
    """Three steps of SGD of two micro-batches each, everything trained."""
    for one in (model, streamed):
        torch.manual_seed(2)  # some draw dropout without a module that could be told not to
        one.train()
        sgd = torch.optim.SGD((p for p in one.parameters() if p.requires_grad), lr=LR)
        for _ in range(STEPS):
            for batch in data:
                one(**batch, use_cache=False).loss.backward()
            torch.nn.utils.clip_grad_norm_(one.parameters(), 1.0)
            sgd.step()
            sgd.zero_grad()
    far, where = max(
        ((p.detach() - q.detach()).abs().max().item(), name)
        for (name, p), q in zip(model.named_parameters(), streamed.parameters(), strict=True)
    )
    return "" if far <= TOLERANCE else f"WRONG: {where} ends {far:.1e} apart"

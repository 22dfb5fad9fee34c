"""The index of a published checkpoint: name -> entry, whatever it is quantized with.

Ways in which published safetensors checkpoints are quantized, by the `quantization_config` of their config.json.

Each takes the tensors that belong to it out of the places that are left and gives entries. Numbers are rearranged,
never changed: what a plane holds is what the checkpoint holds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outcore.formats.checkpoint.places import (
    Entry,
    ExpandedEntry,
    PackedEntry,
    Parts,
    PlainEntry,
    TensorPlace,
    safetensors_places,
)
from outcore.formats.ggml import packed_format
from outcore.formats.packed import PackedSpec
from outcore.formats.plain import FP4_VALUES

Places = dict[str, TensorPlace]
Found = dict[str, Entry]
PER_WORD = 8
"""Codes of 4 bits in an int32."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which field of an int32 holds output 0..7 (AutoAWQ, `packing_utils`)."""
SCALE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


def take(places: Places, stem: str, names: Mapping[str, str]) -> dict[str, TensorPlace]:
    """The places `stem` + suffix for each (part, suffix), removed from `places`; those that exist."""
    return {part: places.pop(stem + suffix) for part, suffix in names.items() if stem + suffix in places}


def stems(places: Places, suffix: str) -> list[str]:
    """Beginnings of the names that end in `suffix`."""
    return [name.removesuffix(suffix) for name in places if name.endswith(suffix)]


def fields(words: torch.Tensor) -> torch.Tensor:
    """int32 [..., n] -> uint8 [..., n, 8]: its 4-bit fields, the lowest first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & 0xF).to(torch.uint8)


def in_pairs(codes: torch.Tensor) -> torch.Tensor:
    """4-bit codes [..., 2 n] -> bytes [..., n], the first in the low half."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


# --- FP8


def fp8(places: Places, config: dict[str, Any]) -> Found:
    """Blocks of rows and columns with a scale each (DeepSeek, Qwen), or a scale for each row or for the whole."""
    found: Found = {}
    for suffix in (".weight_scale_inv", ".weight_scale"):
        for stem in stems(places, suffix):
            weight = places.get(stem + ".weight")
            if weight is None or weight.dtype != torch.float8_e4m3fn or len(weight.shape) != 2:
                continue
            parts = take(places, stem, {"codes": ".weight", "scale": suffix})
            take(places, stem, {"input": ".input_scale"})  # of activations: they stay in 16 bits here
            found[stem + ".weight"] = _fp8_entry(weight.shape, parts, config.get("weight_block_size"))
    return found


def _fp8_entry(shape: tuple[int, ...], parts: Mapping[str, TensorPlace], block: list[int] | None) -> Entry:
    (rows, columns), grid = shape, parts["scale"].shape
    per_row = -(-rows // grid[0]) if len(grid) == 2 else rows
    per_column = -(-columns // grid[1]) if len(grid) == 2 else columns
    if block is not None and len(grid) == 2:
        per_row, per_column = block

    def run_scales(parts: Parts, num_runs: int) -> torch.Tensor:
        scale = parts["scale"].float().reshape(grid if len(grid) == 2 else (-1, 1))
        scale = scale.expand(rows, -1) if len(scale) == 1 else scale.repeat_interleave(per_row, 0)[:rows]
        return scale[:, :num_runs]

    if columns % per_column:
        why = f"FP8 blocks of {per_column} columns do not divide its {columns}"

        def values(parts: Parts) -> torch.Tensor:
            scale = run_scales(parts, -(-columns // per_column)).repeat_interleave(per_column, 1)[:, :columns]
            return parts["codes"].float() * scale

        return ExpandedEntry(shape, why, parts, values)
    spec = PackedSpec(packed_format(f"fp8_{per_column}"), shape)
    return PackedEntry(spec, parts, lambda parts: (parts["codes"], run_scales(parts, columns // per_column)))


# --- MXFP4


def mxfp4(places: Places, config: dict[str, Any]) -> Found:
    """gpt-oss: stacked experts [experts, out, in], which the model holds as [experts, in, out]."""
    found: Found = {}
    for stem in stems(places, "_blocks"):
        if stem + "_scales" in places:
            parts = take(places, stem, {"codes": "_blocks", "exponent": "_scales"})
            *outer, groups, per_group = parts["codes"].shape
            spec = PackedSpec(packed_format("mxfp4"), (*outer, groups * per_group * 2), is_transposed=True)
            found[stem] = PackedEntry(spec, parts, lambda parts: (parts["codes"], parts["exponent"]))
    return found


# --- integers of 4 bits


def _int4_entry(
    shape: tuple[int, int],
    parts: Mapping[str, TensorPlace],
    groups: int,
    planes: Callable[[Parts], tuple[torch.Tensor, ...]],
    *,
    has_zero: bool,
) -> Entry:
    block = shape[1] // groups
    name = f"int4_{block}_{SCALE_NAMES[parts['scale'].dtype]}{'_zero' if has_zero else ''}"
    return PackedEntry(PackedSpec(packed_format(name), shape), parts, planes)


def awq(places: Places, config: dict[str, Any]) -> Found:
    """qweight [in, out / 8] in AWQ's order, a zero for each group."""
    _only_4_bits(config, "AWQ", config.get("bits", 4))

    def planes(parts: Parts) -> tuple[torch.Tensor, ...]:
        codes, zero = (fields(parts[name])[..., AWQ_ORDER].flatten(1).t() for name in ("codes", "zero"))
        return in_pairs(codes.contiguous()), parts["scale"].t(), zero

    found: Found = {}
    for stem in stems(places, ".qweight"):
        parts = take(places, stem, {"codes": ".qweight", "zero": ".qzeros", "scale": ".scales"})
        shape = (parts["codes"].shape[1] * PER_WORD, parts["codes"].shape[0])
        found[stem + ".weight"] = _int4_entry(shape, parts, parts["scale"].shape[0], planes, has_zero=True)
    return found


def gptq(places: Places, config: dict[str, Any]) -> Found:
    """qweight [in / 8, out], zeros stored less one (format "gptq") or as they are ("gptq_v2")."""
    _only_4_bits(config, "GPTQ", config.get("bits", 4))
    above = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def planes(parts: Parts) -> tuple[torch.Tensor, ...]:
        codes = fields(parts["codes"].t()).flatten(1)
        zero = fields(parts["zero"]).flatten(1).t() + above
        return in_pairs(codes), parts["scale"].t(), zero

    found: Found = {}
    for stem in stems(places, ".qweight"):
        names = {"codes": ".qweight", "zero": ".qzeros", "scale": ".scales", "order": ".g_idx"}
        parts = take(places, stem, names)
        shape, groups = (parts["codes"].shape[1], parts["codes"].shape[0] * PER_WORD), parts["scale"].shape[0]
        if (order := parts.pop("order", None)) is not None and not _in_order(order.read(), shape[1] // groups):
            found[stem + ".weight"] = _act_order(shape, {**parts, "order": order}, planes)
        else:
            found[stem + ".weight"] = _int4_entry(shape, parts, groups, planes, has_zero=True)
    return found


def _in_order(groups: torch.Tensor, block: int) -> bool:
    return torch.equal(groups.long(), torch.arange(len(groups)) // block)


def _act_order(
    shape: tuple[int, int], parts: Mapping[str, TensorPlace], planes: Callable[[Parts], tuple[torch.Tensor, ...]]
) -> Entry:
    def values(parts: Parts) -> torch.Tensor:
        codes = fields(parts["codes"].t()).flatten(1).float()
        _, scale, zero = planes(parts)
        order = parts["order"].long()
        return (codes - zero.float()[:, order]) * scale.float()[:, order]

    return ExpandedEntry(shape, "GPTQ with act-order: columns of a group are not neighbours", parts, values)


def compressed_tensors(places: Places, config: dict[str, Any]) -> Found:
    """pack-quantized (4 bits), float-quantized (FP8), nvfp4-pack-quantized."""
    kind, groups = config.get("format"), config.get("config_groups") or {}
    if kind in ("float-quantized", "naive-quantized"):
        return fp8(places, {})
    if kind == "nvfp4-pack-quantized":
        return _nvfp4(places)
    if kind != "pack-quantized":
        raise RuntimeError(
            f"its weights are stored by compressed-tensors as {kind!r}. Known are pack-quantized, float-quantized and "
            "nvfp4-pack-quantized; take another checkpoint of this model"
        )
    for group in groups.values():
        _only_4_bits(config, "compressed-tensors", (group.get("weights") or {}).get("num_bits", 4))
    found: Found = {}
    for stem in stems(places, ".weight_packed"):
        names = {"codes": ".weight_packed", "zero": ".weight_zero_point", "scale": ".weight_scale"}
        shape_place = places.pop(stem + ".weight_shape", None)
        parts, order = take(places, stem, names), places.pop(stem + ".weight_g_idx", None)
        rows, words = parts["codes"].shape
        shape = tuple(shape_place.read().tolist()) if shape_place is not None else (rows, words * PER_WORD)
        if order is not None:
            raise RuntimeError(f"{stem}: groups in the order of activations (weight_g_idx) are not supported")
        planes = partial(_compressed_planes, columns=shape[1])
        entry = _int4_entry(shape, parts, parts["scale"].shape[1], planes, has_zero="zero" in parts)
        found[stem + ".weight"] = entry
    return found


def _compressed_planes(parts: Parts, columns: int) -> tuple[torch.Tensor, ...]:
    codes, scale = fields(parts["codes"]).flatten(1)[:, :columns], parts["scale"]
    if "zero" not in parts:
        return in_pairs(codes), scale
    zero = fields(parts["zero"].t()).flatten(1).t()[: len(scale)]  # packed along the rows
    return in_pairs(codes), scale, zero


def _nvfp4(places: Places) -> Found:
    def values(parts: Parts) -> torch.Tensor:
        codes = parts["codes"]
        both = torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(1).long()
        scale = parts["scale"].float() / parts["global"].float()
        block = both.shape[1] // scale.shape[1]
        return torch.tensor(FP4_VALUES)[both] * scale.repeat_interleave(block, 1)

    found: Found = {}
    for stem in stems(places, ".weight_packed"):
        names = {"codes": ".weight_packed", "scale": ".weight_scale", "global": ".weight_global_scale"}
        parts = take(places, stem, names)
        take(places, stem, {"input": ".input_global_scale"})
        rows, half = parts["codes"].shape
        found[stem + ".weight"] = ExpandedEntry((rows, 2 * half), "NVFP4", parts, values)
    return found


def _only_4_bits(config: dict[str, Any], what: str, bits: int) -> None:
    if bits != 4:
        raise RuntimeError(f"its weights are stored by {what} in {bits} bits; only 4 are read. Take another checkpoint")


# --- bitsandbytes


def bitsandbytes(places: Places, config: dict[str, Any]) -> Found:
    """NF4, with absmax plain or quantized once more; int8 by rows (LLM.int8)."""
    found: Found = {}
    for stem in stems(places, ".weight.quant_state.bitsandbytes__nf4"):
        names = {"codes": ".weight", "absmax": ".weight.absmax", "nested": ".weight.nested_absmax"}
        names |= {"map": ".weight.nested_quant_map", "state": ".weight.quant_state.bitsandbytes__nf4"}
        parts = take(places, stem, names)
        take(places, stem, {"table": ".weight.quant_map"})
        state = json.loads(bytes(parts["state"].read().tolist()))
        if state["blocksize"] != packed_format("nf4").block:
            raise RuntimeError(f"{stem}: NF4 in blocks of {state['blocksize']}; only 64 are read")
        spec = PackedSpec(packed_format("nf4"), tuple(state["shape"]))
        found[stem + ".weight"] = PackedEntry(spec, parts, partial(_nf4_planes, state=state))
    for stem in stems(places, ".SCB"):
        parts = take(places, stem, {"codes": ".weight", "scale": ".SCB"})
        take(places, stem, {"kind": ".weight_format"})
        shape = parts["codes"].shape

        def planes(parts: Parts) -> tuple[torch.Tensor, ...]:
            return parts["codes"], parts["scale"].float() / 127

        found[stem + ".weight"] = PackedEntry(PackedSpec(packed_format(f"int8_{shape[1]}"), shape), parts, planes)
    if other := stems(places, ".weight.quant_state.bitsandbytes__fp4"):
        raise RuntimeError(f"{other[0]} is stored by bitsandbytes as FP4; only NF4 and int8 are read")
    return found


def _nf4_planes(parts: Parts, state: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    absmax = parts["absmax"]
    if "nested" in parts:  # 8-bit indices of a table, times a scale for each run, plus the mean
        runs = parts["nested"].float().repeat_interleave(state["nested_blocksize"])[: absmax.numel()]
        absmax = parts["map"].float()[absmax.long()] * runs + state["nested_offset"]
    return parts["codes"], absmax


METHODS: dict[str, Callable[[Places, dict[str, Any]], Found]] = {
    "fp8": fp8,
    "mxfp4": mxfp4,
    "awq": awq,
    "gptq": gptq,
    "compressed-tensors": compressed_tensors,
    "bitsandbytes": bitsandbytes,
}
"""Readers by `quant_method`."""


@dataclass(frozen=True)
class PackedCheckpoint:
    """Every weight of a checkpoint by the name that it has without quantization."""

    entries: dict[str, Entry]
    method: str
    """Text for people: the method that it is quantized with."""
    notes: tuple[str, ...] = field(default=())
    """Lines for people: what is worth knowing of it."""

    @property
    def formats(self) -> dict[str, int]:
        """Weights in each packed format."""
        return dict(Counter(e.spec.format.name for e in self.entries.values() if isinstance(e, PackedEntry)))


def open_safetensors(files: Iterable[Path], quantization: dict[str, Any]) -> PackedCheckpoint:
    """Index the files of a checkpoint whose config.json has this `quantization_config`.

    RuntimeError for a method that is not known, naming those that are, and for files that are damaged."""
    if why := why_not_read(quantization):
        raise RuntimeError(why)
    method = method_of(quantization)
    places = safetensors_places(files)
    entries = METHODS[method](places, quantization)
    entries |= {name: PlainEntry(place) for name, place in places.items()}
    return PackedCheckpoint(entries, method, notes_on(entries))


GGUF = "gguf"
"""Method that the configuration of a GGUF file names."""
KEPT = ("Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
"""Types of a GGUF file that stay packed."""


def method_of(quantization: Mapping[str, Any]) -> str:
    """The quantization method of a `quantization_config`; '' when it names none."""
    method = str(quantization.get("quant_method") or "").lower().removeprefix("quantizationmethod.")
    if not method and (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
        return "bitsandbytes"  # its older configurations do not say so
    return method


def why_not_read(quantization: Mapping[str, Any]) -> str:
    """Why a checkpoint with this `quantization_config` cannot be read; '' when its method is known."""
    method = method_of(quantization)
    if method in METHODS or method == GGUF:
        return ""
    return (
        f"its weights are stored quantized by {method or 'an unknown method'!r}; known are {', '.join(METHODS)}. Take "
        "a checkpoint in one of these, or one that is not quantized"
    )


def usual_format(quantization: Mapping[str, Any]) -> str | None:
    """The format that most weights of such a checkpoint have: for sizes before its files are read. None: not packed."""
    method = method_of(quantization)
    if method == GGUF:
        return _kept(quantization["format"]) or None
    if method == "bitsandbytes":
        return "int8" if quantization.get("load_in_8bit") else "nf4"
    is_fp8 = method == "fp8" or quantization.get("format") in ("float-quantized", "naive-quantized")
    return "fp8_128" if is_fp8 else "mxfp4" if method == "mxfp4" else "int4_128_fp16_zero"


def formats_of_ends(quantization: Mapping[str, Any]) -> tuple[str, str]:
    """Formats of the matrices of embedding and head, which only GGUF files pack; '': not packed."""
    embedding, head = quantization["ends"] if method_of(quantization) == GGUF else ("", "")
    return _kept(embedding), _kept(head)


def _kept(kind: str) -> str:
    return kind if kind.upper() in KEPT else ""


def notes_on(entries: dict[str, Entry]) -> tuple[str, ...]:
    """Count the weights of a checkpoint that are expanded when they are read; a line for each reason."""
    whys = Counter(entry.why for entry in entries.values() if isinstance(entry, ExpandedEntry) and entry.why)
    return tuple(f"{count} weights are expanded to 16 bits when they are read: {why}" for why, count in whys.items())

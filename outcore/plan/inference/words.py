"""A plan of inference for people and as data, with what one change would give.

A model's place while it answers: the engine's own rule (`outcore.sizing.inference`), on sizes counted from the
config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from outcore.common.quantities import GB, GIB, format_gib, format_s
from outcore.common.words import own_command
from outcore.model import shape_from_config
from outcore.plan.hardware import Hardware
from outcore.plan.inference.needs import kv_of, needs_of, state_bytes_of
from outcore.plan.inference.speed import InferencePlan
from outcore.sizing.inference import (
    PRESETS,
    InferenceLimits,
    InferenceNeeds,
    InPlaceRates,
    Placement,
    compute_in_place,
    place_by_experts,
    place_inference,
)
from outcore.sizing.shape import ModelShape
from outcore.sizing.states import QUANTIZED

PACKED_GB_PER_S = (1980.0, 740.0)
"""Rates of the arithmetic of a GPU's kernels on packed weights for one row and for 2 to 16, beside which the bytes come
from its memory, where no start measured both: 0.4 and 0.2 of what copies reached on an H100, 2,970 GB/s: NF4, a large
matrix (docs/formats.md). Cards with slower memory have slower arithmetic, too: there it is assumed."""


def plan_inference(
    shape: ModelShape,
    hardware: Hardware,
    *,
    preset: str = "balanced",
    precision: str = "bf16",
    context: int | None = None,
    kv_format: str = "same",
    quantize: str = "none",
    uses_nvme: bool = True,
    cpu_tokens: int | None = None,
    cpu_rates: Mapping[str, InPlaceRates] | None = None,
    expert_cache_gib: float | None = None,
) -> InferencePlan:
    """Place and time. `cpu_rates`: of layers that the CPU computes, by packed format or precision, in passes of up to
    `cpu_tokens` (None: as many as pay). `expert_cache_gib`: memory for experts that come as they are chosen; 0: with
    their layers; None: a rule decides. DoesNotFit (a ValueError) in numbers; ValueError for a model that cannot be
    streamed."""
    shape = shape.packed(quantize)
    if shape.is_encoder_decoder:
        raise ValueError("an encoder-decoder has two stacks of layers; only decoder-only models are served.")
    itemsize = 4 if precision == "fp32" else 2
    kv_itemsize = _kv_itemsize(shape, itemsize, kv_format)
    sizes: dict[str, Any] = {"itemsize": itemsize, "kv_itemsize": kv_itemsize, "on_gpu": not hardware.is_cpu}
    needs = needs_of(shape, **sizes)
    if context is not None and shape.max_positions is not None and context > shape.max_positions:
        raise ValueError(f"context is {context}, but the model knows {shape.max_positions} positions.")
    context = PRESETS[preset].usual_context(context, shape.max_positions, shape.short_positions)
    limits = InferenceLimits(
        None if hardware.is_cpu else hardware.vram_bytes - hardware.gpu_context_bytes,
        max(0, hardware.ram_bytes - InferenceLimits.RAM_LEFT_BYTES),
        uses_nvme and hardware.nvme_free_bytes > sum(part.size_bytes for part in needs.parts),
        context,
        expert_bytes=int(expert_cache_gib * GIB) if expert_cache_gib else None,
        reads_ram=not hardware.is_cpu,
        runs_few=cpu_tokens != 0,
    )
    if of_one := state_bytes_of(shape, itemsize):
        needs, limits = needs.with_snapshots(of_one, limits)

    def apart() -> InferenceNeeds | None:
        if not shape.is_moe:
            return None
        found = needs_of(shape, experts_apart=True, **sizes)
        return replace(found, num_snapshots=needs.num_snapshots)

    is_asked = None if expert_cache_gib is None else expert_cache_gib > 0
    placement, placed = place_by_experts(
        lambda asked: place_inference(asked, limits, preset),
        needs,
        apart,
        is_asked=is_asked,
        on_gpu=not hardware.is_cpu,
        runs_few=limits.runs_few and not hardware.is_cpu and expert_cache_gib is None and bool(shape.quantize),
        max_sequences=limits.max_sequences,
    )
    if placed is not needs:
        placement = replace(placement, cpu_rates=(cpu_rates or {}).get(quantize))
    if is_asked and placed is needs:
        why = "all weights stay where they are used" if shape.is_moe else "this model has no experts"
        raise ValueError(f"expert_cache_gib does nothing: {why}. Leave it out.")
    if shape.quantize and not hardware.is_cpu:
        read_s = 1 / (hardware.memory_gb_per_s * GB)
        packed_s = {rows: read_s + 1 / (PACKED_GB_PER_S[rows > 1] * GB) for rows in Placement.PACKED_ROWS}
        placement = replace(placement, packed_s=packed_s)
    kind = quantize if shape.quantize else precision
    if kind != "fp32" and not hardware.is_cpu and not shape.is_moe:  # experts that are multiplied together travel
        travel = {p.part: p.size_bytes for p in placement.parts if p.home == "ram" and p.part.startswith("layer")}
        rates = (cpu_rates or {}).get(kind)
        if rates is not None:
            placement = compute_in_place(placement, travel, rates, cpu_tokens)
        elif travel and cpu_tokens != 0:
            reason = f"layers on the CPU are not counted: no start of a model in {kind} measured them here"
            placement = replace(placement, reasons=(*placement.reasons, reason))
    return InferencePlan(shape, hardware, placement, needs.kv, itemsize)


def plan_of(
    name: str,
    config: Any,
    hardware: Hardware,
    placement: Placement,
    itemsize: int,
    *,
    kv_format: str = "same",
    packed: str | None = None,
) -> InferencePlan:
    """The plan's view of a model that is placed already. `packed`: the format of its layers, None in 16 bits and more.
    ValueError for one whose layers cannot be counted."""
    shape = shape_from_config(name, config, adapts=False).packed(packed)
    kv = kv_of(shape, _kv_itemsize(shape, itemsize, kv_format))
    return InferencePlan(shape, hardware, placement, kv, itemsize)


def _kv_itemsize(shape: ModelShape, itemsize: int, kv_format: str) -> float:
    """Bytes of a number among keys and values: 8 bits have a scale of fp32 for each head's key and value."""
    return itemsize if kv_format == "same" else 1 + 4 / shape.head_dim


STREAMS = (1, 8, 64, 256)
CONTEXTS = (1024, 32768)
PROMPT_TOKENS = 512


FOR_ONE = "--aim latency"
"""Change that is made for one answer: named before another that gives no more than a tenth beyond it."""
LOSES = 10.0
"""Times as fast for one answer, from which another aim is named though many answers gain nothing by it."""


@dataclass(frozen=True)
class Tried:
    """The plan with one thing changed."""

    words: str
    plan: InferencePlan
    is_packed: bool = False
    """Whether it packs the weights, which costs quality."""

    @property
    def alone(self) -> float:
        """Tokens a second of one answer, without a hit among experts."""
        return self.plan.tokens_per_s(1, 1024)


def _tried(plan: InferencePlan, **asked: Any) -> Iterator[Tried]:
    """Plan with each change that can be made of how the model is run."""
    tried: dict[str, dict[str, Any]] = {f"--aim {name}": {"preset": name} for name in PRESETS}
    if asked.get("quantize", "none") == "none" and plan.shape.matrices:
        for name, size in QUANTIZED.items():
            tried[f"--quantize {name} ({size.bits:g} bits: {size.quality})"] = {"quantize": name}
    tried["--kv_format int8"] = {"kv_format": "int8"}
    if asked.get("context") is None or asked["context"] > 2048:
        tried["--context 2048"] = {"context": 2048}
    for words, change in tried.items():
        try:
            yield Tried(words, plan_inference(plan.shape, plan.hardware, **{**asked, **change}), "quantize" in change)
        except ValueError:
            continue


def changes(plan: InferencePlan, **asked: Any) -> list[str]:
    """Tell what single changes would give: those by which many answers gain at least a tenth, packed weights also where
    one answer does, another change where one answer gains much more."""
    now, alone, found = plan.tokens_per_s(64, 1024), plan.tokens_per_s(1, 1024), []
    for change in _tried(plan, **asked):
        rate, one = change.plan.tokens_per_s(64, 1024), change.alone
        is_said = change.is_packed or one >= LOSES * alone
        if rate >= 1.1 * now or (is_said and one >= 1.1 * alone):
            size = format_gib(sum(part.size_bytes for part in change.plan.placement.parts))
            weights = f"{size} of weights, " if change.is_packed else ""
            weights += f"{one:,.1f} tokens/s at 1 answer instead of {alone:,.1f}, " if is_said else ""
            found.append(f"{change.words}: {weights}{rate:,.1f} tokens/s at 64 answers instead of {now:,.1f}")
    return found


def _of_one(plan: InferencePlan, **asked: Any) -> list[str]:
    """One answer's speed, and the change that helps it most, if that gives a tenth."""
    alone, first_s = plan.tokens_per_s(1, 1024), plan.first_token_s(PROMPT_TOKENS)
    rate = _range(plan, 1, 1024)
    lines = [
        f"one answer: {rate} tokens/s, its first word after {format_s(first_s)} ({PROMPT_TOKENS} tokens of prompt)"
    ]
    best = max(_tried(plan, **asked), key=lambda change: change.alone * (1.1 if change.words == FOR_ONE else 1.0))
    if best.alone >= 1.1 * alone:
        lines.append(f"what helps it most: {best.words}, {best.alone:,.1f} tokens/s ({best.alone / alone:.1f} x)")
    return lines


def words_of(plan: InferencePlan, **asked: Any) -> list[str]:
    """The plan, for people."""
    placement = plan.placement
    lines = [f"{plan.shape.name} on {plan.hardware.name}", *_of_one(plan, **asked), *placement.lines()]
    one = plan.decode(1, 1024)
    terms = ", ".join(f"{name} {format_s(value)}" for name, value in {**one.terms, **one.between}.items())
    lines.append(f"a pass for one answer: {format_s(one.seconds)} ({terms}); {one.binding} binds")
    lengths = sorted({PROMPT_TOKENS, 8192, placement.context_tokens})
    first = [f"{n:,} tokens {format_s(plan.first_token_s(n))}" for n in lengths if n <= placement.context_tokens]
    lines.append(f"first word after a prompt of {', '.join(first)}")
    for context in CONTEXTS:
        if plan.shape.max_positions is not None and context > plan.shape.max_positions:
            continue
        most = plan.most_streams(context)
        if not most:
            lines.append(f"{context:,} tokens of context do not fit: keys and values need more room")
            continue
        rates = ", ".join(f"{n}: {_range(plan, n, context)}" for n in STREAMS)
        lines.append(f"tokens/s at {context:,} tokens of context, by answers at once: {rates} (room for {most:,})")
    if placement.experts is not None:
        lines.append("the lower rates are those without a hit, the higher ones with all experts chosen on the device")
    most = plan.kv.most_tokens(placement.kv_bytes, placement.chunk_tokens)
    limits = [limit for limit in (most, plan.shape.max_positions) if limit is not None]
    full = f"{min(limits):,} tokens" if limits else "not limited by them"
    seen = [f"{layers} layers see {window:,} tokens only" for window, layers in plan.shape.windows if window]
    lines.append(
        f"keys and values: {format_gib(plan.kv.token_bytes)} a token{''.join(f' ({words})' for words in seen)}; "
        f"the longest context is {full}"
    )
    if plan.shape.states is None:
        lines.append("recurrent states are not counted: this model keeps them where they cannot be seen before it runs")
    if not plan.hardware.is_cpu and not plan.hardware.compute_tflops:
        lines.append("the GPU's rate is not known: passes of many tokens may take longer (--tflops)")
    lines += [f"change {change}" for change in changes(plan, **asked)]
    if nominal := plan.hardware.nominal:
        rates = ", ".join(f"{name.removesuffix('_gb_per_s')} {rate:g}" for name, rate in nominal.items())
        lines.append(f"nominal, not measured: {rates} GB/s; {own_command('probe')} measures them")
    return lines


def _range(plan: InferencePlan, streams: int, context: int) -> str:
    """Tokens a second, from no hit to nothing but hits where experts come as they are chosen."""
    rates = [plan.tokens_per_s(streams, context, hit_rate) for hit_rate in plan.hit_rates]
    return " to ".join(f"{rate:,.1f}" for rate in rates)


def to_json(plan: InferencePlan) -> dict[str, Any]:
    """The plan as data, without what does not fit."""
    placement, one = plan.placement, plan.decode(1, 1024)
    return {
        "model": plan.shape.name,
        "machine": plan.hardware.name,
        "nominal_gb_per_s": plan.hardware.nominal,
        "preset": placement.preset.name,
        "bytes": {home: placement.bytes_at(home) for home in ("vram", "ram", "nvme")},
        "vram_bytes": placement.vram_bytes,
        "kv": {"home": placement.kv_home, "bytes": placement.kv_bytes, "token_bytes": plan.kv.token_bytes},
        "state_bytes": None if plan.shape.states is None else state_bytes_of(plan.shape, plan.itemsize),
        "context_tokens": placement.context_tokens,
        "first_token_s": {
            str(n): plan.first_token_s(n) for n in (PROMPT_TOKENS, 8192) if n <= placement.context_tokens
        },
        "tokens_per_s": {
            str(c): {str(n): plan.tokens_per_s(n, c) for n in STREAMS}
            for c in CONTEXTS
            if plan.most_streams(c) and c <= (plan.shape.max_positions or c)
        },
        "tokens_per_s_by_hit_rate": {str(rate): plan.tokens_per_s(1, 1024, rate) for rate in plan.hit_rates},
        "pass": {"terms_s": {**one.terms, **one.between}, "binds": one.binding},
    }

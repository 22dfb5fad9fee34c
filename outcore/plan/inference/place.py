"""A model's place while it answers: the engine's own rule (`outcore.sizing.inference`), on sizes counted from the
config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outcore.common.quantities import GB, GIB
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

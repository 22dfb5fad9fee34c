"""A mixture's experts in passes of few tokens: computed where they lie, without the host; a trial decides."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from outcore.common.quantities import format_s
from outcore.flow import ModelParts
from outcore.flow.experts import FewTokens, experts_of
from outcore.flow.weights import HandOver, InPlaceProducts
from outcore.formats import PackedProducts, PackedSpec
from outcore.infer.engine import InferenceEngine
from outcore.infer.opening.limits import runs_graphs
from outcore.infer.opening.settings import InferSettings
from outcore.infer.opening.weights import OpenedWeights
from outcore.optim import ExtensionUnavailable, default_num_threads
from outcore.sizing.inference import Placement


def can_run_few(units: ModelParts, settings: InferSettings) -> bool:
    """Whether a CPU can compute the model's experts for a GPU: all are packed along what their products sum over, and
    there are kernels for them."""
    found = []
    for layer, part in zip(units.layers, units.layer_units, strict=True):
        module: Any = experts_of(layer)
        for slot in part.layout.packed_slots:
            spec = slot.packed
            if spec is not None and len(spec.shape) == 3:
                one = PackedSpec(spec.format, spec.shape[1:])
                is_along = module is not None and spec.is_transposed == module.is_transposed
                found.append(is_along and PackedProducts.can(one))
    return settings.cpu_tokens != 0 and runs_graphs(settings) and bool(found) and all(found)


def open_few_tokens(
    units: ModelParts,
    weights: OpenedWeights,
    placement: Placement,
    in_place: InPlaceProducts | None,
    settings: InferSettings,
    device: torch.device,
    undo: ExitStack,
) -> tuple[FewTokens | None, Placement]:
    """(what runs a mixture's experts on few tokens, None where nothing does; the placement with the reason).
    `in_place`: what computes whole layers on the CPU, whose way there is shared. `undo` ends the threads."""
    cache, size = weights.experts, placement.experts
    if cache is None or size is None or device.type != "cuda":
        return None, placement
    with ExitStack() as own:
        try:
            if settings.cpu_tokens == 0 or not runs_graphs(settings):
                raise ValueError("--cpu_tokens 0" if settings.cpu_tokens == 0 else "--compile off")
            assert weights.chosen is not None
            hand_over = None if in_place is None else in_place.hand_over
            if hand_over is None:
                products = own.enter_context(PackedProducts(default_num_threads()))
                with torch.cuda.device(device):
                    hand_over = HandOver(products, device)
                own.callback(torch.cuda.synchronize, device)  # it may still wait for the CPU
            few = FewTokens(units, cache, weights.homes, hand_over, weights.chosen, *(size.few_tokens, size.of_token))
        except (ValueError, ExtensionUnavailable, TimeoutError, RuntimeError, MemoryError) as error:
            return None, placement.because(f"the host brings the experts that each layer chose: {error}")
        undo.push(own.pop_all())
    cache.fill()
    return few, placement


def is_worth_it(own_s: float, host_s: float) -> bool:
    """Whether experts are computed where they lie, if a pass takes so long that way and so long with a host between."""
    return own_s < host_s


def try_few_tokens(engine: InferenceEngine, few: FewTokens, placement: Placement) -> Placement:
    """The placement once a pass of one token has been timed both ways, of which the shorter one stays."""
    few.is_on = False
    host_s = engine.pass_s(1)
    few.is_on = True
    own_s = engine.pass_s(1)
    few.is_on = is_worth_it(own_s, host_s)
    who = "their experts where they lie, GPU and CPU at once" if few.is_on else "experts that the host brings"
    return placement.because(
        f"passes of up to {few.most_tokens} tokens run with {who}: {format_s(own_s)} for one token where they lie, "
        f"{format_s(host_s)} brought, tried at the start"
    )

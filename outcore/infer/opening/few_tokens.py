"""A mixture's experts in passes of few tokens: computed where they lie, without the host; a trial decides."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from outcore.common.quantities import counted, format_s
from outcore.flow.experts import FewTokens
from outcore.flow.weights import HandOver, InPlaceProducts
from outcore.formats import PackedProducts
from outcore.infer.engine import InferenceEngine
from outcore.infer.opening.limits import runs_graphs
from outcore.infer.opening.place import PlacedModel
from outcore.infer.opening.weights import OpenedWeights
from outcore.infer.passes import SmallPasses
from outcore.optim import ExtensionUnavailable, default_num_threads
from outcore.sizing.inference import Placement

LINKED = (0, 4, 3, 2)
"""One in so many of the experts in no slot is read by the GPU in RAM, beside the CPU, which are tried; 0: none."""


def open_few_tokens(
    placed: PlacedModel, weights: OpenedWeights, in_place: InPlaceProducts | None, undo: ExitStack
) -> tuple[FewTokens | None, Placement]:
    """(what runs a mixture's experts on few tokens, None where nothing does; the placement with the reason).
    `in_place`: what computes whole layers on the CPU, whose way there is shared. `undo` ends the threads."""
    placement, settings, device = placed.placement, placed.settings, placed.device
    cache, size = weights.experts, placement.experts
    if cache is None or size is None or device.type != "cuda":
        return None, placement
    with ExitStack() as own:
        try:
            if settings.cpu_tokens == 0 or settings.deterministic or not runs_graphs(settings, placed.way, device):
                raise ValueError("--cpu_tokens 0" if settings.cpu_tokens == 0 else "passes run without CUDA graphs")
            assert weights.chosen is not None
            hand_over = None if in_place is None else in_place.hand_over
            if hand_over is None:
                products = own.enter_context(PackedProducts(default_num_threads()))
                with torch.cuda.device(device):
                    hand_over = HandOver(products, device)
                own.callback(torch.cuda.synchronize, device)  # it may still wait for the CPU
            few = FewTokens(
                placed.units, cache, weights.homes, hand_over, weights.chosen, *(size.few_tokens, size.of_token)
            )
        except (ValueError, ExtensionUnavailable, TimeoutError, RuntimeError, MemoryError) as error:
            return None, _by_host(placement, str(error))
        undo.push(own.pop_all())
    cache.fill()
    return few, placement


def is_worth_it(own_s: float, host_s: float) -> bool:
    """Whether experts are computed where they lie, if a pass takes so long that way and so long with a host between."""
    return own_s < host_s


def try_few_tokens(engine: InferenceEngine, few: FewTokens, small: SmallPasses, placement: Placement) -> Placement:
    """The placement once a pass of one token has been timed both ways, of which the shorter one stays."""
    own_s: dict[int, float] = {}
    for every in LINKED if few.can_link else LINKED[:1]:
        if small.why_not:
            few.run(None)
            return _by_host(placement, small.why_not)
        few.run(every)
        own_s[every] = min(engine.pass_s(1) for _ in range(2))
    best = min(own_s, key=lambda every: own_s[every])
    few.run(None)
    host_s = engine.pass_s(1)
    few.decide(best, is_on=is_worth_it(own_s[best], host_s))
    is_linked_in_vain = few.can_link and not few.every
    if is_linked_in_vain:
        few.unlink()
    if is_linked_in_vain or not few.is_on:  # graphs of the way that lost keep memory
        small.forget()
    who = "their experts where they lie, GPU and CPU at once" if few.is_on else "experts that the host brings"
    tried = ", ".join(
        f"{format_s(seconds)} {f'with one in {every} over the link' if every else 'with all others on the CPU'}"
        for every, seconds in own_s.items()
    )
    return placement.because(
        f"passes of up to {counted(few.most_tokens, 'token')} run with {who}: a pass of one token took {tried}, and "
        f"{format_s(host_s)} where the host brings them",
        runs_few=few.is_on,
    )


def _by_host(placement: Placement, why: str) -> Placement:
    return placement.because(f"the host brings the experts that each layer chose: {why}", runs_few=False)

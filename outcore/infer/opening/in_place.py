"""Weights computed where they are, packed or 16-bit: a short trial of the CPU's kernels decides for how many rows, and
beside a GPU for which layers; one of the GPU's (`trials`) up to how many tokens of a pass what is there is not
expanded."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch.nn.functional import linear

from outcore.common.quantities import GB, MIB, counted, format_s
from outcore.flow import ModelParts
from outcore.flow.experts import BY_PAIRS
from outcore.flow.layers import GraphPool
from outcore.flow.parts import cpu_specs
from outcore.flow.trace import elapsed_s, has_passed, moment, wait_for
from outcore.flow.weights import HandOver, InPlaceProducts, PackedWeight
from outcore.formats import PackedProducts, PackedSpec, call_of
from outcore.infer.engine import InferenceEngine
from outcore.infer.opening.arrival import ResidentWeights
from outcore.infer.opening.settings import InferSettings
from outcore.infer.opening.trials import TRIAL_BYTES, device_seconds, least_s, num_copies, part_of, specs_of
from outcore.infer.passes import SmallPasses
from outcore.optim import ExtensionUnavailable, default_num_threads
from outcore.sizing.inference import InPlaceRates, Placement, compute_in_place
from outcore.staging import PinnedPool

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
CPU_TRIAL_BYTES = 3 * MIB
"""`TRIAL_BYTES` without a GPU, where the matrix is expanded and multiplied in fp32, too."""
SETTLE_S = 0.05
"""Threads that filled those copies spin for some 15 ms before they sleep, on the cores that are to be measured."""
LINK_BYTES, LINK_COPIES = 64 * MIB, 6
TRIALS, STEPS = 6, 6
"""Trials with whole passes of one size at most, each with a sixth of the layers more or fewer."""
COPIED_SHARE = 1 / 16
"""Share of a layer in 16 bits that lies on the device, too, where the CPU computes it, at most."""
LAUNCH_S = 0.0001
"""Seconds of a layer's small kernels between its products, which compiled layers spare (assumed)."""


def open_in_place(
    units: ModelParts, settings: InferSettings, placement: Placement, device: torch.device, undo: ExitStack
) -> tuple[InPlaceProducts | None, Placement]:
    """(what computes with weights where they are, None where none is packed and nothing else does; the placement with
    that decision). Of packed models, embedding and head are never expanded whole, layers where no kernel multiplies
    them. `undo` ends its threads."""
    specs, of_packed = specs_of(units.all, of_cpu=True), None
    if any(not spec.format.is_plain for spec in specs.values()):
        of_packed = InPlaceProducts(None, {}, device)
    if not specs or settings.deterministic or (device.type == "cpu" and settings.compile == "on"):
        return of_packed, placement
    if device.type == "cpu":
        made, placement = _on_cpu(specs, units, settings, placement, undo)
        return made or of_packed, placement
    packed_s, words = device_seconds(units, device)
    placement = replace(placement, packed_s=packed_s, reasons=(*placement.reasons, *words))
    made, placement = _by_the_cpu(specs, units, settings, placement, device, undo)
    made = made or of_packed
    if made is not None:
        made.device_tokens = placement.packed_tokens
    return made, placement


def _by_the_cpu(
    specs: Mapping[str, PackedSpec],
    units: ModelParts,
    settings: InferSettings,
    placement: Placement,
    device: torch.device,
    undo: ExitStack,
) -> tuple[InPlaceProducts | None, Placement]:
    """`open_in_place` for layers that the CPU computes for a GPU."""
    candidates = _candidates(units, placement)
    spec = _tried(units, candidates)
    if spec is None or settings.cpu_tokens == 0:
        return None, placement
    products, placement = _products(default_num_threads(), placement, undo)
    if products is None:
        return None, placement
    with_kernel = {name: spec for name, spec in specs.items() if PackedProducts.can(spec)}
    with torch.cuda.device(device):  # whose streams and events these are
        try:
            hand_over = HandOver(products, device)
        except (RuntimeError, MemoryError) as error:
            return None, replace(placement, reasons=(*placement.reasons, f"the GPU computes every layer: {error}"))
        undo.callback(torch.cuda.synchronize, device)  # it may still wait for the CPU
        trial = InPlaceProducts(products, dict.fromkeys(with_kernel, ROWS[-1]), device, hand_over)
        rates = InPlaceRates(*_rates(products, spec, device), _hand_over_s(trial, units, spec))
    placement = compute_in_place(placement, candidates, rates, settings.cpu_tokens)
    if placement.cpu_parts:
        return trial, placement
    torch.cuda.synchronize(device)
    products.close()
    return None, placement


def _products(threads: int, placement: Placement, undo: ExitStack) -> tuple[PackedProducts | None, Placement]:
    """(the CPU's kernels, None where there are none; the placement, which then says why)."""
    try:
        return undo.enter_context(PackedProducts(threads)), placement
    except (ExtensionUnavailable, TimeoutError) as error:
        why = f"the CPU has no kernels for these weights: {error}"
        return None, replace(placement, reasons=(*placement.reasons, why))


def try_in_place(
    engine: InferenceEngine,
    arrival: ResidentWeights,
    units: ModelParts,
    placement: Placement,
    small: SmallPasses | None,
) -> Placement:
    """The placement once whole passes have been timed, because one matrix may promise too much: for some numbers of
    tokens as many layers on the CPU as make the pass shortest, near what the rates say; none where a pass gains
    nothing. `arrival` follows it; of `small`'s graphs those of the ways that lost, which keep memory, are let go."""
    names, travelling = list(_candidates(units, placement)), placement.travelling_bytes

    def seconds(count: int, tokens: int) -> float:
        arrival.compute(lambda _: InPlaceRates.evenly(names, count))
        pass_s = min(engine.pass_s(tokens), engine.pass_s(tokens))  # other programs slow one of them at times
        return max(pass_s - InPlaceRates.BETWEEN_S, pass_s / 2)

    without_s = seconds(0, 1)
    told = f"{format_s(without_s)} without layers on the CPU"
    assert placement.cpu_rates is not None
    rates = replace(placement.cpu_rates, link_gb_per_s=travelling / without_s / GB)
    chosen: dict[int, tuple[str, ...]] = {}
    tried: dict[int, tuple[int, int, float]] = {}
    for tokens in sorted(placement.cpu_parts)[::2]:
        most = len(min(chosen.values(), key=len, default=names))
        count, best_s = _shortest(partial(seconds, tokens=tokens), min(most, len(placement.cpu_parts[tokens])), most)
        parts = InPlaceRates.evenly(names, count)
        size = placement.size_of(parts)
        told += f"; with {count} there, {format_s(best_s)} for a pass of {tokens}"
        tried[tokens] = count, size, best_s
        if best_s > rates.WORTH * without_s:
            break
        chosen[tokens] = parts
    reasons = placement.reasons[:-1]  # less what one matrix promised
    if chosen:
        layers = ", ".join(f"{len(parts)} for up to {tokens}" for tokens, parts in chosen.items())
        reasons += (
            f"in passes of up to {counted(max(chosen), 'token')} the CPU computes some of the {len(names)} "
            f"layers that travel, where they are ({layers}); whole passes were tried: {told}",
        )
    else:
        reasons += (f"whole passes were tried: {told}: so the GPU computes every layer",)
    placement = replace(
        placement,
        cpu_parts=chosen,
        cpu_tokens=max(chosen, default=0),
        cpu_rates=rates.as_tried(travelling, tried),
        reasons=reasons,
    )
    arrival.compute(placement.on_cpu)
    if small is not None:
        small.forget(lambda rows, on_cpu: on_cpu == len(placement.on_cpu(rows)))
    return placement


def _shortest(seconds: Callable[[int], float], start: int, most: int) -> tuple[int, float]:
    """(number of layers on the CPU, 1 to `most`, seconds of the shortest pass found): downhill from `start`."""
    step, best, best_s = max(1, start // STEPS), start, seconds(start)
    tried = 1
    for direction in (-step, step):
        while tried < TRIALS and 1 <= best + direction <= most:
            found_s, tried = seconds(best + direction), tried + 1
            if found_s >= best_s:
                break
            best, best_s = best + direction, found_s
        if best != start:
            break
    return best, best_s


def _on_cpu(
    specs: Mapping[str, PackedSpec],
    units: ModelParts,
    settings: InferSettings,
    placement: Placement,
    undo: ExitStack,
) -> tuple[InPlaceProducts | None, Placement]:
    """`open_in_place` where there is no GPU."""
    if settings.cpu_tokens == 0:
        return None, placement
    products, placement = _products(torch.get_num_threads(), placement, undo)
    if products is None:
        return None, placement
    dtype, most, words = units.embed.layout.dtype, {}, []
    for name, spec in specs.items():
        if not PackedProducts.can(spec):
            continue
        if settings.cpu_tokens is not None:
            most[name] = settings.cpu_tokens
            continue
        most[name], kernel_s, dense_s = _most_rows(products, spec, dtype)
        words.append(
            f"{name} up to {counted(most[name], 'token')} ({format_s(kernel_s)} instead of {format_s(dense_s)} for one)"
        )
    reasons = placement.reasons
    if words:
        reasons += (f"weights are multiplied as they are: {', '.join(words)}, measured on one matrix",)
    if any(not spec.format.is_plain for spec in specs.values()):
        for config in units.grouping_configs():
            config._experts_implementation = BY_PAIRS  # otherwise the whole stack would be expanded for every pass
    plain_tokens = max((rows for name, rows in most.items() if specs[name].format.is_plain), default=0)
    made = InPlaceProducts(products, most, torch.device("cpu"), device_tokens=plain_tokens)
    return made, replace(placement, cpu_tokens=max(most.values(), default=0), reasons=reasons)


def _tried(units: ModelParts, candidates: Collection[str]) -> PackedSpec | None:
    """The largest matrix with a kernel of the layers that the CPU may take: a head in another format says nothing of
    them."""
    found = specs_of((part for part in units.layer_units if part.name in candidates), of_cpu=True)
    return max(filter(PackedProducts.can, found.values()), key=lambda s: s.size_bytes, default=None)


def _candidates(units: ModelParts, placement: Placement) -> dict[str, int]:
    """Bytes of layers that the CPU may take, by name: none whose experts are multiplied together, or of whose 16 bits
    more than norms and biases would have to lie on the device, too."""
    travels = {home.part for home in placement.parts if home.home == "ram"}
    deepest, found = 2 if units.grouping_configs() else 3, dict[str, int]()
    for part in units.layer_units:
        specs, layout = cpu_specs(part), part.layout
        shapes = [len(spec.shape) for spec in specs if spec is not None]
        left = sum(slot.numel for slot, spec in zip(layout.slots, specs, strict=True) if spec is None)
        is_small = bool(layout.packed_slots) or left <= layout.numel * COPIED_SHARE
        if part.name in travels and 0 < max(shapes, default=0) <= deepest and is_small:
            found[part.name] = layout.home_bytes
    return found


def _most_rows(products: PackedProducts, spec: PackedSpec, dtype: torch.dtype) -> tuple[int, float, float]:
    """(rows up to which the kernel beats expanding and multiplying, seconds of either for one row)."""
    spec, copies = _copies(spec, CPU_TRIAL_BYTES)
    trial = InPlaceProducts(products, {spec.format.name: ROWS[-1]}, torch.device("cpu"))
    weights = [PackedWeight(spec, spec.planes(data), dtype, trial) for data in copies]
    is_plain = spec.format.is_plain
    values = [weight.expanded() for weight in (weights if is_plain else weights[:1])]
    expand_s = 0.0 if is_plain else least_s(lambda number: weights[number % len(weights)].expanded(values[0]), 2)
    best, firsts = 0, (0.0, 0.0)
    for rows in ROWS:
        x = torch.randn(rows, spec.shape[1]).to(dtype)
        kernel_s = least_s(lambda number, x=x: trial.product(weights[number % len(weights)], x, None), 4)
        dense_s = expand_s + least_s(lambda number, x=x: linear(x, values[number % len(values)]), 2)
        firsts = firsts if rows > 1 else (kernel_s, dense_s)
        if kernel_s >= dense_s:
            break
        best = rows
    return best, *firsts


def _rates(products: PackedProducts, spec: PackedSpec, device: torch.device) -> tuple[dict[int, float], float]:
    """(GB of weights a second of the CPU by rows, GB a second of the link), each while the other is busy: a product
    after the other for as long as copies are under way."""
    spec, copies = _copies(spec, TRIAL_BYTES)
    calls = [call_of(spec, spec.planes(data)) for data in copies]
    target = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    found, link = {}, 0.0
    with PinnedPool(LINK_BYTES, device=device) as pool, pool.lease(LINK_BYTES, "trial of the link") as lease:
        for rows in ROWS:
            x, number = torch.randn(rows, spec.shape[1]), 0
            products.multiply(calls[-1], x)
            began = moment(device)
            wait_for(began, "what was queued before the trial")
            for _ in range(LINK_COPIES):
                target.copy_(lease.tensor, non_blocking=True)
            ended, began_s = moment(device), time.perf_counter()
            while number < 2 or not has_passed(ended):
                products.multiply(calls[number % len(calls)], x)
                number += 1
            found[rows] = number * spec.size_bytes / (time.perf_counter() - began_s) / 1e9
            wait_for(ended, "the trial of the link")
            link = link or LINK_COPIES * LINK_BYTES / elapsed_s(began, ended) / 1e9
    return found, link


def _copies(spec: PackedSpec, most_bytes: int) -> tuple[PackedSpec, list[torch.Tensor]]:
    spec = part_of(spec, most_bytes)
    count = num_copies(spec)
    data = torch.arange(spec.size_bytes, dtype=torch.int32).remainder_(23).add_(48).to(torch.uint8)  # no denormals
    copies = [data.clone() for _ in range(count)]
    time.sleep(SETTLE_S)
    return spec, copies


def _hand_over_s(trial: InPlaceProducts, units: ModelParts, spec: PackedSpec) -> float:
    """Seconds of a layer beside its products: for each matrix what a product of one row of weights takes within a CUDA
    graph, activations to the CPU and the result back, and launches."""
    spec = PackedSpec(spec.format, (1, spec.shape[1]))
    weight = PackedWeight(spec, spec.planes(torch.zeros(spec.size_bytes, dtype=torch.uint8)), torch.bfloat16, trial)
    x, count = torch.zeros(1, spec.shape[1], dtype=units.embed.layout.dtype, device=trial.device), 16

    def there_and_back() -> None:
        for _ in range(count):
            trial.product(weight, x.clone(), None)

    there_and_back()  # makes the kernels
    with GraphPool(trial.device).capture() as graph:
        there_and_back()

    def replayed(number: int) -> None:
        graph.replay()
        torch.cuda.synchronize(trial.device)

    matrices = max(sum(spec is not None for spec in cpu_specs(part)) for part in units.layer_units)
    return matrices * least_s(replayed, 4) / count + LAUNCH_S

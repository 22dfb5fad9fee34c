"""Short trials of products with weights where they are, before a model is opened: of a GPU's kernels, and what other
trials share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch.nn.functional import linear

from outcore.common.quantities import MIB, counted, format_s
from outcore.flow import ModelParts, Part
from outcore.flow.layers import GraphPool
from outcore.flow.parts import cpu_specs
from outcore.flow.weights import InPlaceProducts
from outcore.formats import DeviceProducts, PackedSpec, device_products
from outcore.sizing.inference import Placement

TRIAL_BYTES = 32 * MIB
"""Packed bytes of the matrix that a format is tried on, at most: a tenth of it takes many threads as long to be handed
out as to be read."""
TRIAL_COPIES_BYTES = 128 * MIB
"""Copies of it together, so that they come from memory and not from a cache."""


def device_seconds(units: ModelParts, device: torch.device) -> tuple[dict[int, float], tuple[str, ...]]:
    """(tokens of a pass -> seconds in which the GPU multiplies by a packed byte as it is, up to as many tokens as that
    pays; that in words)."""
    specs = specs_of(part for part in units.layer_units if InPlaceProducts.multiplies(part))
    if not specs:
        return {}, ()
    try:
        products = device_products(device)
    except RuntimeError as error:
        return {}, (f"packed weights are expanded for every pass: {error}",)
    found: dict[int, float] = dict.fromkeys(Placement.PACKED_ROWS, 0.0)
    told = []
    for name, spec in specs.items():
        with torch.cuda.device(device):
            of_format, kernel_s, expanded_s = _device_seconds(products, spec, units.embed.layout.dtype)
        found = {rows: max(found[rows], of_format[rows]) for rows in found if rows in of_format}
        told.append(f"{name} {format_s(kernel_s)} instead of {format_s(expanded_s)} for one")
    if not found:
        return {}, (f"packed weights are expanded for every pass: {', '.join(told)}, measured on one matrix",)
    words = f"in passes of up to {counted(max(found), 'token')} the GPU multiplies packed weights as they are"
    return found, (f"{words}: {', '.join(told)}, measured on one matrix",)


def _device_seconds(
    products: DeviceProducts, spec: PackedSpec, dtype: torch.dtype
) -> tuple[dict[int, float], float, float]:
    """(rows -> seconds of a packed byte in the GPU's kernel, as long as it beats expanding and multiplying; seconds of
    either for one row of the whole matrix)."""
    spec, device = part_of(spec, TRIAL_BYTES), products.device
    copies = [
        spec.planes(data) for data in torch.zeros(num_copies(spec), spec.size_bytes, dtype=torch.uint8, device=device)
    ]
    values = torch.empty(spec.shape, dtype=dtype, device=device)

    def seconds(one: Callable[[list[torch.Tensor]], object]) -> float:
        def each() -> None:
            for planes in copies:
                one(planes)

        each()  # makes the kernels
        with GraphPool(device).capture() as graph:
            each()

        def replayed(number: int) -> None:
            graph.replay()
            torch.cuda.synchronize(device)

        return least_s(replayed, 4) / len(copies)

    def expanded(planes: list[torch.Tensor], x: torch.Tensor) -> None:
        spec.expand_planes(planes, values)
        linear(x, values)

    found, firsts = dict[int, float](), (0.0, 0.0)
    for rows in Placement.PACKED_ROWS:
        x = torch.zeros(rows, spec.shape[1], dtype=dtype, device=device)
        kernel_s = seconds(lambda planes, x=x: products.multiply(spec, planes, x))
        expanded_s = seconds(partial(expanded, x=x))
        firsts = firsts if rows > 1 else (kernel_s, expanded_s)
        if kernel_s >= expanded_s:
            break
        found[rows] = kernel_s / spec.size_bytes
    return found, *firsts


def specs_of(parts: Iterable[Part], *, of_cpu: bool = False) -> dict[str, PackedSpec]:
    """The largest matrix of each packed format, of a stack one. `of_cpu`: also of 16-bit ones that the CPU computes."""
    found: dict[str, PackedSpec] = {}
    for part in parts:
        for one in cpu_specs(part) if of_cpu else [slot.packed for slot in part.layout.packed_slots]:
            if one is None:
                continue
            spec = PackedSpec(one.format, one.shape[-2:])
            known = found.get(spec.format.name)
            if known is None or spec.size_bytes > known.size_bytes:
                found[spec.format.name] = spec
    return found


def part_of(spec: PackedSpec, most_bytes: int) -> PackedSpec:
    """The first rows of a matrix."""
    rows = min(spec.shape[0], max(1, most_bytes // spec.format.row_bytes(spec.shape[1])))
    return PackedSpec(spec.format, (rows, spec.shape[1]))


def num_copies(spec: PackedSpec) -> int:
    """Copies of a matrix that no cache holds."""
    return max(1, min(16, TRIAL_COPIES_BYTES // spec.size_bytes))


def least_s(call: Callable[[int], object], count: int) -> float:
    """Seconds of the fastest call but the first."""
    times = []
    for number in range(count + 1):
        began = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - began)
    return min(times[1:])

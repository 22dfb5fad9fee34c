"""Products of linear layers in float8 beside those in bf16 on a GPU: milliseconds of each product, of rounding the
matrices to 8 bits, and of a whole linear layer there and back.

    python benchmarks/float8_products.py --out float8.json
    python benchmarks/float8_products.py --shapes 8192x4096x14336 --tiles 64x128x4,128x128x8
    python benchmarks/float8_products.py --small            (a dry run on the CPU; its times say nothing)

A shape is tokens x inputs x outputs. Each time is one call's in a CUDA graph of many that take other operands in turn.
`unit`: tensor-wise without fast sums and with scales of one, as torchao computes row-wise products there; their scales
come after. `torch`: matrices rounded by the operations that define it, one after the other; `compiled`: by the
compiler's code for them (where torch can). `GB/s`: two bytes read and one (`both`: two) written a value, so what is
read twice shows. `layer`: there and back with both gradients, `frozen` without the weight's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from packed_products import best_s, graph_s

from outcore.model.forward import LayerProducts, float8, float8_product, float8_rounded
from outcore.model.forward.float8 import FLOAT8

SHAPES = "4096x2048x5632,4096x5632x2048,8192x4096x14336,8192x14336x4096,8192x4096x4096,16384x2048x5632"
BF16 = torch.bfloat16
COPIES = 3
"""Operands that calls take in turn, so that no call finds its own in the cache."""


def seconds(calls: list[Callable[[], object]], device: torch.device) -> float:
    return graph_s(calls * 2) if device.type == "cuda" else best_s(calls, 1)


def of_products(n: int, k: int, m: int, device: torch.device) -> dict[str, float]:
    """Of [n, k] times [m, k]', all ways."""
    left = [torch.randn(n, k, device=device, dtype=BF16) for _ in range(COPIES)]
    right = [torch.randn(m, k, device=device, dtype=BF16) for _ in range(COPIES)]
    pairs = list(zip(left, right, strict=True))
    ways = {"bf16": [partial(torch.nn.functional.linear, a, b) for a, b in pairs]}
    one = torch.ones((), device=device)
    for recipe, wide in (("float8_tensorwise", False), ("float8_tensorwise", True), ("float8_rowwise", False)):
        sides = [(float8_rounded(a, recipe, wide, False), float8_rounded(b, recipe, False, False)) for a, b in pairs]
        name = recipe.removeprefix("float8_") + (" e5m2" if wide else "")
        for fast in (True, False):
            calls = [partial(float8_product, a, b, fast_sums=fast) for a, b in sides]
            ways[name + (" fast" if fast else "")] = calls
        if recipe == "float8_rowwise":
            ways["rowwise unit"] = [
                partial(float8_product, [a[0], one], [b[0], one], fast_sums=False) for a, b in sides
            ]
    found = {}
    for name, calls in ways.items():
        try:
            found[name] = seconds(calls, device) * 1e3
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}", flush=True)
    return found


def in_torch(matrix: torch.Tensor, recipe: str, wide: bool, turned: bool) -> list[torch.Tensor]:
    rows = matrix.t() if turned else matrix
    return float8._rounded(rows, recipe, torch.float8_e5m2 if wide else torch.float8_e4m3fn)


def of_rounding(n: int, k: int, device: torch.device, *, compiled: bool) -> dict[str, float]:
    """Of [n, k] to 8 bits, all ways."""
    matrices = [torch.randn(n, k, device=device, dtype=BF16) for _ in range(COPIES)]
    found = {}
    for recipe in FLOAT8:
        name = recipe.removeprefix("float8_")
        ways = {"": partial(float8_rounded, both=False), " both": partial(float8_rounded, both=True)}
        for label, way in ways.items():
            calls = [partial(way, matrix, recipe, False) for matrix in matrices]
            found[name + label] = seconds(calls, device) * 1e3
        for turned in (False, True):
            label = name + (" turned" if turned else "") + ", torch"
            found[label] = seconds([partial(in_torch, x, recipe, False, turned) for x in matrices], device) * 1e3
            if compiled:
                torch._dynamo.reset()
                way = torch.compile(in_torch, dynamic=False)
                calls = [partial(way, x, recipe, False, turned) for x in matrices]
                found[label.replace("torch", "compiled")] = seconds(calls, device) * 1e3
    return found


def of_layer(n: int, k: int, m: int, device: torch.device) -> dict[str, float]:
    """Of one linear layer, forward and backward, not compiled."""
    found = {}
    for name, frozen in product(("same", *FLOAT8), (True, False)):
        layer = torch.nn.Linear(k, m, bias=False, device=device, dtype=BF16)
        layer.weight.requires_grad_(not frozen)
        products = LayerProducts(name, [torch.nn.Sequential(layer)], device, BF16, tiled=False)
        x = [torch.randn(n, k, device=device, dtype=BF16, requires_grad=True) for _ in range(COPIES)]
        grad = torch.randn(n, m, device=device, dtype=BF16)

        def call(x: torch.Tensor, layer: Any = layer, grad: torch.Tensor = grad, frozen: bool = frozen) -> object:
            return torch.autograd.grad(layer(x), [x] if frozen else [x, layer.weight], grad)

        found[name.removeprefix("float8_") + (" frozen" if frozen else "")] = (
            seconds([partial(call, one) for one in x], device) * 1e3
        )
        products.close()
    return found


def told(title: str, found: dict[str, float], note: Callable[[str, float], str]) -> None:
    print(f"\n{title}", flush=True)
    for name, ms in found.items():
        print(f"  {name:28} {ms:8.3f} ms  {note(name, ms)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--tiles", default="", help="rows x columns x warps of the rounding kernels' programs, tried")
    parser.add_argument("--small", action="store_true", help="a dry run on the CPU")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device, began_s = torch.device("cpu" if options.small else "cuda"), time.perf_counter()
    if options.small:
        options.shapes = "64x48x32"
    else:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}")
    result: dict[str, Any] = {"torch": torch.__version__, "products": {}, "rounding": {}, "layer": {}, "tiles": {}}
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    for n, k, m in shapes:
        for title, sizes in (("output", (n, k, m)), ("gradient of x", (n, m, k)), ("of the weight", (m, n, k))):
            found = of_products(*sizes, device)
            result["products"]["x".join(map(str, sizes))] = found
            work = 2 * sizes[0] * sizes[1] * sizes[2]
            told(f"{title}: {sizes}", found, lambda _, ms, work=work: f"{work / ms / 1e9:6.0f} TFLOPS")
    matrices = list(dict.fromkeys(place for n, k, m in shapes for place in ((n, k), (m, k), (n, m))))
    for number, (n, k) in enumerate(matrices):
        found = of_rounding(n, k, device, compiled=number < 1 and not options.small)
        result["rounding"][f"{n}x{k}"] = found
        told(
            f"rounding {n} x {k}",
            found,
            lambda name, ms, n=n, k=k: f"{n * k * (3 + ('both' in name)) / ms / 1e6:6.0f} GB/s",
        )
    for n, k, m in shapes:
        found = result["layer"][f"{n}x{k}x{m}"] = of_layer(n, k, m, device)
        told(f"layer {n} x {k} x {m}", found, lambda _, ms: "")
    usual = float8.TILE
    for tile in [tuple(map(int, one.split("x"))) for one in options.tiles.split(",") if one]:
        float8.TILE = tile
        for n, k in matrices[:4]:
            x = [torch.randn(n, k, device=device, dtype=BF16) for _ in range(COPIES)]
            ways = {
                f"{recipe} {both}": seconds([partial(float8_rounded, one, recipe, False, both) for one in x], device)
                for recipe, both in product(FLOAT8, (False, True))
            }
            found = result["tiles"][f"{tile} {n}x{k}"] = {name: s * 1e3 for name, s in ways.items()}
            print(f"tile {tile}, {n} x {k}: " + ", ".join(f"{name} {ms:.3f}" for name, ms in found.items()), flush=True)
    float8.TILE = usual
    print(f"\n{time.perf_counter() - began_s:.0f} s")
    if options.out:
        options.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

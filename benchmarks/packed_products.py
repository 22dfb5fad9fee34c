"""Products of packed weights with 1..16 rows on the CPU: time and read rate, beside torch's own packed products.

    python benchmarks/packed_products.py --out products.json                 (all cores)
    python benchmarks/packed_products.py --threads 2 --rows 14336 --columns 4096 --formats nf4,q4_k
    python benchmarks/packed_products.py --peers                             (torch's bf16, int8 and int4 products too)
    python benchmarks/packed_products.py --ggml FOLDER                       (ggml's, of the package libggml-python:
                                          pip install --no-deps --target FOLDER libggml-python)
    python benchmarks/packed_products.py --gpu --out gpu.json                (a GPU's kernels on packed weights there)
    python benchmarks/packed_products.py --gpu --shapes 25600x5120 --tiles 8x32x4,16x32x4/32x8x4,64x8x4

Every call reads another copy of the matrix, together larger than the caches, as a model's layers would be. `share` is
the packed bytes per second over what the memory gives to reads alone, measured in the same run; `over m=1` the time
over that of one row. All is measured in `--rounds` rounds, reads alone before each, and the best round counts: other
work on the machine, or memory that has just been filled, once made the first figure of a format six times too slow
(`worst_ms` is the slowest round's). Targets (issue 26): share 0.85 at one row, 1.4 times its time at four.

On a GPU (32 B's matrices unless told) one CUDA graph runs a product with every copy; `expanded` is the way without the
kernel, expanding a weight and multiplying, and `share` is over the bytes that a copy within the card reads and writes.
`--tiles`: shares of one program for one row, and behind the slash for more (rows x chunks of 16 bytes x warps x
stages); the fastest for each product is told.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from outcore.formats import DeviceProducts, PackedSpec, device_products, packed_format
from outcore.formats.gpu_products import LINES, ProgramTile
from outcore.formats.products import PackedProducts

FORMATS = ("nf4", "int8", "int4_128_fp16", "mxfp4", "q4_0", "q8_0", "q4_k", "q5_k", "q6_k", "bf16", "fp16")
GGML_TYPES = {"q4_0": 2, "q8_0": 8, "q4_k": 12, "q5_k": 13, "q6_k": 14}
"""Numbers of ggml.h."""
GPU_FORMATS = (*FORMATS, "q4_1", "int8_64", "fp8_128")
SHAPES = "5120x5120,25600x5120,5120x25600,1024x5120"
CACHE_BYTES = 512 << 20
"""All copies of a matrix together."""


def best_s(calls: list[Callable[[], object]], repeats: int) -> float:
    """Median seconds of a call, going round the copies; of one thread its own time, whoever else wants the core."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for call in calls:
        call()
    times = []
    for number in range(repeats):
        began_s = clock()
        calls[number % len(calls)]()
        times.append(clock() - began_s)
    return statistics.median(times)


def read_rate(threads: int) -> float:
    """Bytes per second that the memory gives to threads that sum up an array."""
    words = torch.ones(CACHE_BYTES // 8, dtype=torch.int64)
    torch.set_num_threads(threads)
    return words.nbytes / best_s([lambda: words.sum()] * 1, 9)


def copies_of(spec: PackedSpec) -> list[torch.Tensor]:
    """Random bytes in memory of their own, of which no weight or scale is a denormal, whose sums take longer."""
    count = max(2, CACHE_BYTES // spec.size_bytes)
    return [torch.randint(48, 71, (spec.size_bytes,), dtype=torch.uint8) for _ in range(count)]


def ours(args: argparse.Namespace) -> list[dict]:
    found = []
    variants = args.variants.split(",") if args.variants else ["auto"]
    for variant in variants:
        with PackedProducts(args.threads, variant) as products:
            for name in args.formats.split(","):
                spec = PackedSpec(packed_format(name), (args.rows, args.columns))
                copies = copies_of(spec)
                for m in args.m:
                    x = torch.randn(m, args.columns)
                    calls = [partial(products.product, spec, data, x) for data in copies]
                    seconds = best_s(calls, args.repeats)
                    found.append(row(f"{name} ({products.variant})", m, seconds, spec.size_bytes))
    return found


def peers(args: argparse.Namespace) -> list[dict]:
    found = []
    rows, columns = args.rows, args.columns
    torch.set_num_threads(args.threads)
    count = max(2, CACHE_BYTES // (rows * columns))
    int8 = [torch.randint(-128, 127, (rows, columns), dtype=torch.int8) for _ in range(count)]
    scale = torch.rand(rows, dtype=torch.bfloat16)
    wide = [torch.randn(rows, columns, dtype=torch.bfloat16) for _ in range(max(2, count // 2))]
    codes = torch.randint(0, 16, (rows, columns), dtype=torch.int32)
    int4 = [torch._convert_weight_to_int4pack_for_cpu(codes, 1) for _ in range(2 * count)]
    scales = torch.randn(columns // 128, rows, 2, dtype=torch.bfloat16)
    for m in args.m:
        x = torch.randn(m, columns, dtype=torch.bfloat16)
        kinds: dict[str, tuple[list[Callable[[], object]], float]] = {
            "torch bf16": ([lambda w=w, x=x: torch.nn.functional.linear(x, w) for w in wide], 2 * rows * columns),
            "torch int8": ([lambda w=w, x=x: torch._weight_int8pack_mm(x, w, scale) for w in int8], rows * columns),
            "torch int4": (
                [lambda w=w, x=x: torch._weight_int4pack_mm_for_cpu(x, w, 128, scales) for w in int4],
                rows * columns * (0.5 + 4 / 128),
            ),
        }
        found += [row(name, m, best_s(calls, args.repeats), size) for name, (calls, size) in kinds.items()]
    return found


def ggml(args: argparse.Namespace, folder: Path) -> list[dict]:
    """Products of ggml: all copies in one graph, so that its threads start once for them."""

    class Params(ctypes.Structure):
        _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))

    libraries = [
        ctypes.CDLL(str(next(folder.rglob(f"lib{n}.so"))), ctypes.RTLD_GLOBAL) for n in ("ggml-base", "ggml-cpu")
    ]

    def call(name: str, *given: object, returns: type | None = ctypes.c_void_p) -> Any:
        function = getattr(next(library for library in libraries if hasattr(library, name)), name)
        function.restype = returns
        return function(*given)

    found = []
    call("ggml_cpu_init", returns=None)
    for name in [name for name in args.formats.split(",") if name in GGML_TYPES]:
        spec = PackedSpec(packed_format(name), (args.rows, args.columns))
        copies, sizes = copies_of(spec), [ctypes.c_int64(args.columns), ctypes.c_int64(args.rows)]
        for m in args.m:
            room = sum(data.nbytes + 4096 + 4 * m * args.rows for data in copies) + 64 * m * args.columns + (64 << 20)
            context = ctypes.c_void_p(call("ggml_init", Params(room, None, False)))
            x = ctypes.c_void_p(call("ggml_new_tensor_2d", context, 0, sizes[0], ctypes.c_int64(m)))
            values = torch.randn(m, args.columns)
            ctypes.memmove(call("ggml_get_data", x), values.data_ptr(), values.nbytes)
            graph = ctypes.c_void_p(call("ggml_new_graph", context))
            for data in copies:
                weight = ctypes.c_void_p(call("ggml_new_tensor_2d", context, GGML_TYPES[name], *sizes))
                ctypes.memmove(call("ggml_get_data", weight), data.data_ptr(), data.nbytes)
                product = ctypes.c_void_p(call("ggml_mul_mat", context, weight, x))
                call("ggml_build_forward_expand", graph, product, returns=None)
            compute = partial(call, "ggml_graph_compute_with_ctx", context, graph, args.threads, returns=ctypes.c_int)
            seconds = best_s([compute], max(3, args.repeats // 4)) / len(copies)
            found.append(row(f"ggml {name}", m, seconds, spec.size_bytes))
            call("ggml_free", context, returns=None)
    return found


def graph_s(calls: list[Callable[[], object]], repeats: int = 5) -> float:
    """Seconds of one of these calls, all in one CUDA graph; the fastest of the runs."""
    calls[0]()  # compiles
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(repeats):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return min(times[1:]) / len(calls)


def tiles_of(text: str) -> list[ProgramTile]:
    return [ProgramTile(*map(int, one.split("x"))) for one in text.split(",") if one]


def told(tile: ProgramTile) -> str:
    return f"{tile.rows}x{tile.chunks}x{tile.warps}x{tile.stages}"


def expanded(spec: PackedSpec, planes: list[torch.Tensor], value: torch.Tensor, x: torch.Tensor) -> None:
    spec.expand_planes(planes, value)
    torch.nn.functional.linear(x, value)


def on_gpu(args: argparse.Namespace) -> list[dict]:
    device = torch.device("cuda", 0)
    products, found = device_products(device), []
    source, target = (torch.empty(CACHE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    rate = 2 * CACHE_BYTES / graph_s([lambda: target.copy_(source)] * 4)
    print(f"{torch.cuda.get_device_name(device)}, copies move {rate / 1e9:.0f} GB/s\n", flush=True)
    print("| matrix | format | m | us | GB/s | share | expanded us | times | tile |")
    print("|---|---|--:|--:|--:|--:|--:|--:|---|")
    one, more = [*args.tiles.split("/"), ""][:2]
    tiles = {1: tiles_of(one) or [products.tiles[1]], LINES: tiles_of(more) or [products.tiles[LINES]]}
    for shape, name in product(args.shapes.split(","), args.formats.split(",")):
        rows, columns = map(int, shape.split("x"))
        spec = PackedSpec(packed_format(name), (rows, columns))
        assert DeviceProducts.can(spec)
        count = max(2, min(64, CACHE_BYTES // spec.size_bytes))
        data = torch.randint(0, 60, (count, spec.size_bytes), dtype=torch.uint8, device=device)
        copies = [spec.planes(one) for one in data]
        value = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        for m in args.m:
            x = torch.randn(m, columns, dtype=torch.bfloat16, device=device)
            timed = []
            for tile in tiles[1 if m == 1 else LINES]:
                products.tiles[1 if m == 1 else LINES] = tile
                timed.append((graph_s([partial(products.multiply, spec, planes, x) for planes in copies]), tile))
            seconds, tile = min(timed, key=lambda one: one[0])
            slow = float("nan")
            if args.expanded:
                slow = graph_s([partial(expanded, spec, planes, value, x) for planes in copies[:4]])
            entry = row(name, m, seconds, spec.size_bytes)
            entry |= {"shape": shape, "expanded_ms": slow * 1e3, "share": spec.size_bytes / seconds / rate}
            entry["tiles"] = {told(one): s * 1e6 for s, one in timed}
            found.append(entry)
            print(
                f"| {shape} | {name} | {m} | {seconds * 1e6:.1f} | {entry['gb_per_s']:.0f} | {entry['share']:.2f} "
                f"| {slow * 1e6:.1f} | {slow / seconds:.1f} | {told(tile)} |",
                flush=True,
            )
    return [{"copy_gb_per_s": rate / 1e9}, *found]


def row(name: str, m: int, seconds: float, size_bytes: float) -> dict:
    return {"what": name, "m": m, "ms": seconds * 1e3, "gb_per_s": size_bytes / seconds / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=14336)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--formats", help="default: all with a kernel")
    parser.add_argument("--variants", default="", help="avx2,avx512vnni: each of them; default: the best")
    parser.add_argument("--m", type=lambda text: [int(m) for m in text.split(",")], default=[1, 2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--ggml", type=Path, metavar="FOLDER", help="where libggml-python is")
    parser.add_argument("--gpu", action="store_true", help="the GPU's kernels")
    parser.add_argument("--shapes", default=SHAPES, help="rows x columns, on the GPU")
    parser.add_argument("--tiles", default="", help="of the GPU's programs: 16x32x4/64x8x4")
    parser.add_argument(
        "--no_expanded", dest="expanded", action="store_false", help="leave out the way without kernels"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.formats = args.formats or ",".join(GPU_FORMATS if args.gpu else FORMATS)
    if args.gpu:
        measured = on_gpu(args)
        if args.out:
            args.out.write_text(json.dumps(measured, indent=1))
        return
    rate, rounds = 0.0, []
    for _ in range(args.rounds):
        rate = max(rate, read_rate(args.threads))
        rounds.append(ours(args) + (peers(args) if args.peers else []) + (ggml(args, args.ggml) if args.ggml else []))
    found = [min(same, key=lambda entry: entry["ms"]) for same in zip(*rounds, strict=True)]
    for entry, *same in zip(found, *rounds, strict=True):
        entry["worst_ms"] = max(other["ms"] for other in same)
    first = {entry["what"]: entry["ms"] for entry in found if entry["m"] == args.m[0]}
    print(f"{args.rows} x {args.columns}, {args.threads} threads, reads {rate / 1e9:.1f} GB/s\n")
    print("| product | m | ms | GB/s | share | over m=1 |\n|---|--:|--:|--:|--:|--:|")
    for entry in found:
        entry["share"], entry["over_first"] = entry["gb_per_s"] * 1e9 / rate, entry["ms"] / first[entry["what"]]
        print(
            f"| {entry['what']} | {entry['m']} | {entry['ms']:.2f} | {entry['gb_per_s']:.1f} | {entry['share']:.2f} "
            f"| {entry['over_first']:.2f} |"
        )
    if args.out:
        shape = {"rows": args.rows, "columns": args.columns, "threads": args.threads, "read_gb_per_s": rate / 1e9}
        args.out.write_text(json.dumps({**shape, "products": found}, indent=1))


if __name__ == "__main__":
    main()

"""Products of packed weights with 1..16 rows on the CPU: time and read rate, beside torch's own packed products.

    python benchmarks/packed_products.py --out products.json                 (all cores)
    python benchmarks/packed_products.py --threads 2 --rows 14336 --columns 4096 --formats nf4,q4_k
    python benchmarks/packed_products.py --peers                             (torch's bf16, int8 and int4 products too)
    python benchmarks/packed_products.py --ggml FOLDER                       (ggml's, of the package libggml-python:
                                          pip install --no-deps --target FOLDER libggml-python)

Every call reads another copy of the matrix, together larger than the caches, as a model's layers would be. `share` is
the packed bytes per second over what the memory gives to reads alone, measured in the same run; `over m=1` the time
over that of one row. All is measured in `--rounds` rounds, reads alone before each, and the best round counts: other
work on the machine, or memory that has just been filled, once made the first figure of a format six times too slow
(`worst_ms` is the slowest round's). Targets (issue 26): share 0.85 at one row, 1.4 times its time at four.
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
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from outcore.formats import PackedSpec, packed_format
from outcore.formats.products import PackedProducts

FORMATS = ("nf4", "int8", "int4_128_fp16", "mxfp4", "q4_0", "q8_0", "q4_k", "q5_k", "q6_k")
GGML_TYPES = {"q4_0": 2, "q8_0": 8, "q4_k": 12, "q5_k": 13, "q6_k": 14}
"""Numbers of ggml.h."""
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
    """Random bytes in memory of their own; fp16 and fp32 scales of any value do, as time does not depend on them."""
    count = max(2, CACHE_BYTES // spec.size_bytes)
    return [torch.randint(0, 100, (spec.size_bytes,), dtype=torch.uint8) for _ in range(count)]


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


def row(name: str, m: int, seconds: float, size_bytes: float) -> dict:
    return {"what": name, "m": m, "ms": seconds * 1e3, "gb_per_s": size_bytes / seconds / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=14336)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--variants", default="", help="avx2,avx512vnni: each of them; default: the best")
    parser.add_argument("--m", type=lambda text: [int(m) for m in text.split(",")], default=[1, 2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--ggml", type=Path, metavar="FOLDER", help="where libggml-python is")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
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

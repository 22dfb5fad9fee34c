"""How fast the CPU optimizer is, beside the memory's own speed and beside torch and DeepSpeed, in one run.

    python benchmarks/optim_rate.py [--threads 1,2,4] [--numel 67108864] [--formats fp32,split8] [--out rate.json]

Per number of threads: the memory's rate (three streams read, one of them written back), then every state format through
an `OptimizerPool`, then torch.optim.AdamW(fused=True) and DeepSpeedCPUAdam where it is installed. The memory's rate is
taken before and after. The table has medians, the JSON every sample. `--cached` adds each format on chunks that stay in
the caches, over and over: what its arithmetic takes where memory does not hold it up.

Bytes counted: gradient read, states read and written, parameter written (split formats: read too). A parameter that is
only written costs its cache line's fetch on top where it cannot be written past the caches; that is not counted. torch
and DeepSpeed hold fp32 parameters and gradients (28 bytes) and would need a 16-bit copy on top. Exit code 1 when the
extension cannot be had.
"""

from __future__ import annotations

import argparse
import functools
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.race.race_common import memory_rate_bytes_per_s
from outcore.common.quantities import GB
from outcore.optim import (
    FORMATS,
    AdamWHyper,
    ChunkJob,
    ChunkState,
    ExtensionUnavailable,
    JobBatch,
    OptimizerPool,
    StateFormat,
    default_num_threads,
)
from outcore.optim.extension import ExtensionBackend

TIMEOUT_S = 120.0
WARM_UPS = 1
CACHED_NUMEL = 1 << 16  # 1 MB and less
RIVAL_BYTES = 28  # fp32 gradient read; fp32 parameter, m, v read and written
Samples = dict[tuple[str, int], list[float]]


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the table, write the JSON."""
    options = parse(arguments)
    try:
        backend = ExtensionBackend()
    except ExtensionUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{backend.name}, {options.numel:,} parameters, {options.repeats} repeats, load {os.getloadavg()[0]:.1f}")
    rates: Samples = {}
    bytes_per_param: dict[str, float] = {"memory": 16.0}
    measure_memory(options, rates)
    for name, make in contestants(options, backend):
        for threads in options.threads:
            step, close, counted_bytes = make(threads)
            bytes_per_param[name] = counted_bytes
            try:
                rates[name, threads] = [time_one(step) for _ in range(WARM_UPS + options.repeats)][WARM_UPS:]
            finally:
                close()
    measure_memory(options, rates)
    print_table(options, rates, bytes_per_param)
    if options.out:
        options.out.write_text(json.dumps(report(options, backend.name, rates, bytes_per_param), indent=1) + "\n")
    return 0


FORMS = {form.name: form for plain in FORMATS for form in (plain, plain.on_drive)}
"""Formats, and fp32 moments as they are compressed for a drive."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    most = default_num_threads() + 2
    default = sorted({1, *(n for n in (2, 4, 6, 8, 12, 16, 24, 32) if n <= most), default_num_threads()})
    parser.add_argument("--threads", type=numbers, default=default, help=f"numbers of threads (default {default})")
    parser.add_argument("--numel", type=int, default=1 << 26, help="parameters; well above the caches")
    parser.add_argument("--chunk_numel", type=int, default=1 << 22, help="parameters per chunk")
    parser.add_argument("--formats", default=",".join(FORMS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cached", action="store_true", help="each format in the caches as well")
    parser.add_argument("--no_rivals", action="store_true", help="leave torch and DeepSpeed out")
    parser.add_argument("--small_pages", action="store_true", help="do not ask for transparent huge pages")
    parser.add_argument("--out", type=Path, help="JSON with every sample")
    return parser.parse_args(arguments)


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


Contestant = Callable[[int], tuple[Callable[[], None], Callable[[], None], float]]
"""threads -> (one update of all parameters, clean up, bytes counted per parameter)."""


def contestants(options: argparse.Namespace, backend: ExtensionBackend) -> list[tuple[str, Contestant]]:
    found: list[tuple[str, Contestant]] = []
    for name in options.formats.split(","):
        chosen = FORMS[name]
        found.append((name, lambda threads, chosen=chosen: pooled(options, backend, chosen, threads)))
        if options.cached:
            cached = functools.partial(pooled, options, backend, chosen, cached=True)
            found.append((f"{name}, cached", cached))
    found.append(("sum of squares", lambda threads: sums(options, backend, threads)))
    if not options.no_rivals:
        found.append(("torch fused", lambda threads: torch_fused(options, threads)))
        found.append(("DeepSpeedCPUAdam", lambda threads: deepspeed_adam(options, threads)))
        if not deepspeed_available():
            found.pop()
    return found


def buffer_of(n_bytes: int, options: argparse.Namespace) -> torch.Tensor:
    """uint8 [n_bytes] of whole pages, huge ones where the system gives them."""
    pages = mmap.mmap(-1, max(n_bytes, mmap.PAGESIZE))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE if options.small_pages else mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:n_bytes].zero_()


def floats(numel: int, dtype: torch.dtype, options: argparse.Namespace) -> torch.Tensor:
    out = buffer_of(numel * dtype.itemsize, options).view(dtype)
    pattern = (torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    for start in range(0, numel, pattern.numel()):
        part = out[start : start + pattern.numel()]
        part.copy_(pattern[: part.numel()])
    return out


def measure_memory(options: argparse.Namespace, rates: Samples) -> None:
    """Adds samples to "memory": seconds that as many elements of 16 bytes would take."""
    for threads in options.threads:
        for _ in range(-(-options.repeats // 2)):
            bytes_per_s = memory_rate_bytes_per_s(threads, max(1 << 22, options.numel // threads // 4))
            rates.setdefault(("memory", threads), []).append(16.0 * options.numel / bytes_per_s)


def pooled(
    options: argparse.Namespace, backend: ExtensionBackend, chosen: StateFormat, threads: int, *, cached: bool = False
):
    """Updates through the pool. `cached`: as many parameters, but the same two small chunks per thread in turn; two
    threads may be at the same one, which only its values suffer from."""
    size = CACHED_NUMEL if cached else options.chunk_numel
    distinct_numel = min(options.numel, 2 * threads * size) if cached else options.numel
    grad = floats(distinct_numel, torch.bfloat16, options)
    param = floats(distinct_numel, torch.bfloat16, options)
    jobs = []
    for start in range(0, distinct_numel, size):
        at = slice(start, min(start + size, distinct_numel))
        state = buffer_of(chosen.chunk_bytes(at.stop - start), options)
        ChunkState(chosen, state, at.stop - start, param[at]).initialise()
        jobs.append(ChunkJob(grad[at], state, param[at], start))
    jobs = [jobs[n % len(jobs)] for n in range(-(-options.numel // size))]
    batch = JobBatch(chosen, jobs)
    pool = OptimizerPool(threads, backend=backend)
    count = iter(range(1, 1 << 30))

    def step() -> None:
        hyper = AdamWHyper(lr=1e-4, step=next(count), weight_decay=0.1)
        pool.wait(pool.submit("all", 0, batch, hyper), TIMEOUT_S)

    return step, pool.close, 2 + 2 * chosen.bytes_per_param + (4 if chosen.split_master else 2)


def sums(options: argparse.Namespace, backend: ExtensionBackend, threads: int):
    grad = floats(options.numel, torch.bfloat16, options)
    return (lambda: backend.grad_sumsq_and_finite(grad, threads) and None), lambda: None, 2.0


def torch_fused(options: argparse.Namespace, threads: int):
    param = torch.nn.Parameter(floats(options.numel, torch.float32, options))
    param.grad = floats(options.numel, torch.float32, options)
    optimizer = torch.optim.AdamW([param], lr=1e-4, weight_decay=0.1, fused=True)
    torch.set_num_threads(threads)
    return (lambda: optimizer.step() and None), lambda: None, float(RIVAL_BYTES)


def deepspeed_available() -> bool:
    """Whether DeepSpeed's CPU Adam is installed and built (building it here would take minutes)."""
    from outcore.install.extensions import extension_environment

    os.environ.update(extension_environment("cuda" if torch.cuda.is_available() else "cpu"))
    if not any((Path(os.environ["TORCH_EXTENSIONS_DIR"]) / "cpu_adam").glob("cpu_adam*.so")):
        print("DeepSpeedCPUAdam is left out: its extension is not built (python setup.py builds it)")
        return False
    try:
        import deepspeed.ops.adam  # noqa: F401
    except ImportError as error:
        print(f"DeepSpeedCPUAdam is left out: {error}")
        return False
    return True


def deepspeed_adam(options: argparse.Namespace, threads: int):
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    param = torch.nn.Parameter(floats(options.numel, torch.float32, options))
    param.grad = floats(options.numel, torch.float32, options)
    optimizer = DeepSpeedCPUAdam([param], lr=1e-4, weight_decay=0, adamw_mode=True)
    torch.set_num_threads(threads)  # its kernel runs on the same OpenMP threads
    return (lambda: optimizer.step() and None), lambda: None, float(RIVAL_BYTES)


def time_one(step: Callable[[], None]) -> float:
    started_s = time.perf_counter()
    step()
    return time.perf_counter() - started_s


def print_table(options: argparse.Namespace, rates: Samples, bytes_per_param: dict[str, float]) -> None:
    print(f"{'':18}" + "".join(f"{f'{threads} threads':>26}" for threads in options.threads))
    for name in bytes_per_param:
        row = f"{name:18}"
        for threads in options.threads:
            gb_per_s = bytes_per_param[name] * options.numel / statistics.median(rates[name, threads]) / GB
            of_memory = gb_per_s / (16.0 * options.numel / statistics.median(rates["memory", threads]) / GB)
            giga_params = gb_per_s / bytes_per_param[name]
            row += f"{giga_params:8.2f} Gp/s {gb_per_s:5.0f} GB/s{of_memory:5.0%}"
        print(row)
    print("Gp/s: 10^9 parameters per second; %: of the memory's rate with as many threads")


def report(options: argparse.Namespace, backend: str, rates: Samples, bytes_per_param: dict[str, float]) -> dict:
    return {
        "backend": backend,
        "numel": options.numel,
        "chunk_numel": options.chunk_numel,
        "huge_pages": not options.small_pages,
        "bytes_per_param": bytes_per_param,
        "samples_s": {f"{name} x{threads}": samples for (name, threads), samples in rates.items()},
        "median_gparam_per_s": {
            f"{name} x{threads}": options.numel / statistics.median(samples) / 1e9
            for (name, threads), samples in rates.items()
        },
    }


if __name__ == "__main__":
    sys.exit(main())

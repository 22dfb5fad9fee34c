"""The same file moved by kvikio and by DeepSpeed's async_io handle, tuned, for benchmarks/drives/lanes.py.

Each rival is made by a function that raises `CannotRun` with the reason where this machine cannot run it, and gives a
pair of measures (drive -> GPU, GPU -> drive) in bytes per second.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from lane_bench import Bench

from outcore.common.quantities import MIB

Measures = dict[str, Callable[[], float]]


class CannotRun(RuntimeError):
    """The comparison is not possible here; the message says why."""


def kvikio_measures(bench: Bench) -> Measures:
    """kvikio on device memory: 16 threads, tasks of 8 MiB, direct I/O, its own POSIX mode (no GPUDirect Storage)."""
    if bench.device.type != "cuda":
        raise CannotRun("kvikio moves data only on a machine with a CUDA GPU")
    try:
        import kvikio
        import kvikio.defaults
    except ImportError as error:
        raise CannotRun(f"kvikio is not installed ({error})") from error
    settings = {
        "compat_mode": kvikio.CompatMode.ON,
        "num_threads": 16,
        "task_size": 8 * MIB,
        "auto_direct_io_read": True,
        "auto_direct_io_write": True,
        "bounce_buffer_size": 16 * MIB,
    }
    for name in list(settings):
        try:
            kvikio.defaults.get(name)
        except (AttributeError, KeyError, ValueError):
            del settings[name]  # an older kvikio without that setting

    def move(flags: str, call: str) -> float:
        bench.synchronize()
        with kvikio.defaults.set(settings), kvikio.CuFile(bench.path, flags) as file:
            begin_s = time.perf_counter()
            futures = []
            for offset, piece in bench.parts():
                wanted = min(bench.piece_bytes, bench.size_bytes - offset)
                futures.append((getattr(file, call)(piece, wanted, offset), wanted, offset))
            for future, wanted, offset in futures:
                if (got := future.get()) != wanted:
                    raise RuntimeError(f"kvikio {call} at {offset}: wanted {wanted} bytes, got {got}")
            bench.synchronize()
            return bench.size_bytes / (time.perf_counter() - begin_s)

    return {
        "drive -> GPU, kvikio": lambda: move("r", "pread"),
        "GPU -> drive, kvikio": lambda: move("r+", "pwrite"),
    }


def deepspeed_measures(bench: Bench, block_bytes: int = MIB, depth: int = 32, threads: int = 8) -> Measures:
    """DeepSpeed's handle with its own page-locked buffers, double-buffered against the copy to or from the GPU.

    Its page-locked tensors are mlocked, not registered with CUDA; torch-pinned ones, which the handle takes as well,
    are measured beside them, and the faster of the two is what the lanes are compared with.
    """
    handle, how = _open_handle(block_bytes, depth, threads)
    print(f"  DeepSpeed: {how}, block {block_bytes // MIB} MiB, depth {depth}, {threads} threads")
    n_bytes = bench.piece_bytes
    kinds: dict[str, list[torch.Tensor]] = {}
    limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit_bytes == resource.RLIM_INFINITY or limit_bytes > 3 * n_bytes:
        example = torch.empty(0, dtype=torch.uint8)
        kinds["own buffers"] = [handle.new_cpu_locked_tensor(n_bytes, example) for _ in range(2)]
    else:  # its allocator asserts, that is aborts the process, when mlock is refused
        print(f"  DeepSpeed: no page-locked buffers of its own, `ulimit -l` allows only {limit_bytes} bytes")
    if bench.device.type == "cuda":
        kinds["torch-pinned buffers"] = [torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    if not kinds:
        raise CannotRun("DeepSpeed's handle needs page-locked memory, and `ulimit -l` does not allow any")
    stream: Any = torch.cuda.Stream(bench.device) if bench.device.type == "cuda" else None
    path = str(bench.path)
    # Its file sizes and its split over threads must be whole: the pieces are, a ragged end of the file is left out.
    offsets = [o for o in range(0, bench.size_bytes, n_bytes) if o + n_bytes <= bench.size_bytes]

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        if stream is None:
            target.copy_(source)
        else:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)

    def settle() -> None:
        if stream is not None:
            stream.synchronize()

    def wait(wanted: int) -> None:
        if (got := handle.wait()) != wanted:
            raise RuntimeError(f"DeepSpeed's handle completed {got} of {wanted} requests")

    def submit(call: str, buffer: torch.Tensor, offset: int) -> None:
        if getattr(handle, call)(buffer, path, offset) != 0:
            raise RuntimeError(f"DeepSpeed's {call} at {offset} was refused")

    def read(buffers: list[torch.Tensor]) -> float:
        bench.synchronize()
        begin_s = time.perf_counter()
        submit("async_pread", buffers[0], offsets[0])
        for number in range(len(offsets)):
            wait(1)
            settle()  # the copy out of the buffer that is read into next
            if number + 1 < len(offsets):
                submit("async_pread", buffers[(number + 1) % 2], offsets[number + 1])
            copy(bench.pieces[number % len(bench.pieces)], buffers[number % 2])
        bench.synchronize()
        return len(offsets) * n_bytes / (time.perf_counter() - begin_s)

    def write(buffers: list[torch.Tensor]) -> float:
        bench.synchronize()
        begin_s = time.perf_counter()
        copy(buffers[0], bench.pieces[0])
        for number, offset in enumerate(offsets):
            settle()
            submit("async_pwrite", buffers[number % 2], offset)
            if number + 1 < len(offsets):
                copy(buffers[(number + 1) % 2], bench.pieces[(number + 1) % len(bench.pieces)])
            wait(1)
        return len(offsets) * n_bytes / (time.perf_counter() - begin_s)

    table: Measures = {}
    for kind, buffers in kinds.items():
        table[f"drive -> GPU, DeepSpeed, {kind}"] = lambda buffers=buffers: read(buffers)
        table[f"GPU -> drive, DeepSpeed, {kind}"] = lambda buffers=buffers: write(buffers)
    return table


def _open_handle(block_bytes: int, depth: int, threads: int) -> tuple[Any, str]:
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found]
        from deepspeed.ops.op_builder.cpu.async_io import AsyncIOBuilder as CpuAsyncIOBuilder
    except ImportError as error:
        raise CannotRun(f"DeepSpeed is not installed ({error})") from error
    failures = []
    # The builder for CUDA needs nvcc; the one for the CPU builds the same handle for host buffers without.
    for builder, how in ((AsyncIOBuilder, "its async_io op"), (CpuAsyncIOBuilder, "its async_io op, CPU build")):
        try:
            op = builder().load(verbose=False)
            return op.aio_handle(block_bytes, depth, False, True, threads), how
        except Exception as error:  # builders raise anything, from CalledProcessError to AssertionError
            failures.append(f"{how}: {type(error).__name__}: {str(error).strip().splitlines()[-1:] or ''}")
    raise CannotRun("DeepSpeed's async_io op does not build here: " + "; ".join(failures))

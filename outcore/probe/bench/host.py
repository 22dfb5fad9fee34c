"""Time that the host takes to launch a decoder layer: it bounds a step whose kernels are short for this GPU.

An eager layer of the usual make (norms, rotary attention with grouped queries, gated MLP; about 50 operators) on a few
narrow tokens, so that its kernels take next to nothing: forward without autograd, then once more with it and backward,
as training with activation checkpoints does. What remains is Python, PyTorch's dispatch and the driver's launches on
one core, which differ by half between hosts. Cost: the time given, a few MB on the GPU.

How many parameters the CPU optimizer updates per second here: what bounds a step whose states live in RAM.

The optimizer itself is run (`outcore.optim`, all cores but two, as both engines run it), one AdamW update per pass over
arrays far larger than any cache: the memory's rate alone says too little about it, because some formats are bound by
arithmetic and a triad without streaming stores is slower than the memory. An update is all that the engines run on the
CPU, with clipping and without: norms are the GPU's work. Cost: the time given, up to 2 GiB of RAM (a quarter of what is
available at most)."""

from __future__ import annotations

import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from outcore.common.quantities import round_up
from outcore.machine import available_ram_bytes
from outcore.optim import (
    FORMATS,
    AdamWHyper,
    BackendName,
    ChunkJob,
    ChunkState,
    JobBatch,
    OptimizerPool,
    StateFormat,
    open_backend,
)
from outcore.probe.bench.compute import compute_dtype
from outcore.staging.pool import MappedSlab

WIDTH, HEADS, KV_HEADS, FFN_WIDTH, TOKENS, LAYERS = 128, 4, 2, 256, 16, 8
LEAST_PASSES = 3


class _Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(hidden.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        head = WIDTH // HEADS
        self.norm_1, self.norm_2 = _Norm(), _Norm()
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, KV_HEADS * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, FFN_WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(FFN_WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        rows, tokens, _ = hidden.shape
        normed = self.norm_1(hidden)
        q, k, v = (
            part(normed).view(rows, tokens, -1, WIDTH // HEADS).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        hidden = hidden + self.o(mixed.transpose(1, 2).reshape(rows, tokens, WIDTH))
        normed = self.norm_2(hidden)
        return hidden + self.down(F.silu(self.gate(normed)) * self.up(normed))


def measure_host(device: torch.device, limit_s: float) -> float:
    """Seconds of the host per layer: forward, recomputation and backward. The median of the passes of about `limit_s`
    (three at least) after one that warms up."""
    dtype, _ = compute_dtype(device)
    layers = nn.ModuleList([_Layer() for _ in range(LAYERS)]).to(device, dtype)
    angles = torch.arange(TOKENS, device=device)[:, None] * torch.ones(WIDTH // HEADS, device=device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    first = torch.ones(1, TOKENS, WIDTH, device=device, dtype=dtype)

    def once() -> None:
        inputs = [first]
        with torch.no_grad():
            for layer in layers:
                inputs.append(layer(inputs[-1], cos, sin))
        gradient = first
        for layer, given in zip(reversed(layers), reversed(inputs[:-1]), strict=True):
            kept = given.detach().requires_grad_()
            layer(kept, cos, sin).backward(gradient)
            assert kept.grad is not None
            gradient = kept.grad

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    with warnings.catch_warnings():  # autograd's thread gets its CUDA context at its first product
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
        once()
    wait()
    begin_s, taken = time.perf_counter(), []
    while len(taken) < LEAST_PASSES or time.perf_counter() - begin_s < limit_s:
        start_s = time.perf_counter()
        once()
        wait()
        taken.append(time.perf_counter() - start_s)
    return statistics.median(taken) / LAYERS


CHUNK_NUMEL = 1 << 22
"""Chunk as the engines cut states."""
MOST_NUMEL = 1 << 27
"""134 M parameters: 1.1 GB of traffic a pass with the smallest format, 3.8 GB with the largest."""
TRIAL_NUMEL = 1 << 24
BYTES_PER_PARAM = 16
"""Bytes of the largest format: states 12, parameter 2, gradient 2."""
RAM_SHARE = 0.25
MOST_PASSES = 9
PASSES_PLANNED = 10
"""Passes of one format, setting its states up counted as some: what the number of parameters is chosen by."""
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class UpdateRates:
    """10^9 parameters per second."""

    backend: str
    """'extension (avx512)', 'torch'."""
    threads: int
    params: int
    gparams_per_s: dict[str, float]
    """Rate of one AdamW update, by state format."""
    elapsed_s: float


def measure_updates(
    limit_s: float,
    *,
    num_threads: int | None = None,
    backend: BackendName = "auto",
    most_numel: int = MOST_NUMEL,
) -> UpdateRates:
    """Measure all formats, in about `limit_s` (at least one timed pass each). MemoryError or RuntimeError when it
    cannot be done here."""
    opened = open_backend(backend)  # built at first use, which is not counted
    begin_s = time.perf_counter()
    fits = int(available_ram_bytes() * RAM_SHARE) // BYTES_PER_PARAM
    least = min(CHUNK_NUMEL, most_numel)
    most = max(least, min(most_numel, fits // CHUNK_NUMEL * CHUNK_NUMEL))
    with OptimizerPool(num_threads, backend=opened) as pool:
        arrays = _Arrays(min(TRIAL_NUMEL, most))
        pass_s = _median_s(arrays.update(pool, FORMATS[0]), 0.0)
        rate = arrays.numel / pass_s
        numel = int(rate * limit_s / (len(FORMATS) * PASSES_PLANNED)) // CHUNK_NUMEL * CHUNK_NUMEL
        numel = min(most, max(least, numel))
        if numel != arrays.numel:
            arrays = _Arrays(numel)
        each_s = max(0.0, limit_s - (time.perf_counter() - begin_s)) / (2 * len(FORMATS))
        rates = {}
        for chosen in FORMATS:
            rates[chosen.name] = round(arrays.numel / _median_s(arrays.update(pool, chosen), each_s) / 1e9, 4)
        return UpdateRates(opened.name, pool.num_threads, arrays.numel, rates, time.perf_counter() - begin_s)


class _Arrays:
    """Gradients, parameters and room for the states of any format."""

    def __init__(self, numel: int) -> None:
        self.numel = numel
        self.starts = range(0, numel, CHUNK_NUMEL)
        room = sum(max(form.chunk_bytes(self._size(start)) for form in FORMATS) for start in self.starts)
        self.states = MappedSlab(round_up(room, 4096), None).tensor
        self.grads, self.params = self._values(), self._values()

    def _size(self, start: int) -> int:
        return min(CHUNK_NUMEL, self.numel - start)

    def _values(self) -> torch.Tensor:
        out = MappedSlab(round_up(2 * self.numel, 4096), None).tensor[: 2 * self.numel].view(torch.bfloat16)
        pattern = (torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)) * 0.02).to(torch.bfloat16)
        for part in out.split(pattern.numel()):
            part.copy_(pattern[: part.numel()])
        return out

    def update(self, pool: OptimizerPool, form: StateFormat) -> Callable[[], None]:
        """States of this format, and what updates all of them once."""
        jobs, place = [], 0
        for start in self.starts:
            size = self._size(start)
            at, n_bytes = slice(start, start + size), form.chunk_bytes(size)
            state, param = self.states[place : place + n_bytes], self.params[at]
            ChunkState(form, state, size, param).initialise()
            jobs.append(ChunkJob(self.grads[at], state, param, start))
            place += n_bytes
        batch, steps = JobBatch(form, jobs), itertools.count(1)

        def once() -> None:
            hyper = AdamWHyper(lr=1e-4, step=next(steps), weight_decay=0.1)
            pool.wait(pool.submit("all", 0, batch, hyper), TIMEOUT_S)

        return once


def _median_s(once: Callable[[], None], limit_s: float) -> float:
    """Seconds of a pass after a first one that warms up: the median of some within the limit, at least of one."""
    once()
    taken: list[float] = []
    while not taken or (sum(taken) < limit_s and len(taken) < MOST_PASSES):
        begin_s = time.perf_counter()
        once()
        taken.append(max(1e-9, time.perf_counter() - begin_s))
    return statistics.median(taken)

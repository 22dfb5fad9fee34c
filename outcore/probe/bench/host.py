"""How long the host takes to launch a decoder layer: what bounds a step whose kernels are short for this GPU.

An eager layer of the usual make (norms, rotary attention with grouped queries, gated MLP; about 50 operators) on a few
narrow tokens, so that its kernels take next to nothing: forward without autograd, then once more with it and backward,
as training with activation checkpoints does. What remains is Python, PyTorch's dispatch and the driver's launches on
one core, which differ by half between hosts. Cost: the time given, a few MB on the GPU."""

from __future__ import annotations

import statistics
import time
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from outcore.probe.bench.compute import compute_dtype

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

"""Inputs shared by the tests of the CPU optimizer: awkward numbers, chunks filled with them, backends to compare."""

import functools

import pytest
import torch

from outcore.optim import AdamWHyper, ChunkJob, ChunkState, ExtensionUnavailable, StateFormat
from outcore.optim.extension import ExtensionBackend
from outcore.optim.reference import TorchBackend

SIZES = (1, 2, 3, 15, 17, 255, 256, 257, 300, 511, 512, 1000, 4095, 4097)
# Bit patterns of fp32: zeros, denormals, the smallest normal, bf16 ties, values around one, the largest.
SPECIAL_BITS = (
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x3F808000, 0x3F818000, 0xBF808000,
    0x3F807FFF, 0x3F808001, 0x3F800000, 0xBF800000, 0x33D6BF95, 0x00008000, 0x00018000, 0x7F7F0000,
)  # fmt: skip
NON_FINITE_BITS = (0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 0x7FFF8000)


@functools.cache
def extension(variant: str = "auto") -> ExtensionBackend:
    """The extension (built on first use); the test is skipped where it cannot be had."""
    try:
        return ExtensionBackend(variant)  # pyright: ignore[reportArgumentType]
    except ExtensionUnavailable as error:
        pytest.skip(f"no C++ extension here: {error}")


def all_variants() -> list[ExtensionBackend]:
    return [extension(name) for name in extension().available_variants]


def torch_backend() -> TorchBackend:
    return TorchBackend()


def from_bits(bits: torch.Tensor) -> torch.Tensor:
    """Unsigned 32-bit patterns in int64 -> fp32."""
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def awkward(numel: int, generator: torch.Generator, spread: float = 3.0, non_finite: bool = False) -> torch.Tensor:
    """fp32 [numel]: log-normal numbers of both signs, a quarter of them replaced by special ones."""
    normal = torch.randn(numel, generator=generator)
    x = normal * torch.exp(spread * torch.randn(numel, generator=generator)) * 0.01
    pool = SPECIAL_BITS + (NON_FINITE_BITS if non_finite else ())
    special = from_bits(torch.tensor(pool, dtype=torch.int64))
    chosen = special[torch.randint(len(pool), (numel,), generator=generator)]
    return torch.where(torch.rand(numel, generator=generator) < 0.25, chosen, x)


def make_job(
    state_format: StateFormat,
    numel: int,
    generator: torch.Generator,
    *,
    grad_dtype: torch.dtype = torch.bfloat16,
    param_dtype: torch.dtype | None = torch.bfloat16,
    element_offset: int = 0,
) -> ChunkJob:
    """A chunk with ordinary random numbers in its master, zero moments and an ordinary gradient."""
    param = None if param_dtype is None else torch.empty(numel, dtype=param_dtype)
    state = torch.empty(state_format.chunk_bytes(numel), dtype=torch.uint8)
    ChunkState(state_format, state, numel, param).initialise(torch.randn(numel, generator=generator) * 0.02)
    grad = torch.randn(numel, generator=generator).to(grad_dtype)
    return ChunkJob(grad, state, param, element_offset)


def copy_of(job: ChunkJob) -> ChunkJob:
    param = None if job.param is None else job.param.clone()
    return ChunkJob(job.grad, job.state.clone(), param, job.element_offset)


def same_bytes(a: ChunkJob, b: ChunkJob) -> bool:
    if a.param is not None and b.param is not None and not torch.equal(raw(a.param), raw(b.param)):
        return False
    return torch.equal(a.state, b.state)


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def hyper(step: int = 1, **changes) -> AdamWHyper:
    return AdamWHyper(**{"lr": 1e-3, "step": step, "weight_decay": 0.1, **changes})


def make_unit(state_format: StateFormat, seed: int, sizes=(5000, 300, 256)) -> list[ChunkJob]:
    generator = torch.Generator().manual_seed(seed)
    return [
        make_job(state_format, numel, generator, element_offset=(seed * 10 + i) * 65536)
        for i, numel in enumerate(sizes)
    ]


def updated(state_format: StateFormat, unit: list[ChunkJob], now) -> list[ChunkJob]:
    """The same unit after a direct update, for comparison."""
    copies = [copy_of(job) for job in unit]
    for job in copies:
        extension().update(state_format, job, now)
    return copies


def all_same(a: list[ChunkJob], b: list[ChunkJob]) -> bool:
    return all(same_bytes(x, y) for x, y in zip(a, b, strict=True))

"""Formats, the exact split, chunk states by name, hyper-parameters and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.optim import (
    FORMATS,
    FP32,
    FP32_M8,
    SPLIT,
    SPLIT8,
    AdamWHyper,
    ChunkJob,
    ChunkState,
    JobBatch,
    state_format,
)
from outcore.optim.formats.chunk_state import join_master, round_to_24_bits, split_master
from tests.optim.cases import SIZES, awkward, copy_of, extension, hyper, make_job, same_bytes, torch_backend
from tests.refused import refused

LOW_HALVES = torch.tensor([0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, 0x1234, 0xABCD])


@pytest.mark.parametrize("chosen", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("numel", SIZES)
def test_layout_is_that_of_the_extension(chosen, numel):
    theirs = extension().layout(chosen, numel)
    regions = chosen.regions(numel)
    for name, region in regions.items():
        assert theirs[name.removesuffix("_code").replace("residual", "master")] == region.offset_bytes
        assert region.offset_bytes % 64 == 0
    assert theirs["total"] == chosen.chunk_bytes(numel)
    assert chosen.chunk_bytes(numel) % 4096 == 0


def check_split(bits: torch.Tensor) -> None:
    """int64 patterns [n]: the split is undone exactly."""
    master = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
    param, residual = split_master(master)
    assert torch.equal(join_master(param, residual).view(torch.int32), master.view(torch.int32))
    back_param, back_residual = split_master(join_master(param, residual))
    assert torch.equal(back_param.view(torch.int16), param.view(torch.int16))
    assert torch.equal(back_residual, residual)


def test_split_is_exact_for_every_upper_half():
    """All 65,536 upper halves with the lower halves around the carry: denormals, infinities and NaN included."""
    upper = torch.arange(2**16, dtype=torch.int64)[:, None] << 16
    check_split((upper + LOW_HALVES).flatten())


@pytest.mark.slow
def test_split_is_exact_for_all_patterns():
    for start in range(0, 2**32, 2**25):
        check_split(torch.arange(start, start + 2**25, dtype=torch.int64))


def test_split_parameter_is_the_master_rounded_half_up():
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(10_000, generator=generator)
    param, _ = split_master(master)
    cast = master.bfloat16()
    tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    assert torch.equal(param[~tie], cast[~tie])
    ties = (torch.arange(0, 2**15 - 1) * 2**16 + 0x8000).to(torch.int32).view(torch.float32)
    ties = ties[ties.isfinite()]
    assert (split_master(ties)[0].float() > ties).all()  # away from zero
    assert (ties.bfloat16().float() < ties).any()  # a cast goes to even


@pytest.mark.parametrize("chosen", FORMATS, ids=lambda f: f.name)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), numel=st.sampled_from(SIZES), steps=st.integers(0, 3))
def test_writing_what_was_read_gives_the_same_bytes(chosen, seed, numel, steps):
    """A checkpoint by name in fp32 loses nothing, 8-bit codes included."""
    generator = torch.Generator().manual_seed(seed)
    job = make_job(chosen, numel, generator)
    for step in range(1, steps + 1):
        grad = awkward(numel, generator, spread=6.0)
        grad = torch.where(grad.abs() > 1e15, 0.0, grad)
        extension().update(chosen, ChunkJob(grad, job.state, job.param), hyper(step))
    source = ChunkState(chosen, job.state, numel, job.param)
    other = copy_of(job)
    assert other.param is not None
    other.param.fill_(7)
    other.state.fill_(0xAA)
    target = ChunkState(chosen, other.state, numel, other.param)
    target.initialise(torch.ones(numel))
    for name in ("master", "exp_avg", "exp_avg_sq"):
        target.write(name, source.read(name))
    assert same_bytes(other, job)


@pytest.mark.parametrize("chosen", FORMATS, ids=lambda f: f.name)
def test_ranges_of_a_state(chosen):
    generator = torch.Generator().manual_seed(4)
    numel = 1000
    job = make_job(chosen, numel, generator)
    extension().update(chosen, job, hyper())
    chunk = ChunkState(chosen, job.state, numel, job.param)
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert torch.equal(chunk.read(name, 300, 700), chunk.read(name)[300:700])
        values = chunk.read(name, 512, 1000) * 0.5
        chunk.write(name, values, 512)
        torch.testing.assert_close(chunk.read(name, 512), values, rtol=1e-5, atol=0)


def test_initial_states():
    values = torch.tensor([1.0, -2.5, 3e-5]).bfloat16()
    for chosen in FORMATS:
        chunk = ChunkState(chosen, torch.full((chosen.chunk_bytes(3),), 255, dtype=torch.uint8), 3, values.clone())
        chunk.initialise()
        assert torch.equal(chunk.read("master"), values.float())
        assert torch.equal(chunk.read("exp_avg"), torch.zeros(3))
        assert torch.equal(chunk.read("exp_avg_sq"), torch.zeros(3))
        given = torch.tensor([0.1, 0.2, 0.3])
        chunk.initialise(given)
        assert torch.equal(chunk.read("master"), round_to_24_bits(given) if chosen.short_residual else given)
        assert chunk.param is not None
        assert torch.equal(chunk.param, torch.tensor([0.1, 0.2, 0.3]).bfloat16())
    without = ChunkState(FP32, torch.zeros(FP32.chunk_bytes(3), dtype=torch.uint8), 3)
    refused(ValueError, "needs a master", without.initialise)
    without.initialise(torch.ones(3))
    assert torch.equal(without.read("master"), torch.ones(3))


def test_what_chunks_refuse():
    buffer = torch.zeros(SPLIT.chunk_bytes(10), dtype=torch.uint8)
    param = torch.zeros(10, dtype=torch.bfloat16)
    for bad in (None, torch.zeros(10), torch.zeros(10, dtype=torch.float16)):
        with pytest.raises(ValueError, match="take 'fp32'"):
            ChunkState(SPLIT, buffer, 10, bad)
    refused(ValueError, "take 'fp32_m8'", lambda: SPLIT8.check_param_dtype(torch.float16))
    refused(ValueError, "bf16, fp16 or fp32", lambda: FP32.check_param_dtype(torch.float64))
    refused(ValueError, "10 contiguous elements", lambda: ChunkState(SPLIT, buffer, 10, param[:9]))
    refused(ValueError, "needs 4096 bytes, got 100", lambda: SPLIT.views(buffer[:100], 10))
    refused(ValueError, "4-byte aligned", lambda: SPLIT.views(torch.zeros(5000, dtype=torch.uint8)[1:], 10))
    refused(ValueError, "1-D uint8", lambda: SPLIT.views(buffer.view(2, -1), 10))
    refused(ValueError, "at least one parameter", lambda: SPLIT.chunk_bytes(0))
    refused(ValueError, "there are fp32, split", lambda: state_format("fp8"))
    chunk = ChunkState(SPLIT, buffer, 10, param)
    refused(ValueError, "not 'momentum'", lambda: chunk.read("momentum"))  # pyright: ignore[reportArgumentType]
    refused(ValueError, "not within the 10 parameters", lambda: chunk.read("master", 5, 11))
    refused(ValueError, "written from fp32", lambda: chunk.write("master", torch.zeros(10, dtype=torch.float64)))
    eight = ChunkState(FP32_M8, torch.zeros(FP32_M8.chunk_bytes(600), dtype=torch.uint8), 600)
    refused(ValueError, "whole blocks", lambda: eight.write("exp_avg", torch.zeros(100), 256))
    refused(ValueError, "whole blocks", lambda: eight.write("exp_avg", torch.zeros(256), 100))


def test_what_batches_refuse():
    generator = torch.Generator().manual_seed(0)
    job = make_job(SPLIT, 300, generator)
    assert job.param is not None
    changed = dataclasses.replace
    for bad, match in (
        (changed(job, grad=job.grad.double()), "bf16, fp16 or fp32"),
        (changed(job, grad=torch.zeros(0)), "at least one element"),
        (changed(job, grad=torch.zeros(600)[::2]), "contiguous"),
        (changed(job, param=job.param[:200]), "200 parameters but 300 gradients"),
        (changed(job, state=job.state[:100]), "needs 4096 bytes"),
        (changed(job, element_offset=100), "multiple of 256"),
        (changed(job, element_offset=-256), "multiple of 256"),
        (changed(job, grad=job.grad.float()), "that of the first chunk"),
        (changed(job, param=None), "that of the first chunk"),
    ):
        with pytest.raises(ValueError, match=match):
            JobBatch(SPLIT, [job, bad])
    refused(ValueError, "at least one chunk", lambda: JobBatch(SPLIT, []))
    refused(ValueError, "at least one gradient", lambda: JobBatch.of_grads([]))
    refused(ValueError, "one type per unit", lambda: JobBatch.of_grads([job.grad, job.grad.float()]))
    batch = JobBatch(SPLIT, [job, copy_of(job)])
    assert batch.numel == 600
    refused(ValueError, "2 chunks, got 1 gradients", lambda: batch.with_grads([job.grad]))
    refused(ValueError, "this chunk has 300", lambda: batch.with_grads([job.grad, job.grad[:5]]))


@pytest.mark.parametrize(("change", "match"), [
    ({"lr": -1.0}, "lr >= 0"), ({"lr": float("nan")}, "lr >= 0"), ({"beta1": 1.0}, r"beta1 in \[0, 1\)"),
    ({"beta2": -0.1}, r"beta2 in \[0, 1\)"), ({"eps": 0.0}, "larger than their root"),
    ({"weight_decay": -1.0}, "weight_decay"), ({"grad_scale": 0.0}, "grad_scale > 0"),
    ({"grad_scale": 1e-60}, "range of fp32"), ({"grad_scale": float("inf")}, "grad_scale > 0"),
    ({"lr": 1e60}, "range of fp32"), ({"step": 0}, "from 1 on"), ({"step": 1.0}, "from 1 on"), ({"seed": -1}, "seed"),
    ({"beta2": 1 - 1e-17, "step": 1}, r"\[0, 1\)"),
])  # fmt: skip
def test_hyper_parameters_out_of_range(change, match):
    refused(ValueError, match, lambda: AdamWHyper(**{"lr": 1e-3, "step": 1, **change}))


def test_a_small_eps_needs_moments_of_32_bits():
    generator = torch.Generator().manual_seed(0)
    now = hyper(eps=1e-15)
    for backend in (extension(), torch_backend()):
        backend.update(SPLIT, make_job(SPLIT, 300, generator), now)
        with pytest.raises(ValueError, match="8-bit moments need eps"):
            backend.update(SPLIT8, make_job(SPLIT8, 300, generator), now)

"""The torch implementation and the C++ kernels over long sequences of steps: the same bytes after every one."""

import pytest
import torch

from outcore.optim import FORMATS, ChunkJob, ChunkState
from tests.optim.cases import all_variants, copy_of, hyper, make_job, same_bytes, torch_backend


def long_gradients(numel: int, steps: int, generator: torch.Generator):
    """One gradient a step: ordinary ones, all denormal, all huge, tiny ones, zeros, and mixtures that change places."""
    scale = torch.exp(12 * torch.randn(numel, generator=generator))
    for step in range(steps):
        grad = torch.randn(numel, generator=generator)
        kind = step % 8
        if kind == 2:
            grad = grad * 2.0**-140
        elif kind == 3:
            grad = grad * 1e18
        elif kind == 4:
            grad = grad * 1e-30
        elif kind == 5:
            grad = torch.zeros(numel)
        elif kind >= 6:
            grad = grad * scale.roll(step)
        yield grad


@pytest.mark.parametrize("steps", [100, pytest.param(3000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("state_format", FORMATS, ids=lambda f: f.name)
def test_torch_and_the_kernels_stay_together_for_many_steps(state_format, steps):
    """Nothing that one rounds otherwise may build up: states and parameter are the same bytes after every step."""
    numel, grad_dtype = 300, torch.bfloat16 if state_format.split_master else torch.float32
    generator = torch.Generator().manual_seed(12)
    start = make_job(state_format, numel, generator, grad_dtype=grad_dtype, element_offset=256 * 99)
    jobs = {backend.name: (backend, copy_of(start)) for backend in (torch_backend(), *all_variants())}
    expected = jobs["torch"][1]
    for step, grad in enumerate(long_gradients(numel, steps, generator), 1):
        now = hyper(step, lr=1e-2 / step**0.5, grad_scale=0.5 if step % 3 else 1.0, seed=7)
        for backend, job in jobs.values():
            backend.update(state_format, ChunkJob(grad.to(grad_dtype), job.state, job.param, job.element_offset), now)
        for name, (_, job) in jobs.items():
            assert same_bytes(job, expected), f"{name}, step {step}"
    chunk = ChunkState(state_format, expected.state, numel, expected.param)
    assert chunk.read("master").isfinite().all() and not torch.equal(chunk.read("master"), torch.zeros(numel))

"""AdamW on a GPU: the bits of the CPU's kernels, for whatever numbers come."""

from dataclasses import replace

import pytest
import torch

from outcore.optim import FP32, SPLIT, AdamWHyper, ChunkJob, ChunkState, update_on_device
from tests.optim.cases import awkward, copy_of, make_job, raw, same_bytes, torch_backend

pytestmark = pytest.mark.gpu
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
HYPERS = (
    AdamWHyper(lr=1e-3, step=1, weight_decay=0.01),
    AdamWHyper(lr=1.0, step=2, beta1=0.3, beta2=0.9, weight_decay=1.0, grad_scale=0.37),
    AdamWHyper(lr=0.0, step=3, beta1=0.0, eps=1e-16, grad_scale=1e-5),
    AdamWHyper(lr=1e-5, step=10**7, beta1=0.999, beta2=0.0, eps=1.0, grad_scale=2.0**-16),
)


def on_gpu(job: ChunkJob) -> ChunkJob:
    param = None if job.param is None else job.param.cuda()
    return replace(job, grad=job.grad.cuda(), state=job.state.cuda(), param=param)


def on_cpu(job: ChunkJob) -> ChunkJob:
    param = None if job.param is None else job.param.cpu()
    return replace(job, grad=job.grad.cpu(), state=job.state.cpu(), param=param)


@pytest.mark.parametrize("hyper", HYPERS, ids=range(len(HYPERS)))
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize(
    "state_format, param_dtype", [(SPLIT, torch.bfloat16), *((FP32, dtype) for dtype in (*DTYPES, None))]
)
def test_the_bits_are_those_of_the_cpu(state_format, param_dtype, grad_dtype, hyper):
    """Denormals, infinities, NaN and ties in states and gradients; sizes that fill no block."""
    usable = torch.ones(1, dtype=torch.bool, device="cuda")
    for numel in (1, 257, 4097, 1 << 17):
        generator = torch.Generator().manual_seed(numel)
        job = make_job(state_format, numel, generator, param_dtype=param_dtype, grad_dtype=grad_dtype)
        chunk = ChunkState(state_format, job.state, numel, job.param)
        chunk.write("master", awkward(numel, generator, non_finite=True))
        chunk.write("exp_avg", awkward(numel, generator))
        chunk.write("exp_avg_sq", awkward(numel, generator, spread=6.0).abs())
        if numel > 1024:
            job = replace(job, undecayed=((256, 1024), (4096, numel)))
        device = on_gpu(replace(copy_of(job), undecayed=job.undecayed))
        for step in range(2):
            grad = awkward(numel, generator, spread=6.0, non_finite=True).to(grad_dtype)
            now = replace(hyper, step=hyper.step + step)
            torch_backend().update(state_format, replace(job, grad=grad), now)
            update_on_device(state_format, replace(device, grad=grad.cuda()), now, usable)
        assert same_bytes(job, on_cpu(device)), f"{numel} elements"


def test_an_update_that_is_not_usable_changes_nothing():
    job = make_job(SPLIT, 4097, torch.Generator().manual_seed(1))
    device = on_gpu(copy_of(job))
    update_on_device(SPLIT, device, HYPERS[0], torch.zeros(1, dtype=torch.bool, device="cuda"))
    assert same_bytes(job, on_cpu(device))
    update_on_device(SPLIT, device, HYPERS[0], torch.ones(1, dtype=torch.bool, device="cuda"))
    assert device.param is not None and job.param is not None
    assert not torch.equal(raw(device.param.cpu()), raw(job.param))

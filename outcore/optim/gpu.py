"""Updates on the device: AdamW on chunks that lie there, with the bits of the CPU's kernels, and Muon on matrices whose
gradient, states and parameter wait in RAM.

Muon is torch's own (`torch.optim.Muon`), a matrix at a time in fp32 with its Newton-Schulz products in bf16, and its
`match_rms_adamw`: with that a learning rate of AdamW's fits both. Of every parameter 10 bytes go up and as many come
back (with a split master 8), which mostly takes longer than the products. So three streams work at once: one brings
the next matrices up, one computes, one takes results home."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from outcore.optim.formats import StateFormat
from outcore.optim.formats.chunk_state import cast_param, join_master, split_master
from outcore.optim.hyper import AdamWHyper
from outcore.optim.jobs import ChunkJob, by_decay
from outcore.optim.reference import update_chunk
from outcore.sizing.states import MUON_BYTES_UNDER_WAY

MOST_NUMEL = (1 << 31) - 1024
"""Parameters of one update on a GPU: its kernel counts in 32 bits, and its last block may reach beyond the end."""


def updates_on_device(state_format: StateFormat, numel: int) -> bool:
    """Whether `update_on_device` can update this many parameters in this format. It needs fp32 moments."""
    return numel <= MOST_NUMEL and not (state_format.moments8 or state_format.compressed)


def update_on_device(state_format: StateFormat, job: ChunkJob, hyper: AdamWHyper, usable: torch.Tensor) -> None:
    """Update a chunk in place, on a GPU queued on the current stream; `job`'s tensors are on one device, the CPU's or a
    GPU's. `usable`: bool [1] there; where it is False nothing changes."""
    if job.grad.device.type == "cpu":
        if usable:
            update_chunk(state_format, job, hyper)
        return
    from outcore.optim import gpu_kernel as kernel

    numel, scalars = job.grad.numel(), hyper.scalars()
    views = {
        name: job.state[at.offset_bytes : at.offset_bytes + at.size_bytes].view(_bits(at.dtype))
        for name, at in state_format.regions(numel).items()
    }
    first = views["residual" if state_format.split_master else "master"]
    kinds = {torch.float32: kernel.FP32_PARAM, torch.bfloat16: kernel.BF16_PARAM, torch.float16: kernel.FP16_PARAM}
    param = None if job.param is None else job.param.view(_bits(job.param.dtype))
    launch: Any = kernel.adamw
    for start, stop, decays in by_decay(job):  # few: norms lie together behind a layer's matrices, or biases between
        at = slice(start, stop)
        launch[(-(-(stop - start) // kernel.BLOCK),)](
            usable.view(torch.uint8),
            job.grad[at],
            first[at],
            views["exp_avg"][at],
            views["exp_avg_sq"][at],
            first[at] if param is None else param[at],
            stop - start,
            scalars.grad_scale,
            scalars.lerp_coefficient,
            scalars.beta2,
            scalars.one_minus_beta2,
            scalars.bias_correction2_sqrt,
            scalars.eps,
            scalars.negative_step_size,
            scalars.decay if decays else 1.0,
            LERP_FROM_GRAD=scalars.lerp_from_grad,
            SPLIT=state_format.split_master,
            PARAM=kernel.NO_PARAM if job.param is None else kinds[job.param.dtype],
            BLOCK=kernel.BLOCK,
            enable_fp_fusion=False,
        )


def _bits(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype.itemsize == 4 else torch.int16


class MatrixJob(NamedTuple):
    """A matrix, all of it in RAM or on one device."""

    state_format: StateFormat
    """One `without_squares`."""
    job: ChunkJob
    """Gaps after the matrix are left alone."""
    shape: tuple[int, int]


class MatrixUpdates:
    """Muon on one matrix after another. One thread queues the matrices, another waits until they are back in RAM."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = None
        if device.type == "cuda":  # the next forward pass waits for the products, so they go before its own
            self._streams = tuple(torch.cuda.Stream(device, priority=priority) for priority in (0, -1, 0))
        self._queue = ThreadPoolExecutor(1, thread_name_prefix="muon")
        self._arrivals = ThreadPoolExecutor(1, thread_name_prefix="muon-arrivals")
        self._room = threading.Condition()
        self._there_bytes: list[int] = []
        """A number for each matrix that has memory on the device."""

    def submit(self, jobs: Sequence[MatrixJob], hyper: AdamWHyper) -> Future[None]:
        """Queue the update of a unit in RAM. Its tensors must not be touched until the result is there."""
        updated: Future[None] = Future()
        queued = self._queue.submit(self._update, jobs, hyper, updated)
        queued.add_done_callback(lambda queued: queued.cancelled() and updated.cancel())
        return updated

    def _update(self, jobs: Sequence[MatrixJob], hyper: AdamWHyper, updated: Future[None]) -> None:
        failed: BaseException | None = None
        try:
            for job in jobs:
                if self._streams is None:
                    update_matrix(job, hyper)
                else:
                    self._send(job, hyper, updated)
        except BaseException as error:  # raised again on the thread that waits
            failed = error
            for stream in self._streams or ():
                stream.synchronize()
        # Behind all its matrices: a unit has its tensors back when nothing moves them any more, failed or not.
        self._arrivals.submit(_end, updated, failed)

    def _send(self, matrix: MatrixJob, hyper: AdamWHyper, updated: Future[None]) -> None:
        """Queue an update on the device, once the matrices there leave room; two always have it."""
        home, numel = matrix.job, matrix.shape[0] * matrix.shape[1]
        assert self._streams is not None and home.param is not None
        up, products, down = self._streams
        homes = (home.grad, home.state, home.param[:numel])
        n_bytes = sum(tensor.nbytes for tensor in homes)
        with self._room:
            self._room.wait_for(
                lambda: len(self._there_bytes) < 2 or sum(self._there_bytes) + n_bytes <= MUON_BYTES_UNDER_WAY
            )
            self._there_bytes.append(n_bytes)
        try:
            with torch.cuda.stream(up):
                grad, state, param = (torch.empty_like(tensor, device=self._device) for tensor in homes)
                grad.copy_(homes[0], non_blocking=True)
                state.copy_(homes[1], non_blocking=True)
                if matrix.state_format.split_master:  # whole only together with the parameter
                    param.copy_(homes[2], non_blocking=True)
            products.wait_stream(up)
            with torch.cuda.stream(products):
                update_matrix(matrix._replace(job=ChunkJob(grad, state, param)), hyper)
            down.wait_stream(products)
            with torch.cuda.stream(down):
                homes[1].copy_(state, non_blocking=True)
                homes[2].copy_(param, non_blocking=True)
                arrived = torch.cuda.Event(blocking=True)
                arrived.record()
        except BaseException:
            self._leave(n_bytes)
            raise
        self._arrivals.submit(self._arrive, arrived, [grad, state, param], n_bytes, updated)

    def _arrive(self, arrived: torch.cuda.Event, held: list[torch.Tensor], n_bytes: int, updated: Future[None]) -> None:
        """Keep what the streams use alive until they have used it. Then free its room for the next matrix."""
        try:
            arrived.synchronize()
        except BaseException as error:  # raised again on the thread that waits
            _end(updated, error)
        held.clear()
        self._leave(n_bytes)

    def _leave(self, n_bytes: int) -> None:
        with self._room:
            self._there_bytes.remove(n_bytes)
            self._room.notify()

    def close(self) -> None:
        """End after the unit that is at work."""
        self._queue.shutdown(cancel_futures=True)
        self._arrivals.shutdown()


def _end(updated: Future[None], failed: BaseException | None) -> None:
    if updated.done():  # its first failure stays
        return
    if failed is None:
        updated.set_result(None)
    else:
        updated.set_exception(failed)


def update_matrix(matrix: MatrixJob, hyper: AdamWHyper) -> None:
    """Muon's update in place, on a GPU queued on the current stream. Of `hyper` it takes lr, weight_decay and
    grad_scale."""
    (state_format, job, shape), numel = matrix, matrix.shape[0] * matrix.shape[1]
    assert job.param is not None
    views = {
        name: job.state[at.offset_bytes : at.offset_bytes + at.size_bytes].view(at.dtype)[:numel]
        for name, at in state_format.regions(job.grad.numel()).items()
    }
    master = join_master(job.param[:numel], views["residual"]) if state_format.split_master else views["master"]
    weight = torch.nn.Parameter(master.view(shape))
    weight.grad = (job.grad[:numel].to(torch.float32) * hyper.grad_scale).view(shape)
    muon = torch.optim.Muon([weight], lr=hyper.lr, weight_decay=hyper.weight_decay, adjust_lr_fn="match_rms_adamw")
    muon.state[weight]["momentum_buffer"] = views["exp_avg"].view(shape)
    muon.step()
    if state_format.split_master:
        param, residual = split_master(master)
        views["residual"].copy_(residual)
    else:
        param = cast_param(master, job.param.dtype)
    job.param[:numel].copy_(param)

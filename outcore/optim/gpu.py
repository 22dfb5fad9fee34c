"""Updates on the device: AdamW with the bits of the CPU's kernels, and Muon on matrices. AdamW takes chunks that lie
there (`update_on_device`); `UpdatesFromHome` takes both of what waits in RAM.

Muon is torch's own (`torch.optim.Muon`), a matrix at a time in fp32 with its Newton-Schulz products in bf16, and its
`match_rms_adamw`: with that a learning rate of AdamW's fits both. Of every parameter 10 bytes go up and as many come
back (with a split master 8; AdamW's second moment makes it 4 more), which mostly takes longer than the arithmetic. So
three streams work at once: one brings the next job up, one computes, one takes results home."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from outcore.common.quantities import round_up
from outcore.optim.formats import StateFormat
from outcore.optim.formats.chunk_state import cast_param, join_master, split_master
from outcore.optim.hyper import AdamWHyper
from outcore.optim.jobs import ChunkJob
from outcore.optim.reference import update_chunk

SLOT_ALIGN_BYTES = 256
MOST_NUMEL = (1 << 31) - 1024
"""Parameters of one update on a GPU: its kernel counts in 32 bits, and its last block may reach beyond the end."""


def updates_on_device(state_format: StateFormat, numel: int) -> bool:
    """Whether `update_on_device` knows the format, one with fp32 moments, and takes so many parameters at once."""
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
    launch: Any = kernel.adamw
    launch[(-(-numel // kernel.BLOCK),)](
        usable.view(torch.uint8),
        job.grad,
        first,
        views["exp_avg"],
        views["exp_avg_sq"],
        first if job.param is None else job.param.view(_bits(job.param.dtype)),
        numel,
        scalars.grad_scale,
        scalars.lerp_coefficient,
        scalars.beta2,
        scalars.one_minus_beta2,
        scalars.bias_correction2_sqrt,
        scalars.eps,
        scalars.negative_step_size,
        scalars.decay if job.weight_decay else 1.0,
        LERP_FROM_GRAD=scalars.lerp_from_grad,
        SPLIT=state_format.split_master,
        PARAM=kernel.NO_PARAM if job.param is None else kinds[job.param.dtype],
        BLOCK=kernel.BLOCK,
        enable_fp_fusion=False,
    )


def _bits(dtype: torch.dtype) -> torch.dtype:
    return torch.int32 if dtype.itemsize == 4 else torch.int16


class HomeJob(NamedTuple):
    """What is updated with gradient, states and parameter in RAM."""

    state_format: StateFormat
    job: ChunkJob
    shape: tuple[int, int] | None = None
    """Of the matrix that the chunk begins with, for Muon (a format `without_squares`; gaps behind the matrix are left
    alone); None: AdamW on all of the chunk."""

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradient, states, parameter."""
        grad, state, param = self.job.grad, self.job.state, self.job.param
        assert param is not None
        return grad, state, param if self.shape is None else param[: self.shape[0] * self.shape[1]]

    @staticmethod
    def bytes_of(state_format: StateFormat, numel: int, element_bytes: int) -> int:
        """What a chunk takes on a device, with a gradient and a parameter of `element_bytes` each."""
        homes = (numel * element_bytes, state_format.chunk_bytes(numel), numel * element_bytes)
        return sum(round_up(size, SLOT_ALIGN_BYTES) for size in homes)


class UpdatesFromHome:
    """Updates on a device of what lives in RAM, one job after another: a thread queues them, another one waits until
    they are back. `num_slots` of `slot_bytes` on the device, made with the first job, hold what is on its way."""

    def __init__(self, device: torch.device, slot_bytes: int, num_slots: int) -> None:
        self._device = device
        self._streams = None
        if device.type == "cuda":  # the next forward pass waits for the updates, so they go before its own work
            self._streams = tuple(torch.cuda.Stream(device, priority=priority) for priority in (0, -1, 0))
        self._queue = ThreadPoolExecutor(1, thread_name_prefix="updates-from-home")
        self._arrivals = ThreadPoolExecutor(1, thread_name_prefix="updates-from-home-arrivals")
        self._slot_bytes, self._num_slots = round_up(slot_bytes, SLOT_ALIGN_BYTES), num_slots
        self._free: SimpleQueue[torch.Tensor] | None = None
        self._usable: torch.Tensor | None = None

    def submit(self, jobs: Sequence[HomeJob], hyper: AdamWHyper, updated: Future[None] | None = None) -> Future[None]:
        """Queue the update of a unit in RAM; until the result is there (in `updated`, if that is given), the tensors
        belong to it."""
        end: Future[None] = Future() if updated is None else updated
        queued = self._queue.submit(self._update, jobs, hyper, end)
        queued.add_done_callback(lambda queued: queued.cancelled() and end.cancel())
        return end

    def _update(self, jobs: Sequence[HomeJob], hyper: AdamWHyper, updated: Future[None]) -> None:
        failed: BaseException | None = None
        try:
            for job in jobs:
                if self._streams is None:
                    _update_there(job, hyper, torch.ones(1, dtype=torch.bool))
                else:
                    self._send(job, hyper, updated)
        except BaseException as error:  # raised again on the thread that waits
            failed = error
            for stream in self._streams or ():
                stream.synchronize()
        # Behind all its jobs: a unit has its tensors back when nothing moves them any more, failed or not.
        self._arrivals.submit(_end, updated, failed)

    def open(self) -> None:
        """Take the memory on the device now, which otherwise the first job does. torch.OutOfMemoryError."""
        if self._free is None and self._streams is not None:
            slots = torch.empty(self._num_slots, self._slot_bytes, dtype=torch.uint8, device=self._device)
            self._usable = torch.ones(1, dtype=torch.bool, device=self._device)
            torch.cuda.synchronize(self._device)  # the streams here do not wait for the one that made them
            self._free = SimpleQueue()
            for slot in slots:
                self._free.put(slot)

    def _send(self, home: HomeJob, hyper: AdamWHyper, updated: Future[None]) -> None:
        """Queue an update on the device, once a slot is free."""
        self.open()
        assert self._streams is not None and self._free is not None and self._usable is not None
        up, products, down = self._streams
        slot = self._free.get()
        try:
            grad, state, param = self._views(slot, home.tensors)
            with torch.cuda.stream(up):
                grad.copy_(home.tensors[0], non_blocking=True)
                state.copy_(home.tensors[1], non_blocking=True)
                if home.state_format.split_master:  # whole only together with the parameter
                    param.copy_(home.tensors[2], non_blocking=True)
            products.wait_stream(up)
            with torch.cuda.stream(products):
                there = replace(home.job, grad=grad, state=state, param=param)
                _update_there(home._replace(job=there), hyper, self._usable)
            down.wait_stream(products)
            with torch.cuda.stream(down):
                home.tensors[1].copy_(state, non_blocking=True)
                home.tensors[2].copy_(param, non_blocking=True)
                arrived = torch.cuda.Event(blocking=True)
                arrived.record()
        except BaseException:
            for stream in self._streams:
                stream.synchronize()
            self._free.put(slot)
            raise
        self._arrivals.submit(self._arrive, arrived, slot, updated)

    def _views(self, slot: torch.Tensor, homes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        views, begin = [], 0
        for home in homes:
            views.append(slot[begin : begin + home.nbytes].view(home.dtype))
            begin += round_up(home.nbytes, SLOT_ALIGN_BYTES)
        return views

    def _arrive(self, arrived: torch.cuda.Event, slot: torch.Tensor, updated: Future[None]) -> None:
        """Keep the slot until the streams have used it, then let the next job have it."""
        try:
            arrived.synchronize()
        except BaseException as error:  # raised again on the thread that waits
            _end(updated, error)
        assert self._free is not None
        self._free.put(slot)

    def close(self) -> None:
        """End after the unit that is at work."""
        self._queue.shutdown(cancel_futures=True)
        self._arrivals.shutdown()


def _update_there(home: HomeJob, hyper: AdamWHyper, usable: torch.Tensor) -> None:
    if home.shape is None:
        update_on_device(home.state_format, home.job, hyper, usable)
    else:
        update_matrix(home.state_format, home.job, home.shape, hyper)


def _end(updated: Future[None], failed: BaseException | None) -> None:
    if updated.done():  # its first failure stays
        return
    if failed is None:
        updated.set_result(None)
    else:
        updated.set_exception(failed)


def update_matrix(state_format: StateFormat, job: ChunkJob, shape: tuple[int, int], hyper: AdamWHyper) -> None:
    """Muon's update in place, on a GPU queued on the current stream. Of `hyper` it takes lr, weight_decay and
    grad_scale."""
    numel = shape[0] * shape[1]
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

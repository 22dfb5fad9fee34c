"""Which implementation of the optimizer runs: the extension, built when it is not, or torch, saying why."""

from __future__ import annotations

import logging

import torch

from outcore.optim.backend import Backend, BackendName, GradStats
from outcore.optim.build import ExtensionUnavailable
from outcore.optim.extension import ExtensionBackend
from outcore.optim.torch_backend import TorchBackend

logger = logging.getLogger(__name__)


def open_backend(name: BackendName = "auto") -> Backend:
    """The named implementation. ExtensionUnavailable when "extension" cannot be had; "auto" then logs it."""
    if name not in ("auto", "extension", "torch"):
        raise ValueError(f"the optimizer's backend is 'auto', 'extension' or 'torch', not {name!r}")
    if name == "torch":
        return TorchBackend()
    try:
        return ExtensionBackend()
    except (ExtensionUnavailable, TimeoutError) as error:
        if name == "extension":
            raise
        logger.warning("the CPU optimizer runs in torch, several times slower: %s", error)
        return TorchBackend()


def grad_sumsq_and_finite(grad: torch.Tensor, num_threads: int = 1, backend: Backend | None = None) -> GradStats:
    """(sum of squares in double precision, whether every element is finite) of a bf16, fp16 or fp32 gradient.

    The sum is of blocks of 4096 in a fixed order, so it depends neither on threads nor on the processor. Give `backend`
    when calling often: opening one takes some milliseconds. ValueError for a tensor that is not dense on the CPU."""
    return (backend or open_backend()).grad_sumsq_and_finite(grad, num_threads)

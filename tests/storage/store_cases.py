"""Tensors for the tests of TensorStore, and a gate for those of the engines."""

import os
import threading

import pytest
import torch

from outcore.storage import TensorSpec, TensorStore

WAIT_S = 60.0  # no test waits longer; a hang is a failure
SPECS = [
    TensorSpec("embed.weight", torch.bfloat16, (301, 77)), TensorSpec("scale", torch.float32, ()),
    TensorSpec("nothing", torch.float32, (0, 4)), TensorSpec("moments", torch.float32, (600_001,)),
    TensorSpec("mask", torch.bool, (13,)),
]  # fmt: skip


def values(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        spec.name: torch.randint(0, 2, spec.shape, generator=generator).bool()
        if spec.dtype == torch.bool
        else torch.randn(spec.shape, generator=generator).to(spec.dtype)
        for spec in SPECS
    }


def write_all(store: TensorStore, tensors: dict[str, torch.Tensor]) -> None:
    for transfer in [store.submit_write(name, tensor) for name, tensor in tensors.items()]:
        transfer.wait(WAIT_S)


def assert_holds(store: TensorStore, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        back = torch.zeros_like(tensor)
        assert store.submit_read(name, back).wait(WAIT_S) == tensor.nbytes
        assert torch.equal(back, tensor), name


def read_back(store: TensorStore, name: str) -> torch.Tensor:
    spec = store.spec(name)
    tensor = torch.empty(spec.shape, dtype=spec.dtype)
    store.submit_read(name, tensor).wait(WAIT_S)
    return tensor


class Gate:
    """Holds every pread back until opened, and notes their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)
        self.offsets: list[int] = []
        real = os.preadv

        def gated(fd: int, buffers: list, offset: int) -> int:
            self.offsets.append(offset)
            self.entered.release()
            assert self.opened.wait(WAIT_S)
            return real(fd, buffers, offset)

        monkeypatch.setattr(os, "preadv", gated)

"""Tensors for the tests of TensorStore."""

import torch

from outcore.storage import TensorSpec, TensorStore

WAIT_S = 60.0
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

"""Products of packed weights on the GPU's kernels: near those of the expanded values, in every format.

Without a GPU Triton's interpreter runs them: `pip install triton`, then TRITON_INTERPRET=1 before pytest."""

from __future__ import annotations

import importlib.util
import os
from functools import partial

import pytest
import torch

from outcore.formats import DeviceProducts, PackedSpec, device_products, packed_format
from tests.formats.test_formats import random_planes

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
LOW = torch.float16 if IS_INTERPRETED else torch.bfloat16
"""Type of several rows: the interpreter multiplies bits of bf16 as whole numbers."""
DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(not IS_INTERPRETED, reason="TRITON_INTERPRET=1 and triton")),
]
FORMATS = ("nf4", "int8", "int8_64", "int4_128_fp16", "int4_64_bf16_zero", "int4_32_fp32_zero", "mxfp4", "fp8_128")
FORMATS += ("q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k")


@pytest.fixture(params=DEVICES)
def products(request) -> DeviceProducts:
    return device_products(torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu"))


def case(name: str, shape: tuple[int, ...], device: torch.device) -> tuple[PackedSpec, list[torch.Tensor]]:
    spec = PackedSpec(packed_format(name), shape)
    data = spec.assemble(random_planes(name, spec.num_blocks)).to(device)
    return spec, spec.planes(data)


def assert_near(found: torch.Tensor, x: torch.Tensor, value: torch.Tensor) -> None:
    """Within the rounding of the values to the type of x, and of the result."""
    exact = x.double() @ value.double().t()
    size = (x.double().square() @ value.double().square().t()).sqrt()
    bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[x.dtype]
    assert found.dtype == x.dtype and found.shape == exact.shape
    error = float(((found.double() - exact).abs() / (size + 1e-6)).max())
    assert error < bound, x.dtype


def expanded(spec: PackedSpec, planes: list[torch.Tensor]) -> torch.Tensor:
    return spec.format.unpack_blocks(*(plane.cpu() for plane in planes)).view(spec.shape)


@pytest.mark.parametrize("name", FORMATS)
def test_products_are_near_those_of_the_values(products: DeviceProducts, name: str) -> None:
    for rows, columns in ((37, 768), (16, 2560), (1, 256)):
        spec, planes = case(name, (rows, columns), products.device)
        assert DeviceProducts.can(spec)
        value = expanded(spec, planes)
        kinds = [(1, torch.bfloat16), (1, torch.float32), (3, LOW), (16, torch.float16), (17, torch.float32)]
        for m, dtype in kinds:
            x = torch.randn(m, columns).div(64).to(dtype)  # sums of some formats are beyond fp16
            x[:, 64:128] = 0
            found = products.multiply(spec, planes, x.to(products.device))
            assert_near(found.cpu(), x, value)


@pytest.mark.parametrize("m", [1, 2, 4, 8, 16])
def test_programs_that_share_rows_give_the_same_bits_again(products: DeviceProducts, m: int) -> None:
    spec, planes = case("nf4", (48, 6144), products.device)
    x = torch.randn(m, 6144, dtype=LOW)
    found = [products.multiply(spec, planes, x.to(products.device)) for _ in range(4)]
    assert all(torch.equal(found[0], other) for other in found)
    assert_near(found[0].cpu(), x, expanded(spec, planes))


@pytest.mark.parametrize("name", ["nf4", "mxfp4", "q6_k", "int4_64_bf16_zero"])
@pytest.mark.parametrize("of_each", [1, 3])
def test_lines_choose_matrices(products: DeviceProducts, name: str, of_each: int) -> None:
    """From slots that lie apart; a line without a matrix is zeros."""
    slots, rows, columns = 5, 24, 768
    one = PackedSpec(packed_format(name), (rows, columns))
    memory = torch.zeros((slots, one.size_bytes + 512), dtype=torch.uint8)
    for slot in memory:
        slot[256 : 256 + one.size_bytes] = one.assemble(random_planes(name, one.num_blocks))
    memory = memory.to(products.device)
    planes = [
        memory[:, 256 + start : 256 + start + size].view(plane.dtype).unflatten(1, (-1, plane.per_block))
        for plane, (start, size) in zip(one.format.planes, one.plane_ranges(), strict=True)
    ]
    ids = torch.tensor([4, -1, 0, 2, 2, -1], device=products.device)
    x = torch.randn(len(ids) // of_each, columns, dtype=torch.bfloat16)
    found = products.multiply_chosen(one, planes, ids, x.to(products.device)).cpu()
    for line, number in enumerate(ids.tolist()):
        if number < 0:
            assert not found[line].any()
        else:
            value = expanded(one, [plane[number] for plane in planes])
            own = slice(line // of_each, line // of_each + 1)
            assert_near(found[line : line + 1], x[own], value)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 8])
def test_a_cuda_graph_holds_products(m: int) -> None:
    products = device_products(torch.device("cuda", 0))
    spec, planes = case("q4_k", (1000, 5120), products.device)
    x = torch.randn(m, 5120, dtype=torch.bfloat16, device="cuda")
    expected = products.multiply(spec, planes, x)
    graph, given = torch.cuda.CUDAGraph(), torch.zeros_like(x)
    with torch.cuda.graph(graph):
        found = products.multiply(spec, planes, given)
    given.copy_(x)
    for _ in range(3):
        graph.replay()
        assert torch.equal(found, expected)


def test_what_has_no_kernel_is_told() -> None:
    assert not DeviceProducts.can(PackedSpec(packed_format("nf4"), (64,)))
    assert not DeviceProducts.can(PackedSpec(packed_format("int8_40"), (4, 80)))
    assert DeviceProducts.can(PackedSpec(packed_format("mxfp4"), (8, 4, 96), is_transposed=True))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [LOW, torch.float32])
@pytest.mark.parametrize("device", DEVICES)
def test_expanding_gives_the_references_bits(device: str, name: str, dtype: torch.dtype) -> None:
    """Also of a run of blocks that begins anywhere, as rows of a matrix do."""
    spec, planes = case(name, (37, 768), torch.device(device))
    out, packed = torch.empty(spec.shape, dtype=dtype, device=device), spec.format
    assert packed.layout is not None
    expand = partial(packed.layout.expand, packed.block)
    again = expand(planes, packed.table(out.device), out)
    value = expanded(spec, planes).to(dtype)
    assert torch.equal(out.cpu(), value)
    if device == "cuda":  # what an interpreter runs has no address
        out.zero_()
        again()
        assert torch.equal(out.cpu(), value)
    first = packed.num_blocks((5, 768))
    expand([plane[first:] for plane in planes], packed.table(out.device), out[5:])
    assert torch.equal(out.cpu(), value)

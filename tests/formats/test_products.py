"""Products on the CPU: near the exact ones in every format, on every instruction set, for any number of rows."""

from __future__ import annotations

import pytest
import torch

from outcore.formats import PackedSpec, packed_format
from outcore.formats.products import VARIANT_NAMES, PackedProducts, available_variants
from tests.formats.test_formats import random_planes

FORMATS = ("nf4", "int8", "int4_128_fp16", "int4_64_bf16_zero", "int4_32_fp32_zero", "mxfp4")
FORMATS += ("q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k")
ROWS, COLUMNS = 37, 768


def case(name: str) -> tuple[PackedSpec, torch.Tensor]:
    spec = PackedSpec(packed_format(name), (ROWS, COLUMNS))
    return spec, spec.assemble(random_planes(name, spec.num_blocks))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_products_are_near_the_exact_ones(variant: str, name: str) -> None:
    if variant not in available_variants():
        pytest.skip(f"this processor has no {variant}")
    spec, data = case(name)
    assert PackedProducts.can(spec)
    with PackedProducts(2, variant) as products:
        for m in (1, 2, 3, 4, 5, 16):
            x = torch.randn(m, COLUMNS)
            x[:, 64:128] = 0
            exact, found = x @ spec.unpack(data).t(), products.product(spec, data, x)
            size = (spec.unpack(data).square() @ x.square().t()).sqrt().t()  # of a sum with random signs
            assert ((found - exact).abs() / size).max() < 4e-4


@pytest.mark.parametrize("variant", VARIANT_NAMES)
@pytest.mark.parametrize("columns", [64, 128, 192, 832])
def test_rows_may_end_within_a_group(variant: str, columns: int) -> None:
    if variant not in available_variants():
        pytest.skip(f"this processor has no {variant}")
    with PackedProducts(2, variant) as products:
        for name in ("nf4", "int4_64_bf16_zero", "int4_32_fp32_zero", "mxfp4", "q4_0", "q4_1", "q8_0"):
            spec, x = PackedSpec(packed_format(name), (5, columns)), torch.randn(3, columns)
            data = spec.assemble(random_planes(name, spec.num_blocks))
            size = (spec.unpack(data).square() @ x.square().t()).sqrt().t()
            error = (products.product(spec, data, x) - x @ spec.unpack(data).t()).abs()
            assert (error / size).max() < 4e-4, name


def test_threads_change_no_bit_and_variants_little() -> None:
    spec, data = case("nf4")
    x = torch.randn(3, COLUMNS)
    results = []
    for threads in (1, 2, 5):
        with PackedProducts(threads) as products:
            results += [products.product(spec, data, x) for _ in range(20)]
    assert all(torch.equal(results[0], result) for result in results)
    alone = [products.product(spec, data, row.unsqueeze(0)) for products in [PackedProducts(1)] for row in x]
    assert torch.equal(torch.cat(alone), results[0])


def test_threads_that_come_late_see_whole_products() -> None:
    """More threads than cores: some find a core only when the next product, of other rows and columns, is under way."""
    shapes = [(rows, columns) for rows in (16, 100, 600) for columns in (64, 768)]
    cases = []
    with PackedProducts(1) as alone:
        for shape in shapes:
            spec, x = PackedSpec(packed_format("q8_0"), shape), torch.randn(2, shape[1])
            data = spec.assemble(random_planes("q8_0", spec.num_blocks))
            cases.append((spec, data, x, alone.product(spec, data, x)))
    with PackedProducts(9) as products:
        for number in range(600):
            spec, data, x, expected = cases[number * 5 % len(cases)]
            assert torch.equal(products.product(spec, data, x), expected), number


def test_what_has_no_kernel_is_told() -> None:
    assert not PackedProducts.can(PackedSpec(packed_format("fp8_128"), (4, 256)))
    assert not PackedProducts.can(PackedSpec(packed_format("q8_0"), (4, 96)))  # not whole steps of 64
    assert not PackedProducts.can(PackedSpec(packed_format("nf4"), (2, 4, 64)))
    with pytest.raises(ValueError, match="this processor has no avx9"):
        PackedProducts(1, "avx9")

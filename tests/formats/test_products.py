"""Products on the CPU: near the exact ones in every format, on every instruction set, for any number of rows."""

from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.formats import PackedSpec, Scattered, packed_format, stack_of
from outcore.formats.products import VARIANT_NAMES, CStack, PackedProducts, available_variants
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


@pytest.mark.parametrize("variant", VARIANT_NAMES)
@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(["bf16", "fp16"]),
    st.integers(1, 150),
    st.integers(1, 110),
    st.integers(1, 21),
    st.sampled_from([2.0**-20, 1.0, 100.0]),
)
def test_weights_of_16_bits_are_multiplied_exactly(variant, name, rows, lines, m, unit) -> None:
    """As near as sums in fp32 are; a row of activations has the same bits whoever its neighbours are."""
    if variant not in available_variants():
        pytest.skip(f"this processor has no {variant}")
    spec, x = PackedSpec(packed_format(name), (rows, 32 * lines)), torch.randn(m, 32 * lines)
    value = unit * torch.randn(spec.shape)
    value[0, :3] = 0
    data = spec.pack(value)
    weight, assembled = (
        spec.unpack(data, torch.float64),
        spec.assemble([spec.unpack(data).to(spec.format.planes[0].dtype)]),
    )
    assert torch.equal(data, assembled), "the bytes are the weight"
    with PackedProducts(2, variant) as products:
        found = products.product(spec, data, x)
        size = (weight.square() @ x.double().square().t()).sqrt().t()
        assert ((found - x.double() @ weight.t()).abs() <= 3e-6 * size).all()
        assert torch.equal(products.product(spec, data, x[-1:]), found[-1:])


@pytest.mark.parametrize("variant", VARIANT_NAMES)
def test_what_is_no_number_in_16_bits_stays_so(variant: str) -> None:
    if variant not in available_variants():
        pytest.skip(f"this processor has no {variant}")
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        spec, value = PackedSpec(packed_format(name), (6, 32)), torch.zeros(6, 32, dtype=dtype)
        value[:, 5] = torch.tensor([torch.inf, -torch.inf, torch.nan, 65504, 6e-8, -6e-8]).to(dtype)
        with PackedProducts(1, variant) as products:
            found = products.product(spec, spec.assemble([value]), torch.ones(1, 32))
        assert torch.equal(found.nan_to_num(7, 8, 9), value[None, :, 5].float().nan_to_num(7, 8, 9))
    spec, value = PackedSpec(packed_format("bf16"), (1, 32)), torch.full((1, 32), 1e-39).bfloat16()
    with PackedProducts(1, variant) as products:
        assert products.product(spec, spec.assemble([value]), torch.full((1, 32), 1e38)).item() == 0  # denormals


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


def a_stack(name: str, count: int, rows: int, columns: int, gap: int = 0) -> tuple[list, CStack]:
    """Weights of one shape, and how they lie: the planes of one behind the other, `gap` bytes between them."""
    spec = PackedSpec(packed_format(name), (rows, columns))
    weights = [spec.assemble(random_planes(name, spec.num_blocks)) for _ in range(count)]
    stride = spec.size_bytes + gap
    memory = torch.zeros(count * stride, dtype=torch.uint8)
    for number, data in enumerate(weights):
        memory[number * stride : number * stride + spec.size_bytes] = data
    planes = spec.planes(memory[: spec.size_bytes])
    stack = stack_of(PackedSpec(spec.format, (count, rows, columns)), planes, [stride] * len(planes))
    return [memory, spec, weights], stack


@pytest.mark.parametrize("name", FORMATS)
def test_rows_times_the_weights_that_they_chose_have_the_bits_of_single_products(name: str) -> None:
    (memory, spec, weights), stack = a_stack(name, 5, ROWS, COLUMNS, gap=256)
    choices = [[3], [0, 4, 2, 1], [1, 1, -1, 3, 1, 3], [-1, -1], [2] * 35 + [0] * 3]
    for threads in (1, 3):
        with PackedProducts(threads) as products:
            for chosen, share in [(chosen, share) for chosen in choices for share in (1, 2)]:
                x = torch.randn(-(-len(chosen) // share), COLUMNS)
                out = torch.full((len(chosen), ROWS), 7.0)
                products.multiply_chosen(stack, x, torch.tensor(chosen), share, out)
                for pair, number in enumerate(chosen):
                    row = x[pair // share : pair // share + 1]
                    expected = (
                        torch.full((1, ROWS), 7.0) if number < 0 else products.product(spec, weights[number], row)
                    )
                    assert torch.equal(out[pair : pair + 1], expected), (chosen, pair)
    assert len(memory)


def test_weights_that_are_absent_are_fetched_before_they_are_multiplied() -> None:
    (memory, spec, weights), stack = a_stack("q4_k", 5, 40, 256, gap=64)
    stride, told, code = stack.codes_stride, [], 0
    places = torch.tensor([0, stride, Scattered.ABSENT, Scattered.ABSENT, 4 * stride])

    def fetch(numbers: list[int]) -> int:
        told.append(numbers)
        for number in numbers:
            places[number] = number * stride
        return code

    planes = spec.planes(memory[: spec.size_bytes])
    scattered = Scattered(places, fetch)
    stack = stack_of(PackedSpec(spec.format, (5, 40, 256)), planes, [], scattered)
    with PackedProducts(2) as products:
        for chosen in ([4, 0], [3, 1, 3], [2, 3, 2], [3, 2, 0]):
            x = torch.randn(len(chosen), 256)
            found = products.multiply_chosen(stack, x, torch.tensor(chosen), 1)
            for pair, number in enumerate(chosen):
                assert torch.equal(found[pair : pair + 1], products.product(spec, weights[number], x[pair : pair + 1]))
        assert told == [[1, 3], [2, 3]], "all that a question needs, once, where one is absent"
        places[2], code = Scattered.ABSENT, 5
        with pytest.raises(OSError, match="5"):
            products.multiply_chosen(stack, x, torch.tensor(chosen), 1)


def test_a_box_takes_chosen_weights_where_nobody_else_does() -> None:
    (memory, spec, weights), stack = a_stack("q4_k", 4, 40, 256)
    host = torch.zeros(1 << 16, dtype=torch.uint8)
    box, words = host[:4096], host[:4096].view(torch.int64)
    x, out = host[4096 : 1 << 15].view(torch.float32), host[1 << 15 :].view(torch.float32)
    numbers, elsewhere = torch.zeros(12, dtype=torch.int32), torch.full((4,), -1, dtype=torch.int32)
    every = torch.zeros(1, dtype=torch.int32)
    with PackedProducts(3) as products:
        products.listen(box, x, out)
        task = products.task_of_chosen(stack, numbers, 2, elsewhere, every)
        questions = [([3, 1, 3, 0], [], 0), ([0, 1], [1], 0), ([2, 2, 2, 0, 1, 2], [0, 1], 0), ([3, 1, 2, 3], [1], 2)]
        for turn, (chosen, there, every_th) in enumerate(questions, 1):
            every[0] = every_th
            others = [pair for pair, weight in enumerate(chosen) if weight not in there]
            others = others[every_th - 1 :: every_th] if every_th else []
            rows = x[: len(chosen) // 2 * 256].view(-1, 256).copy_(torch.randn(len(chosen) // 2, 256))
            out.fill_(7.0)
            numbers[: len(chosen)] = torch.tensor(chosen)
            elsewhere.fill_(-1)[there] = 5
            words[0] = number = turn << 32 | PackedProducts.question(task, len(chosen))
            until_s = time.monotonic() + 60
            while words[8] != number:
                assert time.monotonic() < until_s
            for pair, weight in enumerate(chosen):
                found, row = out[pair * 40 : pair * 40 + 40], rows[pair // 2 : pair // 2 + 1]
                is_other = weight in there or pair in others
                expected = torch.full((1, 40), 7.0) if is_other else products.product(spec, weights[weight], row)
                assert torch.equal(found, expected[0])
    assert len(memory)


def test_what_has_no_kernel_is_told() -> None:
    assert not PackedProducts.can(PackedSpec(packed_format("fp8_128"), (4, 256)))
    assert not PackedProducts.can(PackedSpec(packed_format("q8_0"), (4, 96)))  # not whole steps of 64
    assert PackedProducts.can(PackedSpec(packed_format("bf16"), (4, 96)))
    assert not PackedProducts.can(PackedSpec(packed_format("bf16"), (2, 4, 96)))
    assert not PackedProducts.can(PackedSpec(packed_format("nf4"), (2, 4, 64)))
    with pytest.raises(ValueError, match="this processor has no avx9"):
        PackedProducts(1, "avx9")

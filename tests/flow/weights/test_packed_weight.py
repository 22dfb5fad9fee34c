"""Packed weights in the place of parameters: near the expanded ones for few rows, their bits for many."""

from __future__ import annotations

import time

import pytest
import torch
from torch.nn.functional import embedding, linear

from outcore.flow.weights import HandOver, InPlaceProducts, PackedWeight
from outcore.formats import PackedProducts, PackedSpec, packed_format
from tests.infer.models import AsksHere

CPU = torch.device("cpu")


@pytest.fixture
def weight_of():
    with PackedProducts(2) as products:

        def made(shape, name="q8_0", is_transposed=False):
            spec = PackedSpec(packed_format(name), shape, is_transposed)
            data = PackedSpec(spec.format, shape).pack(torch.randn(shape))
            return PackedWeight(spec, spec.planes(data), torch.float32, InPlaceProducts(products, {"q8_0": 8}, CPU))

        yield made


def test_few_rows_are_near_and_many_have_the_same_bits(weight_of):
    weight, bias = weight_of((40, 128)), torch.randn(40)
    for x in (torch.randn(3, 128), torch.randn(1, 2, 128), torch.randn(0, 128)):
        torch.testing.assert_close(linear(x, weight, bias), linear(x, weight.expanded(), bias), rtol=1e-3, atol=1e-2)
        assert not x.numel() or not torch.equal(linear(x, weight, bias), linear(x, weight.expanded(), bias))
    x = torch.randn(9, 128)
    assert torch.equal(linear(x, weight, bias), linear(x, weight.expanded(), bias))
    weight.products.is_exact = True
    assert torch.equal(linear(x[:2], weight), linear(x[:2], weight.expanded()))


def test_16_bits_are_never_copied_on_their_device(weight_of):
    with PackedProducts(2) as products:
        spec, x = PackedSpec(packed_format("bf16"), (40, 96)), torch.randn(9, 96, dtype=torch.bfloat16)
        data = spec.pack(torch.randn(40, 96))
        weight = PackedWeight(spec, spec.planes(data), torch.bfloat16, InPlaceProducts(products, {"bf16": 8}, CPU))
        value = weight.expanded()
        assert value.data_ptr() == data.data_ptr() and value.dtype == torch.bfloat16
        assert torch.equal(linear(x, weight), linear(x, value)), "more rows than the kernels are for"
        exact = x[:3].double() @ value.double().t()
        assert torch.equal(linear(x[:3], weight), exact.bfloat16())
        assert torch.equal(embedding(torch.tensor([3, 0]), weight), value[[3, 0]])


def test_a_vocabulary_is_expanded_some_rows_at_a_time_and_tokens_choose_theirs(weight_of):
    weight, bias, x = weight_of((90, 128)), torch.randn(90), torch.randn(9, 128)
    value = weight.expanded()
    ids = torch.tensor([[3, 89], [0, 3]])
    assert torch.equal(embedding(ids, weight), value[ids]) and embedding(ids[:0], weight).shape == (0, 2, 128)
    weight.products.expanded_numel = 40 * 128
    torch.testing.assert_close(linear(x, weight, bias), linear(x, value, bias), rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(linear(x, weight), linear(x, value), rtol=1e-6, atol=1e-5)


def test_a_cpu_expands_a_weight_once_for_products_behind_each_other(weight_of, monkeypatch):
    head, other, x = weight_of((90, 128)), weight_of((90, 128)), torch.randn(9, 128)
    other.products, values, expanded = head.products, [head.expanded(), other.expanded()], []
    expand = PackedWeight.expanded
    monkeypatch.setattr(PackedWeight, "expanded", lambda weight, out: expanded.append(weight) or expand(weight, out))
    for weight in (head, head, other, head):
        value = values[0] if weight is head else values[1]
        assert torch.equal(linear(x, weight), linear(x, value))
    assert [weight is head for weight in expanded] == [True, False, True]


def test_a_layer_hands_over_once_for_weights_of_the_same_rows(weight_of):
    spec_of = {"q": (40, 128), "k": (24, 128), "o": (128, 64)}
    with PackedProducts(2) as products:
        in_place = InPlaceProducts(products, {"q8_0": 40}, CPU, HandOver(products, CPU, AsksHere()))
        weights = {name: weight_of(shape) for name, shape in spec_of.items()}
        for weight in weights.values():
            weight.products = in_place

        def layer(rows):
            x, y = torch.randn(rows, 128), torch.randn(1, rows, 64)
            asked = [(x, "q"), (x, "k"), (y, "o")]
            found = [linear(given, weights[name]) for given, name in asked]
            for (given, name), mine in zip(asked, found, strict=True):
                expected = products.multiply(weights[name].call, given.reshape(rows, -1))
                assert torch.equal(mine, expected.view(mine.shape)), name

        for rows, count in ((3, 3), (3, 2), (1, 2), (20, 2)):
            before = products.answered()[0]
            layer(rows)
            assert products.answered()[0] - before == count, "which weights go together shows the first time"
        before = products.answered()
        linear(torch.randn(2, 128), weights["k"])
        time.sleep(0.3)  # whoever answers naps meanwhile
        linear(torch.randn(41, 128), weights["q"])
        assert linear(torch.randn(2, 128, dtype=torch.bfloat16), weights["k"]).dtype == torch.bfloat16
        after = products.answered()
        assert after[0] - before[0] == 2 and after[1] > before[1], "41 rows are expanded"


def test_experts_transposed_stacks_and_anything_else(weight_of):
    x = torch.randn(2, 128)
    stack, turned = weight_of((3, 40, 128)), weight_of((3, 40, 128), is_transposed=True)
    values = stack.expanded()
    assert stack.shape == (3, 40, 128) and turned.shape == (3, 128, 40) and len(stack) == 3
    torch.testing.assert_close(linear(x, stack[torch.tensor(1)]), linear(x, values[1]), rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(x @ turned[2], x @ turned.expanded()[2], rtol=1e-3, atol=1e-2)
    assert torch.equal(torch.bmm(x.expand(3, 2, 128), stack.mT), torch.bmm(x.expand(3, 2, 128), values.mT))
    no_kernel = weight_of((8, 32))  # not a step of 64
    assert no_kernel.call is None
    assert torch.equal(linear(x[:, :32], no_kernel), linear(x[:, :32], no_kernel.expanded()))

"""Matrices rounded to 8 bits by the GPU's kernels: the bits that torch computes on the CPU.

Without a GPU Triton's interpreter runs them: `pip install triton`, then TRITON_INTERPRET=1 before pytest."""

import importlib.util
import os

import pytest
import torch

from outcore.model.forward.products import FLOAT8, float8_rounded, round_by_kernels

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICES = [
    pytest.param("cuda", marks=pytest.mark.gpu),
    pytest.param("cpu", marks=pytest.mark.skipif(not IS_INTERPRETED, reason="TRITON_INTERPRET=1 and triton")),
]
pytestmark = [pytest.mark.parametrize("device", DEVICES), pytest.mark.parametrize("recipe", FLOAT8)]


def by_kernels(matrix: torch.Tensor, recipe: str, of_gradient: bool, both: bool, device: str) -> list[torch.Tensor]:
    places = [torch.empty_like(p, device=device) for p in float8_rounded(matrix, recipe, of_gradient, both)]
    round_by_kernels(matrix.to(device), recipe, places)
    return [place.cpu() for place in places]


@pytest.fixture(autouse=True)
def rounds_to_even(monkeypatch):
    """Have the interpreter, which loses carries and what is no number, round to 8 bits as GPUs do."""
    if IS_INTERPRETED:
        interpreter = importlib.import_module("triton.runtime.interpreter")
        real = interpreter._convert_float

        def convert(values, kind, wanted, mode):
            dtype = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}.get(str(wanted))
            if dtype is None:
                return real(values, kind, wanted, mode)
            return torch.from_numpy(values.copy()).to(dtype).view(torch.uint8).numpy()

        monkeypatch.setattr(interpreter, "_convert_float", convert)


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.double().nan_to_num(999.0), other.double().nan_to_num(999.0))


@pytest.mark.parametrize("shape", [(13, 48), (200, 272), (64, 128), (1, 16), (3, 33024)])
@pytest.mark.parametrize("of_gradient", [False, True])
@pytest.mark.parametrize("both", [False, True])
def test_both_layouts_have_the_bits_of_torch(device, recipe, shape, of_gradient, both):
    torch.manual_seed(0)
    n, k = shape
    matrix = torch.randn(shape) * torch.logspace(-6, 3, n)[:, None] * torch.logspace(-9, 1, k)
    matrix[n // 2], matrix[:, k // 2] = 0, 0
    matrix = matrix.to(torch.bfloat16)
    expected = float8_rounded(matrix, recipe, of_gradient, both)
    assert_same(by_kernels(matrix, recipe, of_gradient, both, device), expected)


def test_whatever_number_is_the_largest(device, recipe):
    """Rows whose largest numbers are all that there are, infinity and what is no number among them; or one of these
    for the whole matrix."""
    step = 1 if device == "cuda" else 127
    tops = torch.arange(0, 1 << 15, step, dtype=torch.int16).view(torch.bfloat16)
    rows = tops[:, None] * torch.linspace(-1, 1, 16).to(torch.bfloat16)
    for matrix in (rows,) if recipe == "float8_rowwise" else rows[:: max(1, len(rows) // 256)].split(1):
        assert_same(by_kernels(matrix, recipe, False, True, device), float8_rounded(matrix, recipe, False, True))


def test_numbers_halfway_between_two_are_rounded_alike(device, recipe):
    matrix = torch.linspace(-448, 448, 16 * 3585).to(torch.bfloat16).view(-1, 16)
    matrix[:, 0] = 448
    for of_gradient in (False, True):
        expected = float8_rounded(matrix, recipe, of_gradient, True)
        assert_same(by_kernels(matrix, recipe, of_gradient, True, device), expected)

"""Packed formats: values are those of the libraries that define them, packing is near, layouts hold."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.formats import QUANTIZE_CHOICES, PackedSpec, packed_format
from outcore.formats.packed import GpuForm
from tests.formats.bitsandbytes import recorded
from tests.refused import failing

HALVES = {"q8_0": (0,), "q4_0": (0,), "q4_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,)}
"""Byte offsets of fp16 numbers in a block of each ggml type."""
PACKING = {"nf4": 0.10, "int8": 0.008, "q8_0": 0.007, "q4_k": 0.075, "q6_k": 0.019}
"""Formats that can be packed into, and the root mean square error that they stay below for a unit normal."""
ALL = (*PACKING, "q4_0", "q4_1", "q5_k", "mxfp4", "fp8_128", "int4_64_fp16", "int4_128_bf16_zero")


def random_planes(name: str, num_blocks: int) -> list[torch.Tensor]:
    """Planes of any content that means finite numbers."""
    made = []
    for plane in packed_format(name).planes:
        raw = torch.randint(0, 256, (num_blocks, plane.block_bytes), dtype=torch.uint8)
        if plane.name in ("absmax", "scale"):
            made.append(torch.rand(num_blocks, plane.per_block).to(plane.dtype))
            continue
        if plane.name == "exponent":
            raw = raw % 40 + 100
        if plane.dtype == torch.float8_e4m3fn:
            raw = torch.where(raw % 128 == 127, 0, raw)  # not a number
        for at in HALVES.get(name, ()):
            raw[:, at : at + 2] = torch.randn(num_blocks, 1).half().view(torch.uint8)
        made.append(raw.view(plane.dtype))
    return made


@pytest.mark.parametrize("name", HALVES)
def test_ggml_types_mean_what_gguf_says(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    (blocks,) = random_planes(name, 64)
    expected = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(expected, packed_format(name).unpack_blocks(blocks).numpy())


def test_q8_0_is_packed_as_gguf_does_it() -> None:
    gguf = pytest.importorskip("gguf")
    value = torch.randn(64, 96)
    value[3, :32] = 0
    expected = gguf.quants.quantize(value.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(
        expected.reshape(-1), PackedSpec(packed_format("q8_0"), (64, 96)).pack(value)[: expected.size]
    )


def test_nf4_bytes_and_values_are_those_of_bitsandbytes() -> None:
    theirs = recorded("ours")
    spec = PackedSpec(packed_format("nf4"), tuple(theirs["value"].shape))
    data = spec.pack(theirs["value"])
    codes, absmax = spec.planes(data)
    assert torch.equal(theirs["codes"].flatten(), codes.flatten())
    assert torch.equal(theirs["absmax"], absmax.flatten())
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(theirs[str(dtype).removeprefix("torch.")], spec.unpack(data, dtype))


def test_mxfp4_is_read_as_transformers_reads_gpt_oss() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (2, 64, 3, 16), dtype=torch.uint8)
    scales = torch.randint(0, 200, (2, 64, 3), dtype=torch.uint8)
    spec = PackedSpec(packed_format("mxfp4"), (2, 64, 96), is_transposed=True)
    assert spec.value_shape == (2, 96, 64)
    expected = convert_moe_packed_tensors(blocks, scales)
    assert torch.equal(expected, spec.unpack(spec.assemble([blocks, scales]), torch.bfloat16))


@pytest.mark.parametrize("name", PACKING)
def test_packing_is_near_and_packing_again_changes_nothing(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(64, 256, generator=generator)
    value[5] = 0
    spec = PackedSpec(packed_format(name), (64, 256))
    read = spec.unpack(spec.pack(value))
    assert (read - value).square().mean().sqrt() < PACKING[name]
    assert torch.equal(read[5], torch.zeros(256))
    if name in ("nf4", "int8"):  # the largest of a block is a code of its own, so its scale is found again
        assert torch.equal(spec.unpack(spec.pack(read)), read)


def test_equal_weights_are_equal_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between planes, too, whatever was in memory."""
    spec = PackedSpec(packed_format("nf4"), (2, 64))
    monkeypatch.setattr(torch, "empty", lambda *size, **how: torch.full(size, 7, **how))
    data = spec.assemble(random_planes("nf4", spec.num_blocks))
    for plane in spec.planes(data):
        plane.zero_()
    assert len(data) > 256 and not data.any()


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 3), is_transposed=st.booleans())
def test_bytes_of_a_weight(name: str, rows: int, blocks: int, is_transposed: bool) -> None:
    """Planes lie apart and aligned, survive assembling, and expand in chunks as they do whole."""
    packed = packed_format(name)
    shape = (2, rows, blocks * packed.block)
    spec = PackedSpec(packed, shape, is_transposed)
    planes = random_planes(name, spec.num_blocks)
    data = spec.assemble(planes)
    assert (
        len(data)
        == spec.size_bytes
        >= packed.row_bytes(shape[-1]) * 2 * rows
        == spec.num_blocks * sum(plane.block_bytes for plane in packed.planes)
    )
    for plane, view in zip(planes, spec.planes(data), strict=True):
        assert torch.equal(plane.view(torch.uint8), view.view(torch.uint8).view(spec.num_blocks, -1))
        assert (view.data_ptr() - data.data_ptr()) % 256 == 0
    expected = packed.unpack_blocks(*planes).view(shape)
    expected = expected.transpose(1, 2) if is_transposed else expected
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(spec.unpack(data, dtype), expected.to(dtype))


def test_what_cannot_be_packed_says_so() -> None:
    with pytest.raises(ValueError, match="q4_k packs 256 values of a row together, and rows of 96"):
        _ = PackedSpec(packed_format("q4_k"), (4, 96)).size_bytes
    with pytest.raises(NotImplementedError, match="can be read in mxfp4"):
        PackedSpec(packed_format("mxfp4"), (1, 32)).pack(torch.zeros(1, 32))
    with pytest.raises(ValueError, match=r"no packed format 'nf5'. Known are nf4"):
        packed_format("nf5")


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_compiled_form_has_the_same_bits(name: str) -> None:
    """The GPU's form, through the same compiler on the CPU."""
    packed = packed_format(name)
    planes = random_planes(name, 9)
    out = torch.empty(9, packed.block, dtype=torch.bfloat16)

    GpuForm(packed).expand(out, planes)
    assert torch.equal(out, packed.unpack_blocks(*planes).to(torch.bfloat16))


def test_without_a_compiler_the_reference_does_it(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    from torch._dynamo.exc import InvalidBackend

    monkeypatch.setattr(torch, "compile", lambda *_, **__: failing(InvalidBackend("no Triton here")))
    form, planes = GpuForm(packed_format("nf4")), random_planes("nf4", 5)
    for _ in range(2):
        out = torch.empty(5, 64, dtype=torch.bfloat16)
        form.expand(out, planes)
        assert torch.equal(out, packed_format("nf4").unpack_blocks(*planes).bfloat16())
    assert len(caplog.records) == 1 and "expanded without a compiler" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_a_gpu_expands_to_the_same_bits(name: str) -> None:
    spec = PackedSpec(packed_format(name), (2, 192, 512))
    data = spec.assemble(random_planes(name, spec.num_blocks))
    assert torch.equal(spec.unpack(data.cuda(), torch.bfloat16).cpu(), spec.unpack(data, torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("name", QUANTIZE_CHOICES)
def test_a_gpu_packs_to_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = PackedSpec(packed_format(name), (2, 192, 512))
    values = torch.randn(2, 192, 512).to(torch.bfloat16)
    torch.cuda.init()
    found = spec.pack(values)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert found.device.type == "cpu" and torch.equal(found, spec.pack(values))

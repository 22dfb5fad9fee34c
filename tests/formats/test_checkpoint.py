"""Published checkpoints: what each method stores is found, read packed, and means what its own formula says."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from outcore.formats import PackedTensor
from outcore.formats.checkpoint import ExpandedEntry, PackedCheckpoint, PackedEntry, PlainEntry, open_safetensors
from tests.formats.bitsandbytes import recorded

ROWS, COLUMNS, GROUP = 32, 64, 16
STEM = "model.layers.0.self_attn.q_proj"
WEIGHT = STEM + ".weight"


def opened(tmp_path: Path, tensors: dict[str, torch.Tensor], **quantization: Any) -> PackedCheckpoint:
    tensors = {"model.norm.weight": torch.ones(COLUMNS, dtype=torch.bfloat16), **tensors}
    save_file({name: value.contiguous() for name, value in tensors.items()}, tmp_path / "model.safetensors")
    checkpoint = open_safetensors([tmp_path / "model.safetensors"], quantization)
    assert isinstance(checkpoint.entries["model.norm.weight"], PlainEntry)
    assert torch.equal(checkpoint.entries["model.norm.weight"].read(), tensors["model.norm.weight"])  # pyright: ignore
    return checkpoint


def value_of(checkpoint: PackedCheckpoint, name: str = WEIGHT, *, packed: bool = True) -> torch.Tensor:
    assert set(checkpoint.entries) == {"model.norm.weight", name}
    entry = checkpoint.entries[name]
    assert isinstance(entry, PackedEntry if packed else ExpandedEntry)
    assert bool(checkpoint.notes) != packed
    value = entry.read()
    assert tuple(entry.shape) == tuple(value.spec.value_shape if isinstance(value, PackedTensor) else value.shape)
    return value.unpack() if isinstance(value, PackedTensor) else value


def in_words(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """4-bit codes [n, 8 m] -> int32 [n, m]; field k of a word holds code `order[k]` of its eight."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for at, source in enumerate(order):
        words |= codes[:, source::8].long() << (4 * at)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def int4_case() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 16, (ROWS, COLUMNS))
    zero, scale = torch.randint(1, 16, (ROWS, COLUMNS // GROUP)), torch.rand(ROWS, COLUMNS // GROUP).half()
    wide = (tensor.repeat_interleave(GROUP, 1).float() for tensor in (zero, scale))
    return codes, zero, scale, (codes.float() - next(wide)) * next(wide)


def test_awq(tmp_path: Path) -> None:
    codes, zero, scale, expected = int4_case()
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's
    tensors = {".qweight": in_words(codes.t(), order), ".qzeros": in_words(zero.t(), order), ".scales": scale.t()}
    checkpoint = opened(tmp_path, {STEM + k: v for k, v in tensors.items()}, quant_method="awq", bits=4)
    assert torch.equal(value_of(checkpoint), expected) and checkpoint.formats == {"int4_16_fp16_zero": 1}


@pytest.mark.parametrize("act_order", [False, True])
def test_gptq(tmp_path: Path, act_order: bool) -> None:
    codes, zero, scale, expected = int4_case()
    groups = torch.arange(COLUMNS) // GROUP
    if act_order:
        groups = groups[torch.randperm(COLUMNS)]
        expected = (codes.float() - zero[:, groups]) * scale[:, groups].float()
    tensors = {".qweight": in_words_down(codes.t()), ".qzeros": in_words(zero.t() - 1)}
    tensors |= {".scales": scale.t(), ".g_idx": groups.int()}
    checkpoint = opened(tmp_path, {STEM + k: v for k, v in tensors.items()}, quant_method="gptq", bits=4)
    assert torch.equal(value_of(checkpoint, packed=not act_order), expected)


def in_words_down(codes: torch.Tensor) -> torch.Tensor:
    """[8 n, m] -> int32 [n, m]: words along the first dimension."""
    return in_words(codes.t()).t()


@pytest.mark.parametrize("symmetric", [False, True])
def test_compressed_tensors(tmp_path: Path, symmetric: bool) -> None:
    codes, zero, scale, expected = int4_case()
    tensors = {
        ".weight_packed": in_words(codes),
        ".weight_scale": scale,
        ".weight_shape": torch.tensor([ROWS, COLUMNS]),
    }
    if symmetric:
        expected = (codes.float() - 8) * scale.repeat_interleave(GROUP, 1).float()
    else:
        tensors[".weight_zero_point"] = in_words_down(zero)
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    checkpoint = opened(tmp_path, {STEM + k: v for k, v in tensors.items()}, **config)
    assert torch.equal(value_of(checkpoint), expected)


@pytest.mark.parametrize("columns, packed", [(256, True), (192, False)])
def test_fp8_in_blocks(tmp_path: Path, columns: int, packed: bool) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    codes = torch.randn(160, columns).to(torch.float8_e4m3fn)
    scale = torch.rand(2, -(-columns // 128))
    wide = scale.repeat_interleave(128, 0)[:160].repeat_interleave(128, 1)[:, :columns]
    tensors = {WEIGHT: codes, STEM + ".weight_scale_inv": scale}
    checkpoint = opened(tmp_path, tensors, quant_method="fp8", weight_block_size=[128, 128])
    assert torch.equal(value_of(checkpoint, packed=packed), codes.float() * wide)
    if packed:
        whole = Fp8Dequantize(None)._dequantize_one(codes[:128], scale[:1], torch.float32)
        assert torch.equal(value_of(checkpoint)[:128], whole.float())


@pytest.mark.parametrize("scale_shape", [(1,), (), (ROWS, 1)])
def test_fp8_by_rows_or_whole(tmp_path: Path, scale_shape: tuple[int, ...]) -> None:
    codes, scale = torch.randn(ROWS, COLUMNS).to(torch.float8_e4m3fn), torch.rand(scale_shape)
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    checkpoint = opened(tmp_path, {WEIGHT: codes, STEM + ".weight_scale": scale}, **config)
    assert torch.equal(value_of(checkpoint), codes.float() * scale)


def test_mxfp4_experts(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stem = "model.layers.0.mlp.experts.gate_up_proj"
    blocks = torch.randint(0, 256, (2, ROWS, 2, 16), dtype=torch.uint8)
    scales = torch.randint(100, 130, (2, ROWS, 2), dtype=torch.uint8)
    checkpoint = opened(tmp_path, {stem + "_blocks": blocks, stem + "_scales": scales}, quant_method="mxfp4")
    assert torch.equal(value_of(checkpoint, stem).bfloat16(), convert_moe_packed_tensors(blocks, scales))


def test_nvfp4_is_expanded(tmp_path: Path) -> None:
    codes, scale = torch.randint(0, 256, (ROWS, COLUMNS // 2), dtype=torch.uint8), torch.rand(ROWS, COLUMNS // 16)
    scale = scale.to(torch.float8_e4m3fn)
    tensors = {".weight_packed": codes, ".weight_scale": scale, ".weight_global_scale": torch.tensor([2.0])}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
    checkpoint = opened(tmp_path, {STEM + k: v for k, v in tensors.items()}, **config)
    value = value_of(checkpoint, packed=False)
    table = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    code = int(codes[3, 5]) & 0xF
    assert value[3, 10] == table[code & 7] * (-1 if code & 8 else 1) * scale[3, 0].float() / 2
    assert "expanded to 16 bits when they are read: NVFP4" in checkpoint.notes[0]


@pytest.mark.parametrize("case", ["plain", "nested"])
def test_bitsandbytes_nf4(tmp_path: Path, case: str) -> None:
    theirs = recorded(case)
    tensors = {f"{WEIGHT}.{name[6:]}": part for name, part in theirs.items() if name.startswith("state/")}
    checkpoint = opened(tmp_path, {WEIGHT: theirs["codes"], **tensors}, quant_method="bitsandbytes", load_in_4bit=True)
    assert torch.equal(value_of(checkpoint).bfloat16(), theirs["bfloat16"])


def test_bitsandbytes_int8(tmp_path: Path) -> None:
    codes, scale = torch.randint(-127, 128, (ROWS, COLUMNS), dtype=torch.int8), torch.rand(ROWS)
    checkpoint = opened(tmp_path, {WEIGHT: codes, STEM + ".SCB": scale}, quant_method="bitsandbytes", load_in_8bit=True)
    assert torch.allclose(value_of(checkpoint), codes.float() * scale[:, None] / 127, rtol=1e-6)


def test_what_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"quantized by 'aqlm'; known are fp8, mxfp4, awq"):
        opened(tmp_path, {}, quant_method="aqlm")
    with pytest.raises(RuntimeError, match="by GPTQ in 3 bits"):
        opened(tmp_path, {}, quant_method="gptq", bits=3)
    with pytest.raises(RuntimeError, match="compressed-tensors as 'marlin-24'"):
        opened(tmp_path, {}, quant_method="compressed-tensors", format="marlin-24")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    save_file({"a": torch.arange(1000)}, tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    cut, other = tmp_path / "cut.safetensors", tmp_path / "other.safetensors"
    cut.write_bytes(whole[:-100])
    other.write_bytes(b"GGUF" + whole)
    with pytest.raises(RuntimeError, match=r"cut\.safetensors is damaged or cut short: it lacks its last 100 B"):
        open_safetensors([cut], {"quant_method": "fp8"})
    with pytest.raises(RuntimeError, match=r"other\.safetensors is not a safetensors file"):
        open_safetensors([other], {"quant_method": "fp8"})
    header = json.loads(whole[8 : 8 + int.from_bytes(whole[:8], "little")])
    header["a"]["shape"] = [999]
    text = json.dumps(header).encode()
    other.write_bytes(len(text).to_bytes(8, "little") + text + whole[-8000:])
    with pytest.raises(RuntimeError, match="the header gives a 8000 bytes, its shape 7992"):
        open_safetensors([other], {"quant_method": "fp8"})

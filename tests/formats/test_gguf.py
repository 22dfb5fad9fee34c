"""GGUF files: what is written is read back by transformers and here as the same model; unknown ones are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from outcore.checkpoint.main import main
from outcore.config.commands import GGUF_KINDS
from outcore.formats import PackedTensor
from outcore.formats.checkpoint import PackedEntry
from outcore.formats.gguf_files import GgufRefused, open_gguf, write_gguf

gguf = pytest.importorskip("gguf")
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def folder_of(tmp_path: Path, model_type: str = "llama", **fields: object) -> Path:
    """A tiny model and a byte-level tokenizer, as published."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat, the dog on the log"] * 3, trainer)
    config = AutoConfig.for_model(model_type, **(SIZES | {"vocab_size": tokenizer.get_vocab_size()} | fields))
    torch.manual_seed(0)
    folder = tmp_path / model_type
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


def values_of(file: Path, folder: Path) -> tuple[dict[str, torch.Tensor], set[str]]:
    """(every parameter of the file, names of those that stay packed)."""
    stored = load_file(folder / "model.safetensors")
    checkpoint = open_gguf(file, AutoConfig.from_pretrained(folder), list(stored))
    read = {name: entry.read() for name, entry in checkpoint.entries.items()}
    values = {name: value.unpack() if isinstance(value, PackedTensor) else value for name, value in read.items()}
    return values, {name for name, entry in checkpoint.entries.items() if isinstance(entry, PackedEntry)}


@pytest.mark.parametrize("kind", GGUF_KINDS)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_what_is_written_is_read_back(tmp_path: Path, model_type: str, kind: str) -> None:
    folder = folder_of(tmp_path, model_type)
    file = write_gguf(folder, tmp_path / "model.gguf", kind)
    stored = load_file(folder / "model.safetensors")
    values, packed = values_of(file, folder)
    assert values.keys() == stored.keys() and bool(packed) == (kind != "f16")
    for name, value in stored.items():
        size = value.float().square().mean().sqrt()
        bound = {"f16": 1e-3, "q8_0": 0.01, "q4_k": 0.12}[kind]
        assert (values[name].float() - value.float()).square().mean().sqrt() <= bound * size, name
    assert not list(tmp_path.glob("*.partial"))


def test_transformers_reads_the_same_model(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    file = write_gguf(folder, tmp_path / "model.gguf", "q8_0")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    values, _ = values_of(file, folder)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter.detach(), values[name].float()), name
    assert theirs.config.rope_parameters["rope_theta"] == 10000.0 and theirs.config.num_key_value_heads == 2
    reader = gguf.GGUFReader(file)
    tokens = reader.get_field("tokenizer.ggml.tokens")
    assert tokens is not None and len(tokens.data) == theirs.config.vocab_size


def test_the_command_writes_beside_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path)
    assert main([str(folder), "--gguf", "q4_k"]) == 0
    assert (folder / "llama-q4_k.gguf").is_file() and "llama-q4_k.gguf" in capsys.readouterr().out
    assert main([str(tmp_path), "--gguf", "f16", "--out", str(tmp_path / "x.gguf")]) == 1
    assert "holds no model (config.json and safetensors)" in capsys.readouterr().err


def test_what_has_no_form_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(GgufRefused, match="written and read for llama, mistral, qwen2, qwen3, not for gpt2"):
        write_gguf(folder_of(tmp_path, "gpt2"), tmp_path / "model.gguf", "f16")
    (tmp_path / "other.gguf").write_bytes(b"no such thing, and long enough to be looked at twice")
    with pytest.raises(RuntimeError, match=r"other\.gguf is not a GGUF file"):
        open_gguf(tmp_path / "other.gguf", AutoConfig.for_model("llama"), [])
    folder = folder_of(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(GgufRefused, match=r"has no tokenizer\.json"):
        write_gguf(folder, tmp_path / "model.gguf", "f16")
    assert not (tmp_path / "model.gguf").exists()

"""GGUF files: what is written is read back by transformers and here as the same model; unknown ones are refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from outcore.checkpoint.main import main
from outcore.config.commands import GGUF_KINDS
from outcore.data import load_tokenizer
from outcore.formats import PackedTensor, open_packed
from outcore.formats.checkpoint import PackedEntry
from outcore.formats.gguf_files import GgufRefused, open_gguf, write_gguf
from outcore.model import ModelSettings, load_model, named_config
from outcore.model.facts import gguf_header

gguf = pytest.importorskip("gguf")
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


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


def test_the_command_writes_beside_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "final_model")
    monkeypatch.chdir(tmp_path)
    assert main(["llama", "--gguf", "f16"]) == 0 and (folder / "llama-f16.gguf").is_file()
    assert main([str(folder), "--gguf", "q4_k"]) == 0
    assert (folder / "llama-q4_k.gguf").is_file() and "llama-q4_k.gguf" in capsys.readouterr().out
    assert main([str(tmp_path), "--gguf", "f16", "--out", str(tmp_path / "x.gguf")]) == 2
    assert "holds no model (config.json and safetensors)" in capsys.readouterr().err
    for flags in (["--merge"], ["--adapter"], ["--last"], ["--checkpoint_dir", "."]):
        assert main(["llama", "--gguf", "q8_0", *flags]) == 2
        assert f"{flags[0]} would do nothing beside --gguf" in capsys.readouterr().err


def test_a_file_that_is_there_is_replaced_only_when_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file = folder_of(tmp_path), tmp_path / "x.gguf"
    file.write_bytes(b"somebody's")
    asked = [str(folder), "--gguf", "f16", "--out", str(file)]
    assert main(asked) == 2 and file.read_bytes() == b"somebody's"
    assert "x.gguf is there already" in capsys.readouterr().err
    assert main([*asked, "--overwrite"]) == 0 and file.read_bytes()[:4] == b"GGUF"
    assert main([str(folder), "--overwrite"]) == 2 and "goes with --gguf" in capsys.readouterr().err
    assert main([*asked[:-1], str(folder), "--overwrite"]) == 2 and "is a folder" in capsys.readouterr().err
    assert main([*asked[:-1], str(tmp_path / "y")]) == 2 and "y.gguf" in capsys.readouterr().err


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_config_and_tokenizer_are_those_of_transformers_without_its_slow_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str
) -> None:
    file = write_gguf(folder_of(tmp_path, model_type), tmp_path / "model.gguf", "q8_0")
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file=file.name)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    monkeypatch.setattr(gguf, "GGUFReader", None)  # it takes 13 s for the header of a vocabulary of 128,000
    ours = named_config(str(file))
    assert gguf_header(file) is gguf_header(file), "read once"
    said = set(SIZES) | {"rms_norm_eps", "rope_parameters", "vocab_size", "tie_word_embeddings", "model_type"}
    said |= {"bos_token_id", "eos_token_id", "head_dim"}
    told = {name: getattr(ours, name, None) for name in said}
    assert told == {name: getattr(theirs, name, None) for name in said}
    text = "the cat  sat 12 on\n the mat"
    mine = load_tokenizer(str(file))
    assert mine(text).input_ids == tokenizer(text).input_ids and mine.eos_token == tokenizer.eos_token == "</s>"
    beside = load_tokenizer(str(write_gguf(tmp_path / model_type, tmp_path / model_type / "x.gguf", "q8_0")))
    assert beside.eos_token == "</s>" and beside(text).input_ids == mine(text).input_ids


def test_a_file_that_is_cut_off_is_said_so(tmp_path: Path) -> None:
    whole = write_gguf(folder_of(tmp_path), tmp_path / "model.gguf", "q8_0").read_bytes()
    for kept in (0, 3, 20, 200, 3000, len(whole) - 1000):
        (cut := tmp_path / f"{kept}.gguf").write_bytes(whole[:kept])
        with pytest.raises(ValueError, match=r"(cut off|empty|begin with GGUF).*download it again"):
            named_config(str(cut))


def test_an_architecture_that_is_not_read_is_refused_by_its_header(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(file := tmp_path / "x.gguf", "gemma3")
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    with pytest.raises(ValueError, match=r"'gemma3'; files are read for llama, qwen2, qwen3, qwen3moe"):
        named_config(str(file))


def test_what_has_no_form_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(GgufRefused, match="written for llama, mistral, qwen2, qwen3, not for gpt2"):
        write_gguf(folder_of(tmp_path, "gpt2"), tmp_path / "model.gguf", "f16")
    (tmp_path / "other.gguf").write_bytes(b"no such thing, and long enough to be looked at twice")
    with pytest.raises(RuntimeError, match=r"other\.gguf is not a GGUF file"):
        open_gguf(tmp_path / "other.gguf", AutoConfig.for_model("llama"), [])
    folder = folder_of(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(GgufRefused, match=r"has no tokenizer\.json"):
        write_gguf(folder, tmp_path / "model.gguf", "f16")
    assert not (tmp_path / "model.gguf").exists()


def mixture_file(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A tiny mixture in llama.cpp's names and types, and what its stacked experts hold: gate and up are two tensors."""
    config = AutoConfig.for_model(
        "qwen3_moe", **SIZES, vocab_size=300, head_dim=64, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=96,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    writer, experts = gguf.GGUFWriter(file := tmp_path / "mixture.gguf", "qwen3moe"), {}
    writer.add_name("mixture")
    for add, size in (
        (writer.add_context_length, 128), (writer.add_embedding_length, 256), (writer.add_block_count, 2),
        (writer.add_feed_forward_length, 512), (writer.add_head_count, 4), (writer.add_head_count_kv, 2),
        (writer.add_key_length, 64), (writer.add_value_length, 64), (writer.add_vocab_size, 300),
        (writer.add_expert_count, 4), (writer.add_expert_used_count, 2), (writer.add_expert_feed_forward_length, 96),
        (writer.add_layer_norm_rms_eps, 1e-6), (writer.add_rope_freq_base, 10000.0),
    ):  # fmt: skip
        add(size)
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, 2)
    q8_0 = gguf.GGMLQuantizationType.Q8_0

    def put(stem: str, value: torch.Tensor, *, packs: bool) -> torch.Tensor:
        array = value.detach().numpy()
        stored = gguf.quants.quantize(array, q8_0) if packs else array
        writer.add_tensor(f"{table.get_name(stem)}.weight", stored, raw_dtype=q8_0 if packs else None)
        return torch.from_numpy(gguf.quants.dequantize(stored, q8_0)) if packs else value.detach()

    for name, value in model.named_parameters():
        if name.endswith("gate_up_proj"):  # the second layer's up stays in fp32, which cannot be laid beside q8_0
            stem, (gate, up) = name.removesuffix("gate_up_proj"), value.chunk(2, dim=1)
            halves = (put(stem + "gate_proj", gate, packs=True), put(stem + "up_proj", up, packs=".0." in name))
            experts[name] = torch.cat(halves, 1)
        elif name.endswith("down_proj"):
            experts[name] = put(name, value, packs=True)
        else:
            put(name.removesuffix(".weight"), value, packs=False)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    return file, experts


def test_a_mixture_is_read_with_its_experts_packed(tmp_path: Path) -> None:
    file, experts = mixture_file(tmp_path)
    settings = ModelSettings(model_name_or_path=str(file), precision="fp32", seq_length=2)
    loaded = load_model(settings, lazy=True, packed_feed=open_packed)
    assert (loaded.config.moe_intermediate_size, loaded.config.head_dim, loaded.config.norm_topk_prob) == (96, 64, True)
    values = {name: value for group in loaded.feed.groups() for name, value in group.items()}
    kept = {name for name, value in values.items() if isinstance(value, PackedTensor)}
    assert kept == set(experts) - {"model.layers.1.mlp.experts.gate_up_proj"}
    for name, expected in experts.items():
        value = values[name]
        found = value.unpack() if isinstance(value, PackedTensor) else value
        assert torch.equal(found.float(), expected), name


def test_a_method_says_that_it_takes_no_file(tmp_path: Path) -> None:
    """A method makes its model whole and has no --engine to leave out."""
    file = write_gguf(folder_of(tmp_path, vocab_size=320), tmp_path / "model.gguf", "f16")
    with pytest.raises(ValueError, match=r"--method sft\. Give a folder or a hub id"):
        load_model(ModelSettings(model_name_or_path=str(file), seq_length=64))

"""What a run does not train leaves an export as it came: names, bytes and files of the model that it began from."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from outcore.checkpoint.export import export_model
from outcore.formats import open_packed
from outcore.model import LoraSettings, ModelSettings, load_model
from tests.flow.models import FAMILIES, tiny_loaded
from tests.refused import failing, refused

MORE = (
    *("gpt_oss", "deepseek_v3", "glm4", "glm4_moe", "phi3", "qwen2_moe", "olmo", "olmoe", "stablelm", "starcoder2"),
    *("cohere2", "gemma", "gpt_bigcode", "granitemoe", "jamba", "falcon_h1", "smollm3", "persimmon", "ernie4_5"),
    *("exaone4", "helium", "minimax", "seed_oss", "glm", "olmo3", "qwen3_next", "arcee", "apertus", "granitemoeshared"),
)
FIRST = {"llama", "mixtral", "gpt2", "gemma3_text"}
ODD = {
    "mtp.fc.weight": torch.arange(24.0).view(4, 6).to(torch.float8_e4m3fn),
    "mtp.table": torch.arange(7, dtype=torch.uint8),
    "vision_tower.patch.bias": torch.tensor([0.1, float("nan"), -0.0]),
    "audio_tower.counts": torch.tensor([1, 65535], dtype=torch.uint16),
}
"""Tensors that no family has."""


def raw(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """(type, shape, bytes) of every tensor, by name."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                assert name not in found
                begin, end = (start + at for at in entry["data_offsets"])
                found[name] = entry["dtype"], entry["shape"], data[begin:end]
    return found


def published(folder: Path, kind: str = "llama") -> Path:
    """A tiny model as its makers publish it: 16 bits, the norms in fp32, with tensors and files that no family has."""
    loaded: Any = tiny_loaded(kind, dtype=torch.bfloat16)
    loaded.model.save_pretrained(folder)
    path = folder / "model.safetensors"
    values = load_file(path)
    values |= {name: value.float() for name, value in values.items() if "norm" in name}
    save_file(values | ODD, path, {"format": "pt"})
    (folder / "LICENSE").write_text("mine")
    (folder / "preprocessor_config.json").write_text('{"size": 3}')
    (folder / "leftover.bin").write_bytes(b"a pickle")
    return folder


def settings(base: Path, **fields: Any) -> ModelSettings:
    return ModelSettings(model_name_or_path=str(base), seq_length=16, **fields)


@pytest.mark.more(after=4)
@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt2", "gemma3_text", *sorted({*FAMILIES, *MORE} - FIRST)])
def test_what_is_not_trained_keeps_name_and_bytes(kind: str, tmp_path: Path) -> None:
    """Merged adapters, and full training of all but the embedding, over a base whose norms have another type."""
    base = raw(published(tmp_path / "base", kind))
    for way, fields in (("merged", {"lora": LoraSettings(r=2)}), ("full", {})):
        loaded = load_model(settings(tmp_path / "base", precision="bf16", **fields))
        with torch.no_grad():
            loaded.model.get_input_embeddings().requires_grad_(False)
            for name, parameter in loaded.model.named_parameters():
                if "lora_B" in name or (way == "full" and parameter.requires_grad):
                    parameter.add_(1.0)
        export_model(tmp_path / way, loaded.model, torch.Tensor.detach, origin=loaded.origin)
        found = raw(tmp_path / way)
        assert found.keys() == base.keys()
        trained = {name for name in base if found[name] != base[name]}
        assert not trained & ODD.keys() and trained
        changed = ("norm", "embed_tokens", "wte") if way == "merged" else ("embed_tokens", "wte")
        assert not [name for name in trained if any(word in name for word in changed)]
        assert (tmp_path / way / "LICENSE").read_text() == "mine"
        assert (tmp_path / way / "preprocessor_config.json").is_file()
        assert not (tmp_path / way / "leftover.bin").exists()

        loading: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / way, output_loading_info=True)
        read, told = loading
        assert not told["missing_keys"]
        assert read.config.model_type == loaded.config.model_type


def test_adapters_alone_take_nothing_along(tmp_path: Path) -> None:
    loaded = load_model(settings(published(tmp_path / "base"), lora=LoraSettings(r=2)))
    export_model(tmp_path / "out", loaded.model, torch.Tensor.detach, origin=loaded.origin, adapter_only=True)
    assert not (tmp_path / "out/LICENSE").exists() and all("lora_" in name for name in raw(tmp_path / "out"))


def test_a_packed_base_leaves_its_unknown_tensors_packed(tmp_path: Path) -> None:
    """FP8 with scales: what the run knows is expanded, and an MTP head keeps its codes and its scales."""
    published(tmp_path / "base")
    path = tmp_path / "base/model.safetensors"
    values = load_file(path)
    for name in [name for name in values if "proj" in name] + ["mtp.fc.weight"]:
        values[name] = values[name].float().to(torch.float8_e4m3fn)
        values[f"{name}_scale_inv"] = torch.ones(1, 1)
    save_file(values, path, {"format": "pt"})
    config = json.loads((tmp_path / "base/config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    base = load_model(settings(tmp_path / "base"), lazy=True, packed_feed=open_packed)
    known = {name: value for group in base.feed.groups() for name, value in group.items()}  # type: ignore[union-attr]
    names = {id(parameter): name for name, parameter in base.model.named_parameters()}

    def weight_of(parameter: torch.nn.Parameter) -> torch.Tensor:
        value: Any = known[names[id(parameter)]]
        return (value.unpack() if hasattr(value, "unpack") else value).to(parameter.dtype)

    export_model(tmp_path / "out", base.model, weight_of, origin=base.origin)
    found, before = raw(tmp_path / "out"), raw(tmp_path / "base")
    gone = {f"{name}_scale_inv" for name in before if "proj" in name and name.endswith("weight")}
    assert found.keys() == before.keys() - gone
    assert found["mtp.fc.weight"] == before["mtp.fc.weight"] and "mtp.fc.weight_scale_inv" in found
    assert {found[name][0] for name in found if "proj" in name} == {"BF16"}
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize("what", ["changed", "gone"])
def test_a_source_that_is_another_is_told_and_nothing_of_it_taken(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_model(settings(published(tmp_path / "base")))
    if what == "gone":
        shutil.rmtree(tmp_path / "base")
    else:
        path = tmp_path / "base/model.safetensors"
        save_file({**load_file(path), "mtp.fc.weight": torch.zeros(3)}, path, {"format": "pt"})
    export_model(tmp_path / "out", loaded.model, torch.Tensor.detach, origin=loaded.origin)
    assert f"model.safetensors {'is gone' if what == 'gone' else 'has changed'}" in caplog.text
    assert "MTP heads, towers" in caplog.text
    assert not raw(tmp_path / "out").keys() & ODD.keys() and not (tmp_path / "out/LICENSE").exists()


def test_a_source_cut_short_while_it_is_copied_leaves_no_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(settings(published(tmp_path / "base")))
    path = tmp_path / "base/model.safetensors"

    def weight_of(parameter: torch.nn.Parameter) -> torch.Tensor:
        path.write_bytes(path.read_bytes()[:-64])
        return parameter.detach()

    refused(RuntimeError, "has changed while the model was exported", lambda: export_model(
        tmp_path / "out", loaded.model, weight_of, origin=loaded.origin))  # fmt: skip
    assert [entry.name for entry in tmp_path.iterdir()] == ["base"]


def test_a_full_drive_leaves_no_export_and_the_older_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(settings(published(tmp_path / "base")))
    export = lambda: export_model(tmp_path / "out", loaded.model, torch.Tensor.detach, origin=loaded.origin)  # noqa: E731
    export()
    before = raw(tmp_path / "out")
    monkeypatch.setattr("outcore.checkpoint.export.carried.copy_file", failing(OSError(28, "No space left on device")))
    refused(OSError, "No space left", export)
    assert raw(tmp_path / "out") == before and sorted(p.name for p in tmp_path.iterdir()) == ["base", "out"]


def test_two_shards_with_one_tensor_are_refused(tmp_path: Path) -> None:
    folder = published(tmp_path / "base")
    values = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(values)
    for number, part in ((1, names[:5]), (2, names[4:])):
        save_file({name: values[name] for name in part}, folder / f"model-0000{number}-of-00002.safetensors")
    weight_map = {name: f"model-0000{1 if name in names[:5] else 2}-of-00002.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    refused(RuntimeError, f"{names[4]}, which model-00001-of-00002.safetensors holds as well",
            lambda: load_model(settings(folder), lazy=True))  # fmt: skip


def test_files_of_another_tokenizer_are_left_out(tmp_path: Path) -> None:
    mine, theirs = byte_tokenizer("a b"), byte_tokenizer("c d")
    folder = published(tmp_path / "base")
    theirs.save_pretrained(folder)
    (folder / "tokenizer.model").write_bytes(b"pieces")
    loaded = load_model(settings(folder))
    for name, tokenizer, is_there in (("same", theirs, True), ("other", mine, False)):
        export_model(tmp_path / name, loaded.model, torch.Tensor.detach, tokenizer=tokenizer, origin=loaded.origin)
        assert (tmp_path / name / "tokenizer.model").exists() == is_there
        assert (tmp_path / name / "LICENSE").is_file()


def byte_tokenizer(text: str) -> Any:
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(text.split())}, "a"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made)


def test_other_formats_of_the_old_weights_stay_behind(tmp_path: Path) -> None:
    base = published(tmp_path)
    stays = ("rust_model.ot", "model.onnx_data", "flax.npz", "adapter_config.json", "quantize_config.json", ".hidden")
    goes = ("LICENSE", "NOTICE.txt", "preprocessor_config.json")
    loaded = load_model(settings(base))
    for name in (*stays, *goes):
        (base / name).write_text("{}")
    export_model(tmp_path / "out", loaded.model, lambda p: p.detach(), origin=loaded.origin)
    there = {path.name for path in (tmp_path / "out").iterdir()}
    assert there >= set(goes) and not there & set(stays)

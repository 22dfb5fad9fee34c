"""A resumed run has the tokenizer and the base that it was made with, known by their content; others are refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from outcore.checkpoint import CheckpointError
from outcore.checkpoint.materials import base_material
from outcore.cli import main
from outcore.data import ids_hash, train_byte_bpe
from outcore.infer.opening import open_model
from tests.data.fixtures import sentence, write_jsonl
from tests.formats.bitsandbytes import recorded
from tests.formats.test_checkpoint import in_words, in_words_down
from tests.infer.models import save_tiny_model
from tests.refused import refused
from tests.train.jobs import fixtures, flags, metrics

corpus, shared, straight, straight_by, in_the_repository = fixtures
RESUME = ["--resume_from_checkpoint", "auto"]
ON_PURPOSE = [*RESUME, "--continue_with_changes"]


def argv(root: Path, data: Path, *extra: str) -> list[str]:
    common = ["--run_name", "r", "--eval_steps", "0", "--precision", "fp32", "--lr_scheduler_type", "constant"]
    return ["train", *flags(root, data, *common, *extra)]


def texts(path: Path, first: int) -> Path:
    return write_jsonl(
        path, [{"text": sentence(n, 12 + n % 9) + " qz" * (first > 0)} for n in range(first, first + 90)]
    )


def tokenizer_in(folder: Path) -> str:
    return ids_hash(AutoTokenizer.from_pretrained(folder))


OWN = ["--model_module", "examples/my_model.py:build"]


@pytest.mark.parametrize("more", [[], pytest.param(OWN, marks=pytest.mark.more)])
def test_a_run_goes_on_with_its_own_tokenizer_when_its_data_changes(tmp_path: Path, more: list[str], capsys) -> None:
    """Trained on the data, where none is named: on other data another one would come of it."""
    data = texts(tmp_path / "a.jsonl", 0)
    assert main(argv(tmp_path, data, "--max_steps", "2", *more)) == 0
    first = tokenizer_in(tmp_path / "export/r")
    texts(data, 500)
    capsys.readouterr()
    assert main(argv(tmp_path, data, "--max_steps", "3", *RESUME, *more)) == 1
    said = capsys.readouterr().err
    assert "made with schedule total_steps" in said or "the data position cannot be restored" in said
    assert main(argv(tmp_path, data, "--max_steps", "3", *ON_PURPOSE, *more)) == 0
    assert "training a byte-level BPE" not in capsys.readouterr().out
    assert tokenizer_in(tmp_path / "export/r") == first
    damaged = tmp_path / "checkpoint/r/step-00000003/export/tokenizer.json"
    damaged.write_bytes(damaged.read_bytes()[:-9])  # with nothing to go on with, and other data
    assert main(argv(tmp_path, data, "--max_steps", "5", *ON_PURPOSE, *more)) == 1
    assert "was made with the tokenizer trained on" in capsys.readouterr().err


def test_another_tokenizer_of_the_same_size_is_refused_and_a_copy_is_not(tmp_path: Path, capsys) -> None:
    data = texts(tmp_path / "a.jsonl", 0)
    for name, word in (("one", "abc"), ("other", "xyz")):
        found = train_byte_bpe([f"{word}{n} " * 9 for n in range(99)], 560)
        found.save_pretrained(tmp_path / name)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "one")) == len(
        AutoTokenizer.from_pretrained(tmp_path / "other")
    )
    one, other, copy = (["--tokenizer_name_or_path", str(tmp_path / name)] for name in ("one", "other", "copy"))
    assert main(argv(tmp_path, data, "--max_steps", "2", *one)) == 0
    assert main(argv(tmp_path, data, "--max_steps", "3", *other, *ON_PURPOSE)) == 1
    said = capsys.readouterr().err
    assert f"made with the tokenizer {tmp_path / 'one'}, and {tmp_path / 'other'} is another one" in said
    assert f"Resume with the tokenizer {tmp_path / 'one'}, or start" in said
    assert "its token ids mean other pieces" in said and "model" not in said.replace("model's", "")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    assert main(argv(tmp_path, data, "--max_steps", "3", *copy, *ON_PURPOSE)) == 0
    shutil.rmtree(tmp_path / "copy")
    shutil.copytree(tmp_path / "other", tmp_path / "copy")
    assert main(argv(tmp_path, data, "--max_steps", "4", *copy, *ON_PURPOSE)) == 1
    assert f"{tmp_path / 'copy'} has changed since" in capsys.readouterr().err
    assert main(argv(tmp_path, data, "--max_steps", "4", *ON_PURPOSE)) == 0, "none named: the checkpoint's"
    assert tokenizer_in(tmp_path / "export/r") == tokenizer_in(tmp_path / "one")


def change(folder: Path, seed: int = 7) -> None:
    """Other weights of the same shapes."""
    file = folder / "model.safetensors"
    save_file({name: value * 1.01 for name, value in load_file(file).items()}, file, metadata={"format": "pt"})


def trained(root: Path, base: Path, *extra: str) -> list[str]:
    """The command of a LoRA run that was trained for 2 steps over the base, to go on with 3."""
    data = texts(root / "a.jsonl", 0)
    common = ["--model_name_or_path", str(base), "--lora_r", "2", *extra]
    assert main(argv(root, data, "--max_steps", "2", *common)) == 0
    return argv(root, data, "--max_steps", "3", *common, *ON_PURPOSE)


def test_a_base_with_other_weights_is_refused_by_every_command(tmp_path: Path, capsys) -> None:
    base = tmp_path / "base"
    save_tiny_model(base)
    on = trained(tmp_path, base)
    shutil.copytree(base, tmp_path / "kept")
    change(base)
    before = (tmp_path / "log/r/metrics.jsonl").read_bytes()
    assert main(on) == 1
    words = f"was made with the base {base}, and {base} has changed since: the adapter was trained over other weights"
    assert words in capsys.readouterr().err
    assert (tmp_path / "log/r/metrics.jsonl").read_bytes() == before
    step = tmp_path / "checkpoint/r/step-00000002"
    assert main(["export", str(step), "--merge", "--out", str(tmp_path / "merged")]) == 1
    assert words in capsys.readouterr().err and not (tmp_path / "merged").exists()
    refused((ValueError, CheckpointError), "has changed since", lambda: open_model(str(step), precision="fp32"))
    other = [word if word != str(base) else str(tmp_path / "kept") for word in on]
    assert main(other) == 0, "a copy elsewhere is the same base"
    assert metrics(tmp_path)[-1]["step"] == 3


def test_a_base_is_the_same_however_it_is_cut_into_files(tmp_path: Path) -> None:
    base = tmp_path / "base"
    model, _ = save_tiny_model(base)
    was = base_material(str(base), whole=True)
    model.save_pretrained(tmp_path / "cut", max_shard_size="100KB")
    assert len(list((tmp_path / "cut").glob("*.safetensors"))) > 2
    now = base_material(str(tmp_path / "cut"), "abc123", whole=True)
    assert (now.content, now.whole) == (was.content, was.whole)
    assert now.name == f"{tmp_path / 'cut'} (commit abc123)"


def test_every_byte_of_a_base_is_compared_on_request(tmp_path: Path, capsys) -> None:
    base = tmp_path / "base"
    save_tiny_model(base)
    on = trained(tmp_path, base, "--base_hash", "whole")
    sampled = [word for word in on if word not in ("--base_hash", "whole")]
    kept = load_file(base / "model.safetensors")
    embedding = kept["model.embed_tokens.weight"]
    embedding.view(-1)[-1] += 1  # behind the last piece that is sampled
    save_file(kept, base / "model.safetensors", metadata={"format": "pt"})
    assert main(on) == 1
    assert "has changed since" in capsys.readouterr().err
    assert main(sampled) == 0
    kept["model.norm.weight"][3] += 1  # small tensors are sampled whole
    save_file(kept, base / "model.safetensors", metadata={"format": "pt"})
    assert main([*sampled, "--max_steps", "4"]) == 1


def test_a_base_that_is_stored_packed_is_known_again(tmp_path: Path, capsys) -> None:
    base = tmp_path / "base"
    save_tiny_model(base, hidden_size=64, intermediate_size=128)
    file = tmp_path / "base.gguf"
    assert main(["export", str(base), "--gguf", "q8_0", "--out", str(file)]) == 0
    on = trained(tmp_path, file)
    loaded = open_model(str(tmp_path / "checkpoint/r"), precision="fp32").loaded
    assert any("lora_" in name for name, _ in loaded.model.named_parameters())
    assert main(["export", str(tmp_path / "checkpoint/r"), "--merge", "--out", str(tmp_path / "merged")]) == 1
    assert f"no base to merge into ({file})" in capsys.readouterr().err
    change(base)
    assert main(["export", str(base), "--gguf", "q8_0", "--out", str(file), "--overwrite"]) == 0
    assert main(on) == 1
    assert f"the base {file}, and {file} has changed since" in capsys.readouterr().err


GROUP = 16


def as_gptq(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """By 4 bits with a scale and a zero for each group of a row."""
    rows, columns = value.shape
    scale = (value.float().view(rows, -1, GROUP).abs().amax(-1) / 7).half()
    wide = scale.float().repeat_interleave(GROUP, 1)
    codes = (value.float() / wide).round().clamp(-8, 7).long() + 8
    zero = torch.full_like(scale, 8).long()
    return {
        "qweight": in_words_down(codes.t()), "qzeros": in_words(zero.t() - 1), "scales": scale.t(),
        "g_idx": torch.arange(columns, dtype=torch.int32) // GROUP,
    }  # fmt: skip


def as_int8(value: torch.Tensor) -> dict[str, torch.Tensor]:
    """As bitsandbytes stores 8 bits: a scale for each row."""
    scale = value.float().abs().amax(1)
    return {"weight": (value.float() / scale[:, None] * 127).round().to(torch.int8), "SCB": scale}


STORED = {
    "gptq": (as_gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "bitsandbytes, 8 bits": (as_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}


@pytest.mark.more(after=1)
@pytest.mark.parametrize("method", STORED)
def test_a_base_that_is_published_packed_is_known_again_by_each_of_its_planes(
    tmp_path: Path, method: str, capsys
) -> None:
    pack, quantization = STORED[method]
    base = tmp_path / "base"
    save_tiny_model(base, hidden_size=64, intermediate_size=128)
    tensors: dict[str, torch.Tensor] = {}
    for name, value in load_file(base / "model.safetensors").items():
        stem = name.removesuffix("weight")
        tensors |= {stem + key: part for key, part in pack(value).items()} if "proj" in name else {name: value}
    tensors = {name: value.contiguous() for name, value in tensors.items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text()) | {"quantization_config": quantization}
    (base / "config.json").write_text(json.dumps(config))
    on = trained(tmp_path, base)
    stem = next(name for name in tensors if "q_proj" in name).rpartition(".")[0]
    for plane in [name for name in tensors if name.startswith(stem)]:
        changed = tensors[plane].clone()
        changed.view(-1)[-1] += 1
        save_file(tensors | {plane: changed}, base / "model.safetensors", metadata={"format": "pt"})
        assert main(on) == 1, plane
        assert f"was made with the base {base}, and {base} has changed since" in capsys.readouterr().err
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    assert main(on) == 0


@pytest.mark.parametrize("case", ["plain", "nested"])
def test_planes_of_nf4_are_part_of_a_bases_content(tmp_path: Path, case: str) -> None:
    """Codes, scales and the tables beside them, as bitsandbytes records them."""
    stored = {name: part.contiguous() for name, part in recorded(case).items() if name != "bfloat16"}
    seen = set()
    for changed in (None, *stored):
        one = {} if changed is None else {changed: stored[changed].view(-1).view(torch.uint8) ^ 1}
        save_file(stored | one, tmp_path / "model.safetensors", metadata={"format": "pt"})
        seen.add(base_material(str(tmp_path)).content)
    assert len(seen) == 1 + len(stored) > 3


def test_a_full_run_goes_on_whatever_became_of_where_it_began(tmp_path: Path) -> None:
    """Its checkpoint has every weight."""
    base, data = tmp_path / "base", texts(tmp_path / "a.jsonl", 0)
    save_tiny_model(base)
    common = ["--model_name_or_path", str(base)]
    assert main(argv(tmp_path, data, "--max_steps", "2", *common)) == 0
    change(base)
    assert main(argv(tmp_path, data, "--max_steps", "3", *common, *ON_PURPOSE)) == 0


def test_checkpoints_of_older_versions_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not tell what they were made of, but hold their tokenizer."""
    base = tmp_path / "base"
    save_tiny_model(base)
    with monkeypatch.context() as patch:
        patch.setattr("outcore.train.run.assemble.settle_materials", lambda *_: {})
        on = trained(tmp_path, base)
    change(base)
    torch.manual_seed(0)
    assert main(on) == 0

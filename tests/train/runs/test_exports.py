"""Runs over a published model: what they do not train of it is in their exports, at the end and from a checkpoint."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outcore.cli import main
from tests.train.jobs import fixtures, flags, weights

corpus, shared, straight, straight_by, in_the_repository = fixtures
HEAD = torch.arange(12.0).view(3, 4).to(torch.float8_e4m3fn)


@pytest.fixture
def base(tmp_path: Path, straight: Path) -> Path:
    """A trained model with some weights in fp32, an MTP head that this
    architecture does not know, and a licence."""
    folder = shutil.copytree(straight / "export/r", tmp_path / "base")
    (folder / "outcore-checksums.json").unlink()
    values = load_file(folder / "model.safetensors")
    values |= {name: value.float() for name, value in values.items() if "norm" in name or "embed" in name}
    save_file(values | {"mtp.fc.weight": HEAD}, folder / "model.safetensors", {"format": "pt"})
    (folder / "LICENSE").write_text("mine")
    return folder


def has_head(folder: Path) -> bool:
    found = weights(folder).get("mtp.fc.weight")
    return found is not None and found.dtype == HEAD.dtype and torch.equal(found.float(), HEAD.float())


def test_an_mtp_head_goes_through_a_run_its_resume_and_its_checkpoints(
    tmp_path: Path, corpus: Path, base: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    argv = flags(tmp_path, corpus, "--model_name_or_path", str(base), "--run_name", "r", "--eval_steps", "0")
    argv = ["train", *argv, "--precision", "bf16", "--save_steps", "1", "--max_steps", "2", "--lr", "1e-2"]
    assert main(argv) == 0
    export = lambda name: main(["export", str(tmp_path / "checkpoint/r"), "--out", str(tmp_path / name)])  # noqa: E731
    assert export("later") == 0
    for folder in (tmp_path / "export/r", tmp_path / "later"):
        assert has_head(folder) and (folder / "LICENSE").read_text() == "mine"
        assert not torch.equal(weights(folder)["model.norm.weight"], weights(base)["model.norm.weight"])
    # The same weights in other files are the same source; other weights are not.
    moved = load_file(base / "model.safetensors")
    save_file(moved, base / "model.safetensors", {"format": "pt", "moved": "yes"})
    assert export("moved") == 0 and has_head(tmp_path / "moved") and not caplog.text
    save_file(moved | {"model.norm.weight": moved["model.norm.weight"] + 1}, base / "model.safetensors")
    assert export("changed") == 0 and not has_head(tmp_path / "changed")
    assert "it has changed since the run began from it" in caplog.text and "MTP heads" in caplog.text
    capsys.readouterr()
    start = str(tmp_path / "checkpoint/r/step-00000001")
    assert main([*argv, "--run_name", "again", "--resume_from_checkpoint", start]) == 0
    said = capsys.readouterr()
    assert "is not what the run began from" in said.out + said.err and has_head(tmp_path / "export/again")
    caplog.clear()
    shutil.rmtree(base)
    assert export("gone") == 0 and not has_head(tmp_path / "gone")
    assert "MTP heads" in caplog.text


def test_an_adapter_is_merged_beside_the_mtp_head(tmp_path: Path, corpus: Path, base: Path) -> None:
    argv = flags(tmp_path, corpus, "--model_name_or_path", str(base), "--run_name", "r", "--eval_steps", "0")
    more = ["--lora_r", "2", "--lora_modules_to_save", "embed_tokens,lm_head", "--max_steps", "2", "--save_steps", "2"]
    assert main(["train", *argv, *more, "--lr", "1e-2"]) == 0
    assert main(["export", str(tmp_path / "checkpoint/r"), "--merge", "--out", str(tmp_path / "later")]) == 0
    before = weights(base)
    for folder in (tmp_path / "export/r", tmp_path / "later"):
        found = weights(folder)
        assert has_head(folder) and (folder / "LICENSE").is_file() and found.keys() == before.keys()
        changed = {name for name in found if not torch.equal(found[name].float(), before[name].float())}
        assert "model.embed_tokens.weight" in changed and any("q_proj" in name for name in changed)
        norms = {name for name in found if "norm" in name}
        assert norms and not norms & changed and {found[name].dtype for name in norms} == {torch.float32}
